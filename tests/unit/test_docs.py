"""What the pages cite is there."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from selfjudge.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "results" / "README.md",
    ROOT / "benchmarks" / "README.md",
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "research").glob("*.md"),
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


MADE = runpy.run_path(str(ROOT / "docs" / "make_pages.py"))


@pytest.mark.parametrize("name", MADE["PAGES"])
def test_pages_hold_the_figures_of_their_files(name: str) -> None:
    """If it fails: `python docs/make_pages.py`."""
    assert MADE["PAGES"][name].read_text() == MADE["page"](name)


def test_no_figure_of_the_readme_is_written_by_hand() -> None:
    """What has a unit of speed, size or change comes from a file, but for what the reader sets."""
    template = (ROOT / "docs" / "templates" / "README.md.in").read_text()
    figures = re.findall(r"[\d.,]*\d\s*(?:×|%|tokens/s|points|MB|GB)", re.sub(r"\{\{.+?\}\}", "", template))
    assert sorted(figures) == ["1 GB", "3 points", "90 %", "90 %"]  # torch, ε = 0.03, --quality 0.9


def test_one_sentence_says_what_it_is_everywhere() -> None:
    sentence = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]
    assert f'site_description: "{sentence}"\n' in (ROOT / "mkdocs.yml").read_text()
    assert app.info.help == sentence
    for page in ("README.md", "docs/index.md"):
        assert (ROOT / page).read_text().split("\n\n")[1] == sentence


def test_the_pages_can_be_read_in_an_evening() -> None:
    """20,000 words without the command line, which the program prints itself."""
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name != "cli.md"]
    assert sum(len(page.read_text().split()) for page in pages) <= 20_000


def test_results_stay_small() -> None:
    """8 MB, of what is not ignored."""
    files = [file for file in (ROOT / "results").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 8e6


JUDGES = ROOT / "results" / "qwen2.5-coder-1.5b"


def rule_of(cell: str) -> str:
    """A rule as its folder has it, from the first cell of a row: `judged, price 0.04` is judged:price=0.04@new."""
    rule = re.sub(r"^(\w+), price ", r"\1:price=", re.sub(r"[`*]", "", cell)).replace("judged ", "judged:")
    return f"{rule}@new" if rule.startswith("judged") else rule


def lead(row: Mapping[str, Any] | None, key: str) -> str:
    """A lead at equal m as the tables have it."""
    if row is None or row[key] is None:
        return "–"
    value, *ends = (f"{100 * x:.1f}" for x in (row[key], *(row[f"{key}_ci"] or ())))
    return f"{value} ({ends[0]} to {ends[1]})" if ends else f"≥ {value}"


@pytest.mark.quick("LiveCodeBench-*")
@pytest.mark.parametrize(
    ("title", "folder"),
    [
        ("GSM8K", "head-gsm8k-4000/gsm8k-test+train-4792-"),
        ("MMLU", "head-mmlu/mmlu"),
        ("LiveCodeBench", "head-livecodebench/livecodebench"),
    ],
)
def test_tables_of_rules_are_what_was_measured(title: str, folder: str) -> None:
    text = (ROOT / "research" / "results.md").read_text().replace("−", "-").replace("*", "")
    head, rows = re.findall(rf"^\| ({title}, .*? gain in m .*)\n\| ---.*\n((?:\|.*\n)+)", text, re.M)[0]
    exact = json.loads((JUDGES / folder / "exact-g10" / "summary.json").read_text())
    assert f"{exact['n']:,} prompts" in head
    assert f"m {exact['mean_accepted_length']:.2f}, {100 * exact['score']:.1f} points" in head
    (table,) = runpy.run_path(str(ROOT / "benchmarks" / "equal_m.py"))["compare_at_equal_m"]([JUDGES / folder])
    leads = {row["rule"]: row for row in table.rows}
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]
    for name, gain, same, over_margin, over_priced, points, changed in cells:
        rule = rule_of(name)
        run = json.loads((JUDGES / folder / f"{rule}-g10" / "summary.json").read_text())
        assert gain == f"{100 * (run['m_ratio'] - 1):+.1f} %", rule
        assert same == f"{100 * run['agreement']:.1f} %", rule
        assert over_margin == lead(leads.get(rule), "agreement_over_margin"), rule
        assert over_priced == lead(leads.get(rule), "agreement_over_priced_margin"), rule
        low, high = (f"{100 * end:+.1f}" for end in run["delta_ci"])
        assert points == f"{100 * run['delta_score']:+.1f} ({low} to {high})", rule
        assert changed == f"{run['lost']} / {run['gained']}", rule
    gains = [float(row[1].split()[0]) for row in cells]
    assert gains == sorted(gains)


@pytest.mark.parametrize(("title", "task"), [("Dolly", "dolly"), ("CNN/DailyMail", "cnn_dailymail")])
def test_the_table_of_open_tasks_is_what_was_measured(title: str, task: str) -> None:
    text = (ROOT / "research" / "results.md").read_text().replace("*", "")
    ((names, row),) = re.findall(rf"^\| 300 prompts each: (.*)\n\| ---.*\n(?:\|.*\n)??\| {title}; (.*)\n", text, re.M)
    rules = [rule_of(name.strip()) for name in names.strip("|").split("|")[1:]]
    start, *cells = (cell.strip() for cell in row.strip("|").split("|"))
    exact, *runs = (
        json.loads(file.read_text())
        if (file := JUDGES / "head-open" / task / f"{rule}-g10" / "summary.json").is_file()
        else None
        for rule in ("exact", *rules)
    )
    assert exact is not None
    assert exact["n"] == 300
    assert start == f"`exact` m {exact['mean_accepted_length']:.2f}"
    assert cells == [
        "not run" if run is None else f"{100 * (run['m_ratio'] - 1):+.1f} %, {100 * run['agreement']:.1f} %"
        for run in runs
    ]


def test_the_table_of_the_released_preset_is_what_was_measured() -> None:
    """Of Qwen: the judge's ROC-AUC, and the means of both tasks at F and R."""
    text = (ROOT / "research" / "results.md").read_text().replace("−", "-")
    (rows,) = re.findall(r"^\| `reproduce --preset released` .*\n\| ---.*\n((?:\|.*\n){4})", text, re.M)
    for row, name in zip(rows.splitlines(), ("released", "paper", "selfjudge", "margin:0.5"), strict=True):
        _, auc, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        if name.startswith("margin"):
            rules = [name]
        else:
            config = json.loads((JUDGES / "released" / f"judge-{name}.json").read_text())
            assert auc == f"{config['metrics']['auc_mismatch']:.2f}", name
            rules = [f"judged:{threshold}@{name}" for threshold in "FR"]
        for cell, rule in zip(cells, rules, strict=False):
            files = [JUDGES / "released" / task / f"{rule}-g20" / "summary.json" for task in ("gsm8k", "mmlu")]
            runs = [json.loads(file.read_text()) for file in files]
            gain, same, points = (
                100 * sum(run[key] for run in runs) / len(runs) for key in ("m_ratio", "agreement", "delta_score")
            )
            if cell == "the same":
                assert abs(gain - 100) < 0.05
                continue
            numbers = [float(x) for x in re.findall(r"[-+]?\d+(?:\.\d+)?", cell)]
            assert numbers[0] == round(gain - 100), rule
            assert abs(numbers[1] - same) <= 0.5, rule
            assert abs(numbers[2] - points) <= 0.06, rule


