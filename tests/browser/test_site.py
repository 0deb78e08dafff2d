"""The site that `make docs` builds, in a real browser: pages from files, light and dark, answers to questions.

`questions.tsv` has a question in a line, in the words of the thread in its last column (a repository and a number on
GitHub), and the page and heading that answer it (`*`: any heading of the page). One that begins with `*` is a word that
earlier readers searched for and did not find: its answer is to be the first result, the others' among the first three.
"""

import csv
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, unquote, urldefrag

import pytest
from browser import Page, browser

SITE = Path(__file__).parents[2] / "build/site"
with (Path(__file__).parent / "questions.tsv").open() as file:
    QUESTIONS = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))

RESULTS = """new Promise(resolve => {
    const look = () => {
        const links = [...document.querySelectorAll("#search-results ul.search li a")];
        const said = document.querySelector("#search-results").innerText;
        if (links.length >= 3 || /matching|did not match/.test(said) && (links.length || /did not match/.test(said)))
            resolve(JSON.stringify(links.slice(0, 3).map(link => [link.getAttribute("href"), link.textContent])));
        else setTimeout(look, 20);
    };
    look();
})"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    assert (SITE / "index.html").exists(), "run `make docs`"
    with browser(tmp_path_factory.mktemp("browser")) as one:
        yield one


def found(page: Page, question: str) -> list[tuple[str, str]]:
    """The first three results of the site's search: page, heading."""
    page.open(f"{(SITE / 'search.html').resolve().as_uri()}?q={quote(question)}")
    results = json.loads(page.run(RESULTS))
    assert page.errors == []
    return [(href.partition("#")[0].removesuffix(".html"), text) for href, text in results]


def place(results: list[tuple[str, str]], where: str, heading: str) -> int:
    """Which result has the answer, from 1; 0: none."""
    for number, (name, text) in enumerate(results, start=1):
        if name == where and (heading == "*" or text == heading or text.startswith(f"{heading} (")):
            return number
    return 0


def test_fifty_questions_are_answered_by_the_search_of_the_site(page: Page) -> None:
    assert len({row["question"] for row in QUESTIONS}) >= 50
    first = [row for row in QUESTIONS if row["question"].startswith("*")]
    assert len(first) == 15
    assert all(row["thread"] for row in QUESTIONS if row not in first)
    places = {row["question"]: place(found(page, row["question"].lstrip("*")), row["page"], row["heading"])
              for row in QUESTIONS}  # fmt: skip
    assert {row["question"]: places[row["question"]] for row in first} == {row["question"]: 1 for row in first}
    missed = [question for question, number in places.items() if number == 0]
    assert len(missed) <= 2, missed


def test_a_word_that_no_page_has_is_not_found(page: Page) -> None:
    assert found(page, "zyzzyva") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_open_as_files_and_ask_nobody_else(page: Page, scheme: str) -> None:
    colors = []
    for name in ("index", "tutorial/5-when-it-goes-wrong", "reference/fabric", "how-to/fsdp"):
        page.open(SITE / f"{name}.html", scheme="dark" if scheme == "dark" else "light")
        assert page.errors == []
        assert all(address.startswith(("file:", "data:")) for address in page.requests), page.requests
        page.picture(f"site-{name.replace('/', '-')}-{scheme}")
        colors.append(page.run("getComputedStyle(document.body).backgroundColor"))
    (color,) = set(colors)
    brightness = sum(int(part) for part in re.findall(r"\d+", color)[:3]) / 3
    assert brightness > 200 if scheme == "light" else brightness < 60, color


class Links(HTMLParser):
    """What a page links to, and what it can be linked at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.resources: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name"):
                self.anchors.add(value or "")
            if name == "href" and tag == "a":
                self.links.append(value or "")
            if name == "src" or (name == "href" and tag == "link"):
                self.resources.append(value or "")


def test_links_within_the_site_lead_to_files_and_anchors_and_nothing_is_fetched_from_elsewhere() -> None:
    pages = {path: Links(path.read_text()) for path in SITE.rglob("*.html") if "_static" not in path.parts}
    assert len(pages) > 50
    broken = []
    for path, seen in pages.items():
        broken += [f"{path.name}: {each}" for each in seen.resources if "//" in each and not each.startswith("data:")]
        for link in seen.links + seen.resources:
            if "//" in link or link.startswith(("mailto:", "data:")):
                continue
            target, anchor = urldefrag(unquote(link.partition("?")[0]))
            file = (path.parent / target).resolve() if target else path
            if not file.exists() or (anchor and file in pages and anchor not in pages[file].anchors | {"#"}):
                broken.append(f"{path.relative_to(SITE)}: {link}")
    assert not broken


def test_the_reference_has_each_public_name_each_option_of_each_strategy_and_each_option_of_each_command() -> None:
    from dataclasses import fields

    import fabric
    from fabric import strategies, testing
    from fabric.cli import parser

    pages = {path.stem: Links(path.read_text()).anchors for path in (SITE / "reference").glob("*.html")}
    assert {f"fabric.{name}" for name in fabric.__all__} <= pages["fabric"]
    assert {f"fabric.testing.{name}" for name in testing.__all__} <= pages["testing"]
    classes = [getattr(strategies, name) for name in strategies.__all__]
    classes = [each for each in classes if isinstance(each, type) and issubclass(each, strategies.Strategy)]
    for each in set(classes) - {strategies.Strategy}:
        options = {f"fabric.strategies.{each.__name__}.{field.name}" for field in fields(each) if field.init}
        assert options <= pages["strategies"]
    assert {f"fabric.strategies.{name}" for name in strategies.__all__} <= pages["strategies"] | pages["parts"]
    commands = (SITE / "reference/commands.html").read_text()
    (subcommands,) = [each for each in parser()._actions if isinstance(each.choices, dict)]
    for command in subcommands.choices.values():  # type: ignore[union-attr]
        for action in command._actions:
            assert all(option in commands for option in action.option_strings if option not in ("-h", "--help"))


def test_the_reference_has_each_environment_variable_that_the_package_reads() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs/reference/environment.md").read_text()
    read = {
        name
        for path in [*(root / "launchers").rglob("*.py"), *(root / "fabric/configure").glob("*.py")]
        for name in re.findall(r'"([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)"', path.read_text())
    }
    assert len(read) > 50
    assert {name for name in read if name not in page} == set()
