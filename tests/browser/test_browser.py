"""What the harness itself promises: scripts run, errors and requests are seen, nothing is fetched."""

from pathlib import Path

from browser import browser

PAGE = """<!doctype html><title>a page</title><style>p{color:red} @media (prefers-color-scheme: dark) {p{color:blue}}
@media print {p{color:black}}</style><p>none</p>
<script>document.querySelector("p").textContent = "run " + (1 + 1)</script>"""
BROKEN = """<img src="https://example.com/one.png"><script>nothing.here()</script>"""
COLOR = 'getComputedStyle(document.querySelector("p")).color'


def test_scripts_run_and_media_are_those_asked_for(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(PAGE)
    with browser(tmp_path) as page:
        page.open(tmp_path / "page.html")
        assert (page.text(), page.run(COLOR)) == ("run 2", "rgb(255, 0, 0)")
        page.open(tmp_path / "page.html", scheme="dark", width=300)
        assert (page.run("innerWidth"), page.run(COLOR)) == (300, "rgb(0, 0, 255)")
        page.open(tmp_path / "page.html", media="print")
        assert page.run(COLOR) == "rgb(0, 0, 0)"
        assert page.errors == []
        assert [each.rpartition("/")[2] for each in page.requests] == ["page.html"]
        assert page.picture("harness").read_bytes().startswith(b"\x89PNG")
        assert page.pdf().startswith(b"%PDF")


def test_errors_of_scripts_and_requests_are_seen_and_there_is_no_network(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(BROKEN)
    with browser(tmp_path) as page:
        page.open(tmp_path / "page.html")
        assert "https://example.com/one.png" in page.requests
        assert any("nothing is not defined" in error for error in page.errors)
        assert any("ERR_NAME_NOT_RESOLVED" in error for error in page.errors)
