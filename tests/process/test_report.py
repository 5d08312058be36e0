"""The report: figures by hand, what is missing or damaged, and texts that try to break out."""

from __future__ import annotations

import gzip
import json
import math
import random
import re
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup
from typer.testing import CliRunner

from browser import Page
from fake_eval import HOSTILE, SWAPS, demo_result, samples, write_eval, write_examples, write_json, write_run
from selfjudge.cli.main import app
from selfjudge.errors import SelfJudgeError
from selfjudge.report.charts import Chart, Point, Series, make_charts
from selfjudge.report.demo import demo_page, describe_gain
from selfjudge.report.draw import draw
from selfjudge.report.formats import fixed, signed
from selfjudge.report.page import report
from selfjudge.report.records import read_results, rule_order
from selfjudge.report.tables import make_tables
from selfjudge.report.verdict import make_verdict

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two tasks, two rules, few examples: everything can be worked out by hand."""
    folder = tmp_path / "eval"
    exact = samples([(11, 5), (21, 5), (11, 5), (21, 5)], [1, 1, 0, 0])
    write_run(folder, "gsm8k", "exact", 10, exact, None)
    write_run(
        folder,
        "gsm8k",
        "judged:F@j",
        10,
        samples([(11, 4), (21, 4), (11, 4), (21, 4)], [1, 0, 0, 0]),
        exact,
        threshold=0.25,
    )
    exact = samples([(11, 5), (11, 5)], [1, 0])
    write_run(folder, "mmlu", "exact", 10, exact, None)
    write_run(folder, "mmlu", "judged:F@j", 10, samples([(11, 4), (11, 4)], [1, 0]), exact)
    return folder


def nothing_drawn(chart: Chart) -> Markup:
    return Markup('<svg class="chart" data-id="{}"></svg>').format(chart.id)


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts take most of a report's time: tests that look at one call `draw` themselves."""
    monkeypatch.setattr("selfjudge.report.page.draw", nothing_drawn)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One of everything, reported without its charts."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("selfjudge.report.page.draw", nothing_drawn)
        return folder / "report.html", report([write_eval(folder / "eval")], folder / "report.html")


def row(found: dict[str, Any], table: str, **wanted: Any) -> dict[str, Any]:
    matching = [r for r in found["tables"][table] if all(r[k] == v for k, v in wanted.items())]
    assert len(matching) == 1, (wanted, matching)
    return matching[0]


def test_runs_over_other_examples_are_a_task_of_their_own(small: Path, tmp_path: Path) -> None:
    few = samples([(11, 5), (21, 5)], [1, 1])
    write_run(tmp_path / "few", "gsm8k", "exact", 10, few, None)
    write_run(tmp_path / "few", "gsm8k", "judged:q0.9@j", 10, samples([(11, 2), (21, 2)], [1, 0]), few)
    found = report([small, tmp_path / "few"], tmp_path / "report.html")
    assert not found["left_out"]
    rules = {name: {r["rule"] for r in found["tables"][name]} for name in found["tables"] if name.startswith("task-")}
    assert rules["task-gsm8k"] == {"exact", "judged:F@j"}
    assert rules["task-gsm8k-2-examples"] == {"exact", "judged:q0.9@j"}
    assert set(row(found, "averages", rule="judged:F@j")["tasks"]) == {"gsm8k", "mmlu"}
    assert "GSM8K, 2 examples" in (tmp_path / "report.html").read_text()


