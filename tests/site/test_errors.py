"""The reference has each error of the package, with its cause and what to write instead."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs/_extensions"))

from messages import PARTS, REMEDIES, messages  # noqa: E402

ALL = [each for part in PARTS for each in messages(part)]
PAGE = (ROOT / "docs/reference/errors.md").read_text()


def test_each_error_of_the_package_has_a_cause_and_says_what_to_write() -> None:
    assert len(ALL) > 350
    assert {each.path.partition("/")[0] for each in ALL} == {"fabric", "strategies", "launchers"}
    incomplete = [f"{each.path}: {each.words}" for each in ALL if not all(each.parts)]
    assert not incomplete, "end the message with what to write, or add it to `REMEDIES` in docs/_extensions/messages.py"


def test_each_remedy_that_the_pages_add_belongs_to_an_error_of_today() -> None:
    assert not [words for words in REMEDIES if not any(words in each.words for each in ALL)]


def test_each_class_of_errors_has_a_row() -> None:
    assert {each.kind for each in ALL if f"`{each.kind}`" not in PAGE} == set()


def test_a_remedy_begins_outside_of_code() -> None:
    (message,) = [each for each in ALL if "write=True, for_forward=True" in each.words]
    cause, remedy = message.parts
    assert "forwards run with copies of the weights" in cause
    assert remedy.startswith("Write in one context")
