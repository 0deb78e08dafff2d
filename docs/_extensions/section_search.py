"""A search index by section: the site's search then answers with headings, not with whole pages.

Each section and each documented name is an entry: page, title, anchor, the titles above it, and its words, stemmed as
Sphinx's own search stems a query. `_static/section_search.js` ranks them. The index is a script and no JSON, because a
page that was opened as a file may not fetch one.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.search import languages

WORD = re.compile(r"[^\W_]+(?:_[^\W_]+)*")


class Words:
    """Text to terms: whole identifiers, their parts, and stems."""

    def __init__(self) -> None:
        from sphinx.search.en import SearchEnglish

        assert "en" in languages
        self._language = SearchEnglish({})
        self._stems: dict[str, str] = {}

    def __call__(self, text: str) -> list[str]:
        found = []
        for word in WORD.findall(text.lower()):
            parts = [word, *word.split("_")] if "_" in word else [word]
            found += [self._stem(part) for part in parts if part]
        return found

    def _stem(self, word: str) -> str:
        if word not in self._stems:
            self._stems[word] = self._language.stem(word)
        return self._stems[word]


def entries(docname: str, doctree: nodes.document) -> list[dict[str, Any]]:
    """The sections and the documented names of a page."""
    found: list[dict[str, Any]] = []

    def visit(node: nodes.Element, titles: list[str], into: dict[str, Any]) -> None:
        for child in node.children:
            if isinstance(child, nodes.section):
                title = child.next_node(nodes.title)
                words = title.astext() if title is not None else ""
                anchor = "" if not titles else "#" + child["ids"][0]
                entry = {"page": docname, "title": words, "anchor": anchor, "above": list(titles), "text": []}
                found.append(entry)
                visit(child, [*titles, words], entry)
            elif isinstance(child, addnodes.desc):
                signature = child.next_node(addnodes.desc_signature)
                ids = signature.get("ids", []) if signature is not None else []
                if not ids:
                    visit(child, titles, into)
                    continue
                name = ids[0].rpartition(".")[2]
                entry = {"page": docname, "title": name, "anchor": "#" + ids[0], "above": list(titles), "text": []}
                found.append(entry)
                entry["text"].append(signature.astext())
                visit(child, [*titles, name], entry)
            elif isinstance(child, (nodes.title, addnodes.desc_signature, nodes.comment, nodes.raw)):
                continue
            elif isinstance(child, nodes.TextElement):
                into["text"].append(child.astext())
            elif isinstance(child, nodes.Element):
                visit(child, titles, into)

    visit(doctree, [], {"text": []})
    return found


def write(app: Sphinx, failure: Exception | None) -> None:
    """The index, beside the scripts of the theme."""
    if failure or app.builder.format != "html":
        return
    words, index, documents = Words(), {}, []
    for docname in sorted(app.env.found_docs):
        for entry in entries(docname, app.env.get_doctree(docname)):
            number, text = len(documents), " ".join(" ".join(entry["text"]).split())
            body = Counter(words(text))
            documents.append([
                docname, entry["title"], entry["anchor"], " > ".join(entry["above"]),
                text[:180], sum(body.values()),
            ])  # fmt: skip
            counts: dict[str, list[int]] = {}
            above = entry["above"] or [entry["title"]]  # a page is above itself, or its sections would come before it
            for field, terms in enumerate((words(entry["title"]), words(" ".join(above)), body.elements())):
                for term, count in Counter(terms).items():
                    counts.setdefault(term, [0, 0, 0])[field] = count
            for term, count in counts.items():
                index.setdefault(term, []).append([number, *count])
    content = json.dumps({"documents": documents, "index": index}, separators=(",", ":"), ensure_ascii=False)
    Path(app.outdir, "_static", "section_index.js").write_text(f"const SECTIONS = {content};\n")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", write)
    return {"parallel_read_safe": True}