def test_the_per_task_table_by_hand(small: Path, tmp_path: Path) -> None:
    found = report([small], tmp_path / "report.html")
    mine = row(found, "task-gsm8k", rule="judged:F@j")
    # m: (10 + 20 + 10 + 20) / 16 = 3.75 against 60 / 20 = 3
    assert (mine["mean_accepted_length"], mine["delta_m"], mine["m_ratio"]) == (3.75, 0.75, 1.25)
    assert mine["delta_m_ci"] == pytest.approx((0.55, 0.95))  # as eval stored it
    assert (mine["score"], mine["delta_score"]) == (0.25, -0.25)
    exact = row(found, "task-gsm8k", rule="exact")
    assert (exact["delta_m"], exact["delta_m_ci"], exact["m_ratio"], exact["delta_score"]) == (None, None, None, None)
    text = (tmp_path / "report" / "tables.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("| judged:F@j θ 0.250 |"))
    assert "| 3.75 | +0.75 \\[+0.55, +0.95\\] | 1.25 \\[1.19, 1.31\\] | 25.0 " in line
    assert "| 25.0 | −25.0 | 25.0 % |" in line  # no interval from four examples
    assert mine["delta_ci"] == pytest.approx((-0.475, -0.025))  # as eval stored it: ± 0.225


def test_the_average_by_hand(small: Path, tmp_path: Path) -> None:
    found = report([small], tmp_path / "report.html")
    mine = row(found, "averages", rule="judged:F@j")
    assert set(mine["tasks"]) == {"gsm8k", "mmlu"}
    assert (mine["delta_m"], mine["m_ratio"], mine["delta_score"]) == (pytest.approx((0.75 + 0.5) / 2), 1.25, -0.125)
    half = math.hypot(0.2, 0.2) / 2
    assert mine["delta_m_ci"] == pytest.approx((0.625 - half, 0.625 + half))
    half = math.hypot(0.9 / math.sqrt(4) / 2, 0.9 / math.sqrt(2) / 2) / 2  # independent tasks
    assert mine["delta_ci"] == pytest.approx((-0.125 - half, -0.125 + half))
    assert "| 3.75 / 25.0 (−25.0) | 2.50 / 50.0 (+0.0) | +0.62 " in (tmp_path / "report" / "tables.md").read_text()
    assert "not all were run" in (tmp_path / "report" / "tables.md").read_text()


def test_only_the_papers_tasks_are_averaged(whole: tuple[Path, dict[str, Any]]) -> None:
    _, found = whole
    for one in found["tables"]["averages"]:
        assert set(one["tasks"]) <= {"gsm8k", "math500", "mmlu", "cnn_dailymail"}
    assert len(row(found, "averages", rule="judged:F@selfjudge")["tasks"]) == 4
    assert not [r for r in found["tables"]["averages"] if r["rule"] == "judged:0.35@selfjudge"]  # a point of the sweep
    assert {"task-livecodebench", "task-arithmetic"} <= set(found["tables"])


def test_judges_of_one_name_are_told_apart_by_their_ids(small: Path, tmp_path: Path) -> None:
    shutil.copytree(small, tmp_path / "other")
    for folder, judge in ((small, "a" * 64), (tmp_path / "other", "b" * 64)):
        for file in folder.rglob("judged*/summary.json"):
            file.write_text(json.dumps({**json.loads(file.read_text()), "judge_id": judge}))
    found = report([small, tmp_path / "other"], tmp_path / "report.html")
    rules = [r["rule"] for r in found["tables"]["task-gsm8k"]]
    assert rules == ["exact", "judged:F@j~aaaaaa", "judged:F@j~bbbbbb"]
    assert {r["judge_id"] for r in found["tables"]["provenance"]} == {"", "a" * 64, "b" * 64}


def test_each_task_at_its_own_gamma(tmp_path: Path) -> None:
    one = samples([(11, 5), (21, 5)], [1, 0])
    for task, gamma in (("gsm8k", 20), ("mmlu", 15)):
        write_run(tmp_path / "eval", task, "exact", gamma, one, None)
        write_run(tmp_path / "eval", task, "topk:2", gamma, one, one)
    found = report([tmp_path / "eval"], tmp_path / "report.html")
    assert [(r["rule"], r["gammas"]) for r in found["tables"]["averages"]] == [
        ("exact", "15, 20"),
        ("topk:2", "15, 20"),
    ]


def test_a_gamma_sweep_of_one_task_makes_no_average(tmp_path: Path) -> None:
    one = samples([(11, 5), (21, 5)], [1, 0])
    for task, gamma in (("gsm8k", 5), ("gsm8k", 10), ("mmlu", 10)):
        write_run(tmp_path / "eval", task, "exact", gamma, one, None)
    found = report([tmp_path / "eval"], tmp_path / "report.html")
    assert [r["gammas"] for r in found["tables"]["averages"]] == ["10"]


def test_other_measures_and_their_change(tmp_path: Path) -> None:
    exact = samples([(11, 5), (11, 5)], [1, 0])
    write_run(tmp_path, "cnn_dailymail", "exact", 10, exact, None, scores={"rouge_l": 0.5, "fc": 0.6})
    more = {
        "n_scored": 40,
        "scores": {"rouge_l": 0.5, "fc": 0.55},
        "delta_scores": {"fc": -0.05},
        "delta_scores_ci": {"fc": [-0.06, -0.04]},
    }
    write_run(tmp_path, "cnn_dailymail", "topk:2", 10, samples([(11, 4), (11, 4)], [1, 0]), exact, **more)
    report([tmp_path], tmp_path / "page.html")
    assert "55.0 −5.0 [−6.0, −4.0]" in (tmp_path / "page" / "tables.md").read_text().replace("\\", "")
    damaged = tmp_path / "cnn_dailymail" / "topk:2-g10" / "summary.json"
    damaged.write_text(damaged.read_text().replace("[-0.06, -0.04]", "[1]"))
    with pytest.raises(SelfJudgeError, match=r'"delta_scores_ci.fc" must be a list of 2'):
        report([tmp_path], tmp_path / "again.html")


def test_the_most_frequent_substitutions_are_shown(whole: tuple[Path, dict[str, Any]]) -> None:
    _, found = whole
    mine = row(found, "task-gsm8k", rule="judged:F@selfjudge", gamma=10)
    assert sorted(mine["substitutions"]) == sorted(map(tuple, SWAPS))
    (table,) = (t for t in make_tables(read_results([whole[0].parent / "eval"])[0])["task"] if t.id == "task-gsm8k")
    (line,) = (r for r in table.rows if (r["rule"], r["gamma"]) == ("judged:F@selfjudge", 10))
    most = sorted((n for *_, n in SWAPS), reverse=True)[:3]
    assert re.findall(r"× (\d+)", table.columns[-1].show(line)) == list(map(str, most))
    assert table.columns[-1].show(table.rows[0]) == "–"  # exact


def test_sections_only_where_there_is_data(tmp_path: Path, whole: tuple[Path, dict[str, Any]]) -> None:
    def sections(page: Path) -> list[str]:
        return re.findall(r'<section id="([^"]+)"', page.read_text())

    everything = sections(whole[0])
    assert everything == ["verdict", "averages", "task", "trade-off", "agreement", "viewer", "provenance"]
    write_run(tmp_path / "eval", "mmlu", "exact", 3, samples([(11, 5), (21, 5)], [1, 0]), None, substitutions=[])
    report([tmp_path / "eval"], tmp_path / "report.html")
    assert sections(tmp_path / "report.html") == ["task", "provenance"]


def test_trade_offs_have_a_point_a_threshold(whole: tuple[Path, dict[str, Any]]) -> None:
    every = list(make_charts(read_results([whole[0].parent / "eval"])[0], "trade-off"))
    by_task = {chart.task: chart for chart in every}
    series = {s.name: s for s in by_task["math500"].series}
    assert set(series) == {"exact", "topk", "fly", "judged@selfjudge", "judged@autojudge"}
    assert len(series["judged@selfjudge"].points) == 6
    assert {p.tag for p in series["judged@selfjudge"].points} == {"", "F", "R"}
    xs = [p.x for p in series["judged@selfjudge"].points]
    assert xs == sorted(xs)
    assert by_task["math500"].level == series["exact"].points[0].y == 0
    assert by_task["math500"].title.startswith("MATH-500, γ = 10: judged:F@autojudge: ")  # then what it gains and costs
    drawn = series["fly"].points[0]
    (fly,) = [r for r in read_results([whole[0].parent / "eval"])[0] if (r.task, r.rule) == ("math500", "fly")]
    assert (drawn.x, drawn.y) == pytest.approx((100 * (fly.m_ratio - 1), 100 * fly.delta_score))
    assert drawn.interval == pytest.approx([100 * end for end in fly.delta_ci])
    looks = {(s.name, s.style) for chart in every for s in chart.series}
    assert len(looks) == len({name for name, _ in looks}) == len({style for _, style in looks})  # one legend for all
    assert not any(s.name.startswith("judge_only") for chart in every for s in chart.series)


def test_the_verdict_comes_first(whole: tuple[Path, dict[str, Any]]) -> None:
    """One rule of each kind over the paper's tasks, with the means of the table of averages, in three sentences."""
    runs = read_results([whole[0].parent / "eval"])[0]
    found = make_verdict(runs)
    assert [series.name for series in found.chart.series] == ["exact", "judged:R@selfjudge", "fly", "topk:2"]
    (averages,) = make_tables(read_results([whole[0].parent / "eval"])[0])["averages"]
    same = {row["rule"]: row for row in averages.rows if row["gammas"] == "10"}
    for series in found.chart.series[1:]:
        (point,), row = series.points, same[series.name]
        assert (point.x, point.y) == (100 * (row["m_ratio"] - 1), 100 * row["delta_score"])
        assert point.interval == tuple(100 * end for end in row["delta_ci"])
    assert (len(found.sentences), found.warning) == (3, "")
    assert found.sentences[0].startswith("judged:R@selfjudge yields +")
    assert "% of the answers are those of exact" in found.sentences[0]
    assert found.chart.level == 0
    assert make_verdict([r for r in runs if r.kind != "exact"]) is None
    assert make_verdict([r for r in runs if r.kind == "exact"]) is None
    assert make_verdict([]) is None
    lossy = [r if r.kind == "exact" else r.change(delta_score=-0.1, delta_ci=(-0.12, -0.08)) for r in runs]
    assert "Every one of them loses measurably" in make_verdict(lossy).sentences[2]
    unsure = [r if r.kind == "exact" else r.change(delta_ci=(-0.5, 0.5), m_ratio_ci=(0.5, 9.0)) for r in runs]
    assert "(not shown to be a gain) tokens per target pass" in make_verdict(unsure).sentences[0]
    assert "; the score: no change shown (" in make_verdict(unsure).sentences[0]
    poor = make_verdict([r.change(score=0.01) for r in lossy]).sentences
    assert poor[0] == "There is little to lose here: exact itself scores 1.0 of 100 points."
    assert poor[1].startswith("judged:R@selfjudge yields")
    text = whole[0].read_text()
    assert text.index('id="verdict"') < text.index('class="fold"')


def test_few_prompts_are_said_to_be_few(small: Path) -> None:
    """With six prompts an interval of [0, 0] is no finding."""
    runs = read_results([small])[0]
    found = make_verdict(runs)
    assert found.warning.startswith(
        "Only 6 prompts are scored: up to 39 points may be lost even where no answer changed."
    )
    for scored, said in ((0, "No prompt is scored: nothing is known"), (1, "Only 1 prompt is scored: up to 95 points")):
        less = make_verdict([r.change(n=scored, n_scored=scored) for r in runs if r.task == runs[0].task])
        assert less.warning.startswith(said)
    runs = [r if r.kind == "exact" else r.change(delta_score=0.0, delta_ci=(0.0, 0.0)) for r in runs]
    found = make_verdict(runs)
    assert "the score: too few prompts to tell (+0.0 points)" in found.sentences[0]
    assert found.chart.title == "judged:F@j: +25.0 % m, too few prompts to tell"
    shown = make_tables(runs)["task"][0].markdown()
    assert "[+0.0, +0.0]" not in shown
    assert "[0.0 %" not in shown
    assert all(
        p.interval is None for c in (found.chart, *make_charts(runs, "trade-off")) for s in c.series for p in s.points
    )
    many = make_verdict([r.change(n_scored=40) for r in runs])
    assert "the score: no change shown (+0.0 [+0.0, +0.0] points)" in many.sentences[0]
    assert many.sentences[-1] == "No loss is shown for judged:F@j; that is not a proof that nothing is lost."
    assert many.chart.title == "judged:F@j: +25.0 % m, no change shown"
    partly = make_tables([r.change(n_scored=r.n - 1) for r in runs])["task"][0].markdown()
    assert f"{runs[0].n} {runs[0].n - 1} scored" in partly


def test_what_loses_much_is_in_view(whole: tuple[Path, dict[str, Any]]) -> None:
    runs = [r for r in read_results([whole[0].parent / "eval"])[0] if r.task == "math500"]
    topk = next(r for r in runs if r.kind == "topk")
    below = topk.change(rule="topk:9", m_ratio=9.0, delta_score=-0.6, delta_ci=None)
    charts = next(iter(make_charts(runs, "trade-off"))), next(iter(make_charts([*runs, below], "trade-off")))
    drawn = [ET.fromstring(draw(chart)) for chart in charts]
    marks = [[t.text for use in d.iter("use") for t in use.iter("title")] for d in drawn]
    assert [label for label in marks[1] if label not in marks[0]] == [
        label for label in marks[1] if label.startswith("topk:9")
    ]
    assert len(marks[1]) == len(marks[0]) + 1
    assert all(" m, " in label for label in marks[0] if label != "exact")
    assert min(tick_texts(drawn[1], "end")) <= -60


def tick_texts(drawn: ET.Element, anchor: str) -> list[float]:
    """The numbers along x (middle) or y (end)."""
    texts = [t.text or "" for t in drawn.iter("text") if t.get("text-anchor") == anchor]
    return [float(text.replace("−", "-")) for text in texts if re.fullmatch(r"−?[\d.]+", text)]


def test_the_line_of_exact_is_in_view() -> None:
    points = (Point(2, 50), Point(3, 52), Point(9, 20))
    drawn = ET.fromstring(draw(Chart("i", "t", "m", "y", (Series("a", 1, points),), level=60)))
    ys, xs = tick_texts(drawn, "end"), tick_texts(drawn, "middle")
    assert min(ys) <= 20 < 60 <= max(ys) < 70
    assert min(xs) <= 2 < 8 <= max(xs) < 12


def test_a_second_report_leaves_other_files_alone(tmp_path: Path, small: Path) -> None:
    report([small], tmp_path / "report.html")
    (tmp_path / "report" / "mine.txt").write_text("kept")
    first = (tmp_path / "report" / "tables.md").read_text()
    report([small], tmp_path / "report.html")
    assert (tmp_path / "report" / "mine.txt").read_text() == "kept"
    assert (tmp_path / "report" / "tables.md").read_text() == first


# wrong input


def summary_of(folder: Path) -> Path:
    return folder / "gsm8k" / "exact-g10" / "summary.json"


def change(name: str, value: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = json.loads(summary_of(folder).read_text())
        data[name] = value
        summary_of(folder).write_text(json.dumps(data))

    return damage


def put(path: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "gsm8k" / "exact-g10" / path).write_bytes(content) and None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (put("summary.json", b'{"task": "gsm8k", '), "cannot read .*summary.json: "),
        (put("summary.json", b"[]"), r"summary.json is not an object: it must be an object, not \[\]"),
        (put("summary.json", b"{}"), 'summary.json is not an evaluation summary: "task" is missing'),
        (put("summary.json", b"\xff\xfe"), "cannot read .*summary.json"),
        (change("score", "good"), '"score" must be a number, not "good"'),
        (change("score", None), '"score" must be a number, not null'),
        (change("gamma", True), '"gamma" must be a whole number, not true'),
        (change("score_ci", [0.1]), '"score_ci" must be a list of 2, not a list of 1'),
        (change("substitutions", [["a", "b"]]), r'"substitutions\[0\]" must be a list of 3'),
        (change("seconds", [1]), '"seconds" must be an object'),
        (put("examples.jsonl", b'{"id": "1", "tokens": [{"text": "a", "origin": "magic"}]}\n'), r'examples.jsonl, line 1 is not an answer example: "tokens\[0\].origin" must be .*, not "magic"'),
        (put("examples.jsonl", b"{}\nnot json\n"), "examples.jsonl"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused_by_name(
    small: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(small)
    with pytest.raises(SelfJudgeError, match=message) as caught:
        report([small], tmp_path / "report.html")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report.html").exists()
    assert not (tmp_path / "report").exists()


def test_unfinished_and_repeated_runs_are_named_and_left_out(small: Path, tmp_path: Path) -> None:
    summary_of(small).unlink()
    shutil.copytree(small / "mmlu", tmp_path / "again" / "mmlu")
    found = report([small, tmp_path / "again"], tmp_path / "report.html")
    assert found["runs"] == 3
    why = {
        Path(one["folder"]).parent.parent.name + "/" + Path(one["folder"]).name: one["why"] for one in found["left_out"]
    }
    assert why["eval/exact-g10"] == "unfinished: it has no summary.json"
    assert why["again/exact-g10"] == f"the same configuration as {small / 'mmlu' / 'exact-g10'}"
    assert "unfinished: it has no summary.json" in (tmp_path / "report.html").read_text()


def test_folders_may_overlap(small: Path, tmp_path: Path) -> None:
    found = report([small, small / "mmlu", small], tmp_path / "report.html")
    assert (found["runs"], found["left_out"]) == (4, [])


def test_folders_without_results_are_refused(small: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_json(tmp_path / "foreign" / "summary.json", {"wheels": 4})
    (tmp_path / "begun" / "gsm8k" / "exact-g10").mkdir(parents=True)
    for name, message in {
        "nowhere": "nowhere is not a folder",
        "empty": "empty holds no results: name folders that eval wrote",
        "foreign": "foreign holds no results (.*not the summary of an evaluation): ".replace("(", r"\(").replace(
            ")", r"\)"
        ),
        "begun": r"begun holds no results \(.*unfinished",
    }.items():
        with pytest.raises(SelfJudgeError, match=message):
            report([small, tmp_path / name], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_the_page_must_have_a_place_of_its_own(small: Path, tmp_path: Path) -> None:
    with pytest.raises(SelfJudgeError, match=r"`out` names the page, such as report.html, not .*report.pdf"):
        report([small], tmp_path / "report.pdf")
    with pytest.raises(SelfJudgeError, match=r"is where tables\.md goes and holds other files"):
        report([small], small.with_suffix(".html"))  # its figures would land among the results
    (tmp_path / "file").write_text("")
    with pytest.raises(SelfJudgeError, match=r"cannot write .*file\.html: .*File exists"):
        report([small], tmp_path / "file.html")
    with pytest.raises(SelfJudgeError, match="cannot write"):
        report([small], tmp_path / "file" / "report.html")


def test_a_summary_with_the_least_there_may_be(tmp_path: Path) -> None:
    least = {"task": "new", "rule": "exact", "gamma": 3, "n": 1, "score": 0.5, "mean_accepted_length": None}
    write_json(tmp_path / "eval" / "new" / "exact-g3" / "summary.json", least)
    found = report([tmp_path / "eval"], tmp_path / "report.html")
    assert found["tables"]["task-new"][0]["mean_accepted_length"] is None
    assert "NaN" not in (tmp_path / "report.html").read_text().split('id="data"')[1].split("</script>")[0]


def test_the_demo_page_says_what_was_found() -> None:
    result = demo_result()
    assert describe_gain(result) == [
        "Gained: judged, shipped yields 2.60 tokens per pass, exact 2.10; it is 1.80 × as fast as plain decoding, exact"
        " 1.50 ×.",
        "Cost: 5.0\N{NO-BREAK SPACE}% of its tokens are not the target’s choice, and its answers are those of plain"
        " decoding for the first 40 % of their tokens on average.",
    ]
    text = demo_page(result)
    assert 'data-wanted="target wanted “␣grass” (p 0.62); judge’s score 0.81"' in text
    assert "they reject 90 % of bad substitutions (q0.9)" in text
    found = Page(text)
    assert found.tags["script"] == 2
    assert not found.tags.keys() & {"img", "b", "form"}
    assert not [a for a in found.attributes if a[1].startswith("on") or a[1] in ("src", "style")]


def test_the_page_of_a_demo_that_was_stopped() -> None:
    result = demo_result()
    begun = {"rows": [{k: v for k, v in row.items() if k not in ("tokens", "example")} for row in result["rows"][:2]]}
    text = demo_page(begun)
    assert "The demo was stopped before a judge had answered." in text
    assert 'id="answers"' not in text
    without = {"rows": [{**row, "tokens": None, "example": "Blue <b>sky</b>"} for row in result["rows"]]}
    assert demo_page(without).count('<div class="tokens">Blue &lt;b&gt;sky&lt;/b&gt;</div>') == 4


def test_answers_reach_the_viewer_as_they_are(whole: tuple[Path, dict[str, Any]]) -> None:
    text = whole[0].read_text()
    raw = text.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    assert not set(raw) & set("<>&\u2028\u2029")
    runs = json.loads(raw)["runs"]
    assert {r["group"] for r in runs} >= {"GSM8K", "LiveCodeBench", "arithmetic"}
    hostile = runs[0]["examples"][3]
    assert [t[0] for t in hostile["tokens"][:4]] == list(HOSTILE[:4])
    assert hostile["tokens"][4][0] == HOSTILE[4]
    assert hostile["id"] == HOSTILE[1]


def test_only_this_script_and_style_may_run(whole: tuple[Path, dict[str, Any]]) -> None:
    import base64
    import hashlib

    text = whole[0].read_text()
    policy = next(v for _, n, v in Page(text).attributes if n == "content" and v and "default-src" in v)
    for tag in ("script", "style"):
        inner = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert len(inner) == 1
        digest = base64.b64encode(hashlib.sha256(inner[0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_figures_have_a_real_minus_and_none_before_zero() -> None:
    assert (signed(-0.001), signed(-0.5), signed(None), fixed(-1234.5, 1)) == ("+0.00", "−0.50", "–", "−1,234.5")


def test_ticks_are_round_and_inside() -> None:
    def ticks(low: float, high: float) -> list[float]:
        chart = Chart("i", "t", "x", "y", (Series("a", 1, (Point(low, 1), Point(high, 1))),))
        return tick_texts(ET.fromstring(draw(chart)), "middle")

    assert ticks(3, 4.6) == [3, 3.2, 3.4, 3.6, 3.8, 4, 4.2, 4.4, 4.6]
    assert 5 in ticks(5, 5)


def test_no_name_breaks_out_of_a_chart() -> None:
    texts = [*HOSTILE, "_private", "$x$", "", "数学\x00\ufffe"]
    series = tuple(Series(t, i, (Point(i, 1, t, t), Point(i + 1, 2, t, t))) for i, t in enumerate(texts))
    drawing = draw(Chart("i", texts[0], texts[4], texts[-1], series))
    drawn = ET.fromstring(drawing)
    assert {e.tag for e in drawn.iter()} == {
        "svg",
        "title",
        "desc",
        "defs",
        "g",
        "path",
        "text",
        "use",
        "clipPath",
        "rect",
    }
    assert not {name for e in drawn.iter() for name in e.attrib if name.startswith("on")}
    assert all(e.get("href", "#").startswith("#") for e in drawn.iter())
    assert "<img src=x onerror=" in "".join(drawn.itertext())
    assert "$x$" in [e.text for e in drawn.iter("text")]


def test_charts_take_their_colours_from_the_page() -> None:
    points = (Point(1, 1, "a"), Point(2, 2, "b"))
    drawn = draw(Chart("i", "t", "x", "y", (Series("a", 1, points), Series("b", 14, points)), level=1))
    root = ET.fromstring(drawn)
    colours = {element.get(name) for element in root.iter() for name in ("fill", "stroke")} - {None, "none"}
    assert colours == {f"var(--{name})" for name in ("ink", "soft", "rule", "faint", "paper", "s1", "s6")}
    assert not [e for e in root.iter() if "style" in e.attrib or not e.get("id", "i-").startswith("i-")]
    assert [t.text for t in root.iter("title")] == ["t", "a", "b", "a", "b"]


# the command


def test_the_command(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (small / "gsm8k" / "fly-g10").mkdir()
    done = CliRunner().invoke(app, ["report", "eval"])
    assert done.exit_code == 0, done.output
    assert done.stdout == "report.html: 4 runs, 4 tables, in report as Markdown\n"
    assert done.stderr == "selfjudge: left out eval/gsm8k/fly-g10: unfinished: it has no summary.json\n"
    done = CliRunner().invoke(app, ["report", "eval", "--json", "--out", "other.html"])
    rows = json.loads(done.stdout)
    assert rows["averages"][1]["delta_m"] == 0.625
    assert (tmp_path / "other.html").is_file()


def test_tasks_whose_names_look_alike_stay_apart(tmp_path: Path) -> None:
    one = samples([(11, 5), (21, 5)], [1, 0])
    for place, task in enumerate(("a b", "a-b", "数学", "物理")):
        for rule in ("exact", "topk:2"):
            write_run(tmp_path / "eval", str(place), rule, 10, one, one, task=task)
    found = report([tmp_path / "eval"], tmp_path / "report.html")
    assert [name for name in found["tables"] if name.startswith("task")] == [
        "task-a-b",
        "task-a-b--2",
        "task",
        "task--2",
    ]
    page = (tmp_path / "report.html").read_text()
    assert page.count('<svg class="chart"') == 9
    ids = [value for _, name, value in Page(page).attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_several_pairs_stay_apart(small: Path, tmp_path: Path) -> None:
    shutil.copytree(small, tmp_path / "other")
    for file in (tmp_path / "other").rglob("summary.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "pair": "another"}))
    found = report([small, tmp_path / "other"], tmp_path / "report.html")
    assert {"averages-another", "averages-smollm2-135m", "task-another-gsm8k", "task-smollm2-135m-gsm8k"} <= set(
        found["tables"]
    )
    page = (tmp_path / "report.html").read_text()
    assert len(set(re.findall(r'<svg class="chart" data-id="(trade-off[^"]*)"', page))) == 4


def test_an_evaluation_of_one_run(tmp_path: Path) -> None:

    write_run(
        tmp_path / "eval", "dolly", "exact", 4, samples([(5, 0), (1, 0)], [0.5, 0.5])[:1] + samples([(9, 4)], [1]), None
    )
    write_examples(tmp_path / "eval" / "dolly" / "exact-g4", random.Random(1), 4, 0.0)
    found = report([tmp_path / "eval"], tmp_path / "report.html")
    assert found["runs"] == 1
    assert "averages" not in found["tables"]


def test_the_made_up_tree_is_consistent(tmp_path: Path) -> None:
    folder = write_eval(tmp_path, tasks=("gsm8k",), n=10)
    run = next(r for r in read_results([folder])[0] if r.rule == "topk:2" and r.gamma == 5)
    rows = [json.loads(line) for line in gzip.decompress((run.folder / "samples.jsonl.gz").read_bytes()).splitlines()]
    pooled = sum(row["tokens"] - 1 for row in rows) / sum(row["cycles"] for row in rows)
    assert run.m == pytest.approx(pooled)


def test_on_an_open_task_the_words_of_exact_stand_for_a_score(tmp_path: Path) -> None:
    rows = samples([(11, 5), (11, 5)], [1, 1])
    for rule, own, agreement in (("exact", None, None), ("topk:2", rows, 0.4)):
        write_run(tmp_path / "eval", "dolly", rule, 10, rows, own)
        file = tmp_path / "eval" / "dolly" / f"{rule}-g10" / "summary.json"
        summary = json.loads(file.read_text())
        none = dict.fromkeys(("measure", "score", "score_ci", "delta_score", "delta_ci"))
        file.write_text(json.dumps(summary | none | {"agreement": agreement, "scores": {}}))
    found = report([tmp_path / "eval"], tmp_path / "report.html")
    mine = row(found, "task-dolly", rule="topk:2")
    assert (mine["measure"], mine["score"], mine["delta_score"]) == ("matching words", 0.4, pytest.approx(-0.6))
    assert row(found, "task-dolly", rule="exact")["score"] == 1
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Δ matching words" in text
    assert "Δtask" not in text
    file.write_text(json.dumps(summary | none | {"agreement": None}))
    found = report([tmp_path / "eval"], tmp_path / "report.html")
    assert [r["rule"] for r in found["tables"]["task-dolly"]] == ["exact"]
    assert "neither a score nor a run of exact" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_prices_are_a_curve_of_their_own(tmp_path: Path) -> None:
    rows = samples([(11, 5), (11, 5)], [1, 0])
    write_run(tmp_path, "gsm8k", "exact", 10, rows, None)
    rules = {
        "margin:0.5": ("margin", 0.5),
        "margin:threshold=1,guard=False": ("margin", 1),  # as an object of the rule is written
        "margin:2,guard=True": ("margin, guard=True", 2),
        "margin:price=0.2": ("margin, price", 0.2),
        "margin:guard=True,price=0.08": ("margin, price", 0.08),
        "topk:k=2": ("topk", 2),
        "fly:0.15,6": ("fly, 6", 0.15),
        "judged:q0.8@j": ("judged@j", 0.8),
        "judged:theta=0.4@j": ("judged@j", 0.4),
        "judged:confirm=2@j": ("judged, confirm=2@j", None),
        "judged:price=0.04,confirm=2@j": ("judged, price, confirm=2@j", 0.04),
        "judged:confirm=2,price=0.06@j": ("judged, price, confirm=2@j", 0.06),
    }
    for rule in rules:
        write_run(tmp_path, "gsm8k", rule, 10, rows, rows, lost=1234, gained=0)
    runs = {run.rule: run for run in read_results([tmp_path])[0]}
    assert {rule: (runs[rule].method, runs[rule].number) for rule in rules} == rules
    assert {rule for rule in rules if not runs[rule].is_named} == {
        rule for rule, (_, number) in rules.items() if rule.startswith("judged") and number is not None
    }
    ordered = [run.rule for run in sorted(runs.values(), key=rule_order) if run.method == "margin, price"]
    assert ordered == ["margin:guard=True,price=0.08", "margin:price=0.2"]
    (table,) = make_tables(read_results([tmp_path])[0])["task"]
    (column,) = [column for column in table.columns if column.head == "lost / gained"]
    shown = {row["rule"]: column.show(row) for row in table.rows}
    assert (shown["exact"], shown["margin:0.5"]) == ("–", "1,234 / 0")


def test_the_chart_of_same_answers(tmp_path: Path) -> None:
    exact = samples([(13, 4)] * 4, [1, 1, 1, 0])
    write_run(tmp_path, "gsm8k", "exact", 10, exact, None)
    write_run(tmp_path, "gsm8k", "margin:1", 10, samples([(13, 3)] * 4, [1, 0, 1, 0]), exact)
    write_run(tmp_path, "gsm8k", "margin:3", 10, samples([(13, 2)] * 4, [0, 0, 0, 0]), exact)
    write_run(tmp_path, "gsm8k", "judged:F@j", 10, samples([(11, 2)] * 4, [1, 1, 0, 1]), exact)
    (chart,) = make_charts(read_results([tmp_path])[0], "agreement")
    assert chart.title == "GSM8K, γ = 10: judged:F@j: +66.7 % m, 75.0 % the same"
    series = {s.name: [(p.x, p.y) for p in s.points] for s in chart.series}
    assert series == {
        "exact": [(0, 100)],
        "margin": [(pytest.approx(100 / 3), 50), (pytest.approx(100), 0)],
        "judged@j": [(pytest.approx(200 / 3), 75)],
    }


def test_second_variants_of_a_rule_come_after_other_rules(tmp_path: Path) -> None:
    rows = samples([(11, 5), (11, 5)], [1, 0])
    write_run(tmp_path, "gsm8k", "exact", 10, rows, None)
    rules = (
        "judged:q0.8@j",
        "judged:price=0.1@j",
        "margin:1",
        "margin:price=0.1",
        "margin:price=0.2",
        "fly:0.1,6",
        "topk:2",
    )
    for rule in rules:
        write_run(tmp_path, "gsm8k", rule, 10, rows, rows)
    runs = read_results([tmp_path])[0]
    (chart,) = make_charts(runs, "trade-off")
    assert len(chart.series) == 5
    assert {s.name.partition("@")[0].partition(", p")[0] for s in chart.series} == {
        "exact",
        "judged",
        "margin",
        "fly, 6",
        "topk",
    }