def test_the_table_of_batches_is_what_was_measured() -> None:
    measured = json.loads((ROOT / "results" / "drafts" / "qwen2.5-coder-1.5b" / "h200-speed.json").read_text())
    text = (ROOT / "research" / "results.md").read_text().replace("*", "")
    names = {0: "plain", 2: "γ = 2", 5: "γ = 5", "auto": "`auto`"}
    for task, title in (("gsm8k", "GSM8K"), ("dolly", "Dolly")):
        for gamma, name in names.items():
            speeds = [
                f"{row['tokens_per_second']:,.0f}"
                for row in measured["batches"]
                if (row["task"], row["gamma"]) == (task, gamma)
            ]
            assert len(speeds) == 5
            assert f"| {title}, {name} | {' | '.join(speeds)} |" in text


def test_the_makefile_names_tests_that_exist() -> None:
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (named,) = re.findall(r"^COMPAT := (.*)$", text, re.M)
    folder, names = re.findall(r"\$\(addprefix ([^,]+),([^)]*)\)", named)[0]
    files = [*(f"{folder}{name}" for name in names.split()), *re.findall(r" (tests/\S+)$", named)]
    assert len(files) > 5
    assert all((ROOT / file).is_file() for file in files)


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


def test_what_memory_says_of_estimates_is_in_its_file() -> None:
    made = json.loads((ROOT / "results" / "memory" / "cpu-2core.json").read_text())
    text = (ROOT / "docs" / "memory.md").read_text()
    sizes = {
        (run["pair"], run["dtype"], run["rows"]): (
            run["computed_weights"] + run["computed_cache"], run["resident"] - run["resident_before"],
        )
        for run in made["runs"]
    }  # fmt: skip
    missing = [(resident - computed) / 1e9 for computed, resident in sizes.values()]
    assert f"{min(missing):.2f} to {max(missing):.1f} GB too low" in text
    computed, resident = sizes["qwen2.5-coder-1.5b", "q4", 1]
    assert f"{computed / 1e6:,.0f} against {resident / 1e6:,.0f} MB for Qwen in q4" in text
