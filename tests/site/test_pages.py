"""The four parts of the site, and what each of them has to answer."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

HOW_TO = {
    "accumulate": "Gradient accumulation",
    "weight-by-tokens": "Weight the loss by tokens",
    "evaluate": "Evaluate",
    "early-stopping": "Early stopping",
    "best-checkpoint": "best checkpoint",
    "resume": "Resume training",
    "preemption": "Preemption",
    "hangs": "hangs",
    "notebooks": "Notebooks",
    "slurm": "SLURM",
    "kubernetes": "Kubernetes",
    "tpu": "TPU",
    "fsdp": "Memory under FSDP",
    "choose-a-strategy": "Bytes per parameter",
    "deepspeed": "DeepSpeed's configuration",
    "optimizers": "Optimizers",
    "lora": "LoRA, other adapters, and quantised models",
    "mixed-precision": "Mixed precision",
    "compile": "torch.compile",
    "own-strategy": "strategy of your own",
    "own-check": "check of your own",
    "own-environment": "environment",
    "own-logger": "logger of your own",
    "seeds": "Random seeds, shuffling and augmentation",
    "profiling": "throughput",
    "migrate": "Migrat",
}
"""Each question that a how-to page answers, in words of its title or of a heading."""


def headings(page: Path) -> str:
    return "\n".join(re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)).lower()


@pytest.mark.parametrize("page", HOW_TO)
def test_a_question_has_a_page_whose_headings_have_its_words(page: str) -> None:
    assert HOW_TO[page].lower() in headings(DOCS / f"how-to/{page}.md")


def test_the_tutorial_is_one_path_of_six_pages() -> None:
    pages = sorted(path.stem for path in (DOCS / "tutorial").glob("[0-9]*.md"))
    assert [name[0] for name in pages] == list("123456")
    index = (DOCS / "tutorial/index.md").read_text()
    assert [index.index(name) for name in pages] == sorted(index.index(name) for name in pages)


@pytest.mark.parametrize("page", ["lightning", "accelerate", "torchrun"])
def test_a_page_of_another_library_has_a_script_before_and_after_and_tables(page: str) -> None:
    text = (DOCS / f"coming-from/{page}.md").read_text()
    assert "```python\n" in text
    assert "```py\n" in text or "```diff\n" in text, "the script before, or the lines that change in it"
    for heading in ("## What differs, and why", "## Names"):
        assert re.search(rf"^{heading}$.*?^\|", text, re.MULTILINE | re.DOTALL)


def test_each_picture_of_a_terminal_is_in_a_page() -> None:
    shown = "".join(page.read_text() for page in DOCS.rglob("*.md"))
    for picture in (DOCS / "_static/terminal").glob("*.svg"):
        assert f"_static/terminal/{picture.name}" in shown


def test_the_readme_is_short_and_each_reason_to_stay_has_a_proof() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    reasons = text[text.index("## Why stay") : text.index("## Strategies")].split("\n- ")[1:]
    assert len(reasons) > 6
    assert [each[:40] for each in reasons if "Proof:" not in each] == []
