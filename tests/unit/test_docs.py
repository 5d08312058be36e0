"""What the pages cite is there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "results" / "README.md",
    ROOT / "benchmarks" / "README.md",
    *(ROOT / "docs").glob("*.md"),
]
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_cited_results_and_scripts_exist(page: Path) -> None:
    cited = re.findall(r"\b((?:results|benchmarks)/[\w./@:=*-]*[\w*])", page.read_text())
    missing = [path for path in cited if not list(ROOT.glob(path))]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(page.read_text()):
        target = (page.parent / path).resolve()
        assert target.exists(), path
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{path}#{anchor}"


def test_results_stay_small() -> None:
    """15 MB, of what is not ignored."""
    files = [file for file in (ROOT / "results").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 15e6


def test_the_makefile_names_tests_that_exist() -> None:
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (named,) = re.findall(r"^COMPAT := (.*)$", text, re.M)
    lists = re.findall(r"\$\(addprefix ([^,]+),([^)]*)\)", named)
    assert len(lists) == 2
    assert all((ROOT / f"{folder}{name}").is_file() for folder, names in lists for name in names.split())


def test_the_readme_is_one_screen_and_a_bit() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90


def test_the_picture_is_whole_and_still_where_motion_is_not_wanted() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "make_svg.py"))
    pieces = [("One", "draft"), (" <two>", "judge"), ("\n    three", "target"), (" four", "draft")]
    assert [len(group) for group in drawn["passes"](pieces)] == [3, 1]
    for picture in (drawn["draw"]("say", pieces, "a & b"), (ROOT / "docs" / "generate.svg").read_text()):
        tree = ElementTree.fromstring(picture)
        passes = [part for part in tree.iter() if part.get("class") == "pass"]
        assert passes
        assert not any(part.get("opacity") for part in passes)  # hidden by the style for those who want motion alone
        assert "prefers-reduced-motion: no-preference" in picture
    assert "&lt;two&gt;" in drawn["draw"]("say", pieces, "")
