"""A whole report with all its charts: the files it writes, and texts that try to break out of the page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from browser import Page
from fake_eval import HOSTILE, samples, write_eval, write_run
from selfjudge.report.page import report


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One of everything, reported."""
    folder = tmp_path_factory.mktemp("whole")
    return folder / "report.html", report(
        [write_eval(folder / "eval", ("gsm8k", "arithmetic"))], folder / "report.html"
    )


def test_the_tables_beside_the_page(whole: tuple[Path, dict[str, Any]]) -> None:
    page, found = whole
    beside = page.with_suffix("")
    assert [file.name for file in beside.iterdir()] == ["tables.md"]
    tables = re.split(r"(?m)^## ", (beside / "tables.md").read_text())[1:]
    assert len(tables) == len(found["tables"])
    for table in tables:  # whatever the texts hold, every line has the same columns
        lines = [line for line in table.splitlines() if line.startswith("| ")]
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1


def test_no_text_breaks_out_of_the_page(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder = tmp_path / "eval"
    evil = HOSTILE[0].replace("/", "\u2215")  # a folder's name has no slash; the fields may
    one = samples([(11, 5), (21, 5)], [1, 0])
    for rule in ("exact", f"judged:{evil}@{HOSTILE[1]}"):
        write_run(
            folder, "task", rule.replace("/", "\u2215"), 10, one, one, rule=rule, pair=HOSTILE[0], task=HOSTILE[1], measure=HOSTILE[2],
            machine={"gpu": HOSTILE[3]}, versions={HOSTILE[1]: HOSTILE[0]}, dtype=HOSTILE[0], date=HOSTILE[0],
            scores={HOSTILE[0]: 0.1},
        )  # fmt: skip
    (folder / f"{evil}-g10").mkdir()
    report([folder], tmp_path / "evil.html")
    for page in (whole[0], tmp_path / "evil.html"):
        text = page.read_text()
        found = Page(text)
        assert found.tags["script"] == 2
        assert not found.tags.keys() & {"img", "iframe", "object", "link", "base", "form", "b"}
        assert not [
            a for a in found.attributes if a[1].startswith("on") or a[1] in ("src", "style", "action", "srcdoc")
        ]
        assert all(value.startswith("#") for _, name, value in found.attributes if name == "href" and value)
        assert "http://" not in text
        assert "https://" not in text
        ids = [value for _, name, value in found.attributes if name == "id"]
        assert len(ids) == len(set(ids))


def test_charts_are_well_formed_and_named(whole: tuple[Path, dict[str, Any]]) -> None:
    drawn = re.findall(r"<svg class=\"chart\".*?</svg>", whole[0].read_text(), re.DOTALL)
    assert len(drawn) == 5  # the verdict, two charts a task
    for one in drawn:
        root = ET.fromstring(one)
        title, told = root.find("title"), root.find("desc")
        assert title is not None
        assert told is not None
        assert title.text
        assert told.text
        assert root.get("role") == "img"
        assert "nan" not in one.casefold().replace("finance", "")
