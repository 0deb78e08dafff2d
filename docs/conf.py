"""The site: `make docs`. Everything is local: no network at build, and none when the pages are read."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "torchfabric"
author = "the authors of torchfabric"
release = version = "0.1.0"
html_title = "torchfabric"
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "reference", "section_search"]
exclude_patterns = ["_build"]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["myst.header"]  # a generated list of names begins below the level of its page

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings name the types that matter; overloads would hide the arguments
add_module_names = False
maximum_signature_line_length = 88
python_use_unqualified_type_names = True

html_theme = "pydata_sphinx_theme"
html_static_path = ["_static"]
templates_path = ["_templates"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False  # a summary is fetched, which pages opened as files may not do; ours is in the index
html_theme_options = {
    "navbar_persistent": ["search-field"],
    "navbar_end": ["theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": [],
    "footer_end": [],
    "show_prev_next": True,
    "show_nav_level": 1,
    "navigation_with_keys": False,
    "header_links_before_dropdown": 8,
}
html_sidebars = {"index": []}
