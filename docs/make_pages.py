"""Write README.md and docs/results.md anew from docs/templates/ and the files of results/: `python docs/make_pages.py`.

A template has `{{table NAME}}` where a table goes, and `{{ROW COLUMN}}` or `{{ROW COLUMN/COLUMN}}` (how many times as much)
where a figure goes, so no figure is written by hand. A test compares the pages with what this script makes.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from selfjudge.models.catalogue import EMBEDDED
from selfjudge.report.records import task_title
from selfjudge.store import markdown_table

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": ROOT / "README.md", "results.md": ROOT / "docs" / "results.md"}
QWEN = "results/qwen2.5-coder-1.5b"
BESIDE_VLLM = "results/vllm/h200-qwen2.5-coder-1.5b-head.json"
WORKER = "results/vllm/h200-qwen2.5-coder-1.5b-worker.json"
BY_TASK = "results/drafts/qwen2.5-coder-1.5b/h200-speed.json"
TASKS = ("gsm8k", "mbpp", "livecodebench", "mmlu", "dolly", "cnn_dailymail")
CPUS = {"x86": "results/speed/cpu-2core-x86", "arm": "results/speed/cpu-2core"}
Figures = dict[str, dict[str, float]]
Rows = Iterable[dict[str, Any]]


@functools.cache
def read(file: str) -> Any:
    return json.loads((ROOT / file).read_text())


def number(value: float) -> str:
    """Whole from 200 on, else with a decimal."""
    return f"{value:,.0f}" if value >= 200 or value == int(value) else f"{value:.1f}"


def change(share: float) -> str:
    return f"{100 * share:+.1f} %".replace("-", "−")


def size(count: float) -> str:
    """Bytes of a download."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def share(value: float) -> str:
    return f"{100 * value:.0f} %"


def points(value: float) -> str:
    """A difference that is in points already."""
    return f"{value:+.1f}".replace("-", "−")


def best(runs: Rows) -> dict[str, Any]:
    """The faster of the repeats."""
    return max(runs, key=lambda run: run["tokens_per_second"])


def beside_vllm(file: str, task: str, batch: int, of_repeats: Callable[[list[float]], float] = max) -> dict[str, float]:
    """Every engine of one task and batch size, and the share of answers of `exact` that are those of plain decoding."""
    row: dict[str, float] = {}
    answers: dict[str, list[str]] = {}
    modes = read(file)["modes"]
    for column, mode, setting in (
        ("plain", "ours", "plain"), ("exact", "ours", "auto"), ("vllm", "plain", "plain"), ("vllm-draft", "draft", "draft"),
        ("vllm-head", "head", "head"), ("worker-off", "recipe", "off"), ("worker-margin", "recipe", "margin:0.5,guard=on"),
    ):  # fmt: skip
        runs = [run for run in modes.get(mode, {"runs": []})["runs"] if _of(run, setting, task, batch)]
        if runs:
            run, speed = best(runs), of_repeats([run["tokens_per_second"] for run in runs])
            row |= {column: speed, "n": run["n"], f"m-{column}": run.get("mean_accepted_length", 1)}
            answers[column] = run.get("answers", [])
    if answers.get("exact") and "plain" in answers:
        row["same"] = sum(map(str.__eq__, answers["plain"], answers["exact"])) / len(answers["exact"])
    return row


def _of(run: dict[str, Any], setting: str, task: str, batch: int) -> bool:
    return (run["setting"], run["task"], run["batch"]) == (setting, task, batch)


def beside_llama(file: str) -> dict[str, float]:
    measured = read(file)
    runs = {run["name"].removeprefix("selfjudge-"): run for run in measured["runs"]}
    row = {
        "llama": runs["llama.cpp"]["tokens_per_second"],
        "plain": runs["plain"]["tokens_per_second"],
        "exact": runs["exact"]["tokens_per_second"],
        "m-exact": runs["exact"]["mean_accepted_length"],
        "same": runs["exact"]["same_answers_as_our_first"],
        "n": measured["count"],
    }
    kinds = runs["exact"]["by_kind"]
    worth = {kind: rate / runs["plain"]["by_kind"][kind] for kind, rate in kinds.items()}
    return row | {f"worth-{kind}": value for kind, value in worth.items()}


def by_task(task: str) -> dict[str, float]:
    """Batch 1 on an H200: plain decoding, and `exact` with both drafts."""
    row: dict[str, float] = {}
    for run in read(BY_TASK)["speed"]:
        if run["task"] != task:
            continue
        match run["draft"], run["name"], run["gamma"]:
            case None, "transformers-plain", _:
                row["transformers"] = run["tokens_per_second"]
            case "shipped", _, 0:
                row["plain"] = run["tokens_per_second"]
            case "shipped", _, "auto":
                row["small"] = run["tokens_per_second"]
            case "eagle3", _, "auto":
                row["exact"], row["same"] = run["tokens_per_second"], run["identical_to_plain"]
                row["gamma"], row["m-exact"] = run["gamma_mean"], run["mean_accepted_length"]
    return row


def rules(name: str) -> Iterable[tuple[str, dict[str, float]]]:
    """The rules of a task as their folders call them: gain in m and same answers as shares, points."""
    if name == "gsm8k":
        measured = read(f"{QWEN}/head-gsm8k-4000/test-prompts.json")
        exact = read(f"{QWEN}/head-gsm8k-4000/gsm8k-test+train-4792-/exact-g10/summary.json")
        yield "exact", {"n": measured["n"], "m-mixed": exact["mean_accepted_length"]}
        for rule, run in measured["runs"].items():
            same = run["agreement"]
            yield rule, {"gain": run["gain"], "same": same, "changed": 1 - same, "points": run["points"]}
        return
    task = name if name in ("mmlu", "livecodebench") else f"head-open/{name}"
    folder = ROOT / QWEN / (f"head-{task}/{task}" if "/" not in task else task)
    for file in sorted(folder.glob("*-g10/summary.json")):
        run = json.loads(file.read_text())
        row = {"n": run["n"], "m": run["mean_accepted_length"], "score": run["score"]}
        if run["m_ratio"] is not None:
            row |= {"gain": run["m_ratio"] - 1, "same": run["agreement"], "points": 100 * (run["delta_score"] or 0)}
        yield run["rule"], row


@functools.cache
def figures() -> Figures:
    """All that templates may cite, a row of columns a name."""
    rows: Figures = {}
    for task in ("gsm8k", "dolly"):
        for batch in (1, 8, 64):
            rows[f"h200-{task}-{batch}"] = beside_vllm(BESIDE_VLLM, task, batch)
            rows[f"worker-{task}-{batch}"] = beside_vllm(WORKER, task, batch, median)
        for batch in (1, 16):
            rows[f"big-{task}-{batch}"] = beside_vllm(INSIDE["8.4 B"], task, batch, median)
        rows[f"big-{task}-64"] = beside_vllm("results/vllm/h200-8b-head-64.json", task, 64, median)
        for host, folder in CPUS.items():
            rows[f"{host}-{task}"] = beside_llama(f"{folder}/llama-cpp-qwen2.5-coder-1.5b-{task}.json")
        for batch in (1, 8, 32, 128, 512):
            runs = [run for run in read(BY_TASK)["batches"] if (run["task"], run["batch"]) == (task, batch)]
            names = {0: "plain", 2: "g2", 5: "g5", "auto": "exact"}
            rows[f"rows-{task}-{batch}"] = {names[run["gamma"]]: run["tokens_per_second"] for run in runs}
    for host, folder in CPUS.items():
        rows[f"{host}-smollm2"] = beside_llama(f"{folder}/llama-cpp-smollm2-135m.json")
    rows |= {f"task-{task}": by_task(task) for task in TASKS}
    for name, draft in (("head", "eagle3"), ("small", "shipped")):
        for run in read(BY_TASK)["accepted"][draft]["runs"]:
            columns = {"top1": run["top1"], "m3": run["m_gamma_3"], "m5": run["m_gamma_5"], "m10": run["m_gamma_10"]}
            rows[f"{name}-{run['prompts']}"] = columns | {"n": run["n"]}
    for task in ("gsm8k", "mmlu", "livecodebench", "dolly"):
        rows |= {f"rule-{task}-{rule.removesuffix('@new')}": row for rule, row in rules(task)}
    for task in ("gsm8k", "mmlu"):
        measured = read(f"results/tune/qwen2.5-coder-1.5b/{task}.json")
        certified = [run["speed_ratio"] for run in measured["candidates"] if run["why"].startswith("certified")]
        rows[f"tune-{task}"] = {
            "n": measured["n"], "gamma": measured["gamma"], "worth": measured["exact_over_plain"],
            "slowest": min(certified), "fastest": max(certified), "certified": len(certified),
        }  # fmt: skip
    tested = {run["rule"].split("=")[1].split(",")[0]: run for run in read(STRONG_TUNED)["candidates"]}
    tuned, loose = tested["0.1"], tested["0.2"]
    rows["strong"] = {
        "n": tuned["n_used"], "lost": tuned["lost"], "gained": tuned["gained"], "gain": tuned["speed_ratio"] - 1,
        "low": tuned["speed_ci"][0] - 1, "high": tuned["speed_ci"][1] - 1,
        "loose-n": loose["n_used"], "loose-lost": loose["lost"], "loose-gained": loose["gained"], "needed": loose["needed_prompts"],
    }  # fmt: skip
    again = read(STRONG_TUNED.replace(".json", "-2.json"))["candidates"][0]
    rows["strong2"] = {"n": again["n_used"], "lost": again["lost"], "gained": again["gained"]}
    third = read(STRONG_TUNED.replace(".json", "-3.json"))["candidates"][0]
    changes = {name: third[name] for name in ("lost", "gained")}
    rows["strong3"] = {"n": third["n_used"], "points": 100 * third["mean_difference"], **changes}
    rows["worker-beside"] = worker_off()
    for task, batch in (("mmlu", 1), ("gsm8k", 1), ("mmlu", 8)):
        worth = worth_inside(INSIDE_STRONG, task, batch)
        rows[f"inside-{task}-{batch}"] = {price: worth[f"margin:price={price},guard=on"] for price in ("0.1", "0.2")}
    return rows | others()


def others() -> Figures:
    """Labels, judges, the server under load, and SmolLM2 on other machines."""
    rows: Figures = {f"pair-{name}": {"size": embedded.size} for name, embedded in EMBEDDED.items()}
    for name in ("smollm2-135m", "qwen2.5-coder-1.5b"):
        for run in read(f"results/labels/h200/{name}/summary.json")["runs"]:
            rows[f"labels-{name}-{run['method']}"] = {"rows": run["rows"], "hour": run["rows_per_hour"]}
    run = read("results/labels/h200/qwen2.5-coder-1.5b-head/consequences.json")["head, 512 tokens, more prompts"]
    seconds = sum(run["seconds"].values())
    rows["labels-consequences"] = {"rows": run["rows"], "seconds": seconds, "hour": run["rows_per_hour"]}
    for run in read("results/labels/cpu-2core/bench-label.json")["runs"]:
        rows[f"labels-cpu-{run['name']}"] = {"rate": run["labels_per_second"]}
    for name in ("paper", "released"):
        metrics = read(f"{QWEN}/released/judge-{name}.json")["metrics"]
        rows[f"judge-{name}"] = {"m-auc": metrics["auc_mismatch"]}
        for threshold in "FR":
            runs = [
                read(f"{QWEN}/released/{task}/judged:{threshold}@{name}-g20/summary.json") for task in ("gsm8k", "mmlu")
            ]
            mean = {key: sum(run[key] for run in runs) / len(runs) for key in ("m_ratio", "delta_score")}
            rows[f"judge-{name}-{threshold}"] = {"gain": mean["m_ratio"] - 1, "points": 100 * mean["delta_score"]}
    for server, measured in read(OVER_HTTP)["servers"].items():
        for run in measured["rows"]:
            name = "again" if run["repeat"] else server
            columns = {name: run["tokens_per_second"], f"p50-{name}": run["first_token"]["p50_ms"]}
            rows.setdefault(f"http-{run['task']}-{run['clients']}", {}).update(columns)
    mixed = {name: server["rows"][0]["tokens_per_second"] for name, server in read(MIXED)["servers"].items()}
    shares = [
        mixed[f"mixed-{turn}, {visit}"] / mixed[f"lossless-{turn}, {visit}"]
        for turn in "12"
        for visit in ("visit 1", "visit 2")
    ]
    rows["mixed"] = {"mlow": min(shares), "mhigh": max(shares)}
    for name, file in LOADS.items():
        run = read(file)["levels"][-1]  # the most clients
        rows[f"load-{name}"] = {"clients": run["clients"], "n": run["compared"], "equal": run["equal"]}
    for name, file in SMOLLM2.items():
        measured = read(file)
        runs = {run["name"]: run for run in measured["runs"] if run["name"] == "selfjudge-plain"}
        exact = best(run for run in measured["runs"] if run["name"] == "selfjudge-exact")
        rows[f"smollm2-{name}"] = {
            "plain": runs["selfjudge-plain"]["tokens_per_second"], "exact": exact["tokens_per_second"],
            "gamma": exact["gamma"], "m-exact": exact["mean_accepted_length"], "same": exact["identical_to_plain"],
            "n": measured["prompts"], "tokens": measured["max_new_tokens"],
        }  # fmt: skip
    return rows | trade_off()


def trade_off() -> Figures:
    """SmolLM2 on 200 prompts of two tasks: gain in m and same answers by rule."""
    runs = read("results/judges/smollm2-135m/tradeoff.json")["runs"]
    exact = {run["task"]: run["mean_accepted_length"] for run in runs if run["rule"] == "exact"}
    names = {"judged@smollm2-135m": "judged", "margin": "margin"}
    return {
        f"smollm2-{run['task']}-{names[run['rule']]}-{run['value']}": {
            "n": run["n"], "gain": run["mean_accepted_length"] / exact[run["task"]] - 1, "same": run["agreement"],
        }
        for run in runs if run["rule"] in names
    }  # fmt: skip


ENGINES = {
    "plain": "plain", "exact": "`exact`", "vllm": "vLLM, plain", "vllm-draft": "vLLM, draft model", "vllm-head": "vLLM, same head",
    "llama": "llama.cpp, plain",
}  # fmt: skip
HOSTS = {"h200": "H200", "x86": "two x86 cores", "arm": "two ARM cores"}


def engines() -> str:
    """A row a machine and task: our engine, the others, m and the number of prompts; the fastest is bold."""
    columns = ("plain", "exact", "vllm", "vllm-head", "llama")
    names = [(f"h200-{task}-{batch}", BESIDE_VLLM) for task in ("gsm8k", "dolly") for batch in (1, 64)]
    for host, folder in CPUS.items():
        names += [
            (f"{host}-{task}", f"{folder}/llama-cpp-qwen2.5-coder-1.5b-{task}.json") for task in ("gsm8k", "dolly")
        ]
    names += [(f"{host}-smollm2", f"{folder}/llama-cpp-smollm2-135m.json") for host, folder in CPUS.items()]
    rows = []
    for name, file in names:
        row, (host, task, *batch) = figures()[name], name.split("-")
        title = "SmolLM2, mixed" if task == "smollm2" else f"Qwen, {task_title(task)}"
        title += f" × {batch[0]}" if batch else ""
        fastest = max(row.get(column, 0) for column in columns)
        cells = {column: number(row[column]) for column in columns if column in row}
        cells = {column: f"**{cell}**" if row[column] == fastest else cell for column, cell in cells.items()}
        other = (
            f"llama.cpp {cells['llama']}" if "llama" in cells else f"vLLM {cells['vllm']}, head {cells['vllm-head']}"
        )
        figures_of_exact = [f"{row['m-exact']:.1f}", number(row["n"])]
        rows.append([title, f"[{HOSTS[host]}](FILES{file})", cells["plain"], cells["exact"], other, *figures_of_exact])
    head = ["tokens/s", "host", "plain", "`exact`", "others", "m", "prompts"]
    return markdown_table(head, rows, "llrrlrr")


def by_engine(columns: dict[str, str], lines: Iterable[str]) -> str:
    """A row an engine, then m and the number of prompts; the fastest of a column is bold."""
    lines, known = list(lines), figures()
    fastest = {name: max(known[name][line] for line in lines) for name in columns}
    rows = [
        [ENGINES[line], *(f"**{number(known[name][line])}**" if known[name][line] == fastest[name] else number(known[name][line]) for name in columns)]
        for line in lines
    ]  # fmt: skip
    rows.append(["m of `exact`", *(f"{known[name]['m-exact']:.1f}" for name in columns)])
    rows.append(["prompts", *(number(known[name]["n"]) for name in columns)])
    return markdown_table(["tokens/s", *columns.values()], rows)


def beside_vllm_table() -> str:
    names = {f"h200-{task}-{n}": f"{task_title(task)}, {n}" for task in ("gsm8k", "dolly") for n in (1, 8, 64)}
    return by_engine(names, ("plain", "exact", "vllm", "vllm-draft", "vllm-head"))


def beside_llama_table() -> str:
    titles = {"gsm8k": "Qwen, GSM8K", "dolly": "Qwen, Dolly", "smollm2": "SmolLM2"}
    names = {f"{host}-{task}": f"{cores}: {title}" for host, cores in (("x86", "x86"), ("arm", "ARM")) for task, title in titles.items()}  # fmt: skip
    return by_engine(names, ("plain", "exact", "llama"))


def speed_by_task() -> str:
    lines = {
        "transformers": "transformers, plain",
        "plain": "plain",
        "small": "`exact`, small draft",
        "exact": "`exact`, head",
    }
    rows = [[title, *(number(figures()[f"task-{task}"][column]) for task in TASKS)] for column, title in lines.items()]
    rows.append(["answers equal to plain", *(share(figures()[f"task-{task}"]["same"]) for task in TASKS)])
    return markdown_table(["tokens/s", *map(task_title, TASKS)], rows)


def speed_by_rows() -> str:
    sizes, lines = (1, 8, 32, 128, 512), {"plain": "plain", "exact": "`auto`"}
    rows = [
        [f"{task_title(task)}, {title}", *(number(figures()[f"rows-{task}-{size}"][column]) for size in sizes)]
        for task in ("gsm8k", "dolly")
        for column, title in lines.items()
    ]
    return markdown_table(["tokens/s by answers at a time", *map(str, sizes)], rows)


def drafts() -> str:
    rows = []
    for draft, title in (("small", "small draft"), ("head", "head")):
        rows.append([f"{title}, top-1", *(share(figures()[f"{draft}-{task}"]["top1"]) for task in TASKS)])
        rows.append([f"{title}, m at γ = 5", *(f"{figures()[f'{draft}-{task}']['m5']:.1f}" for task in TASKS)])
    return markdown_table(["Qwen, one H200", *map(task_title, TASKS)], rows)


RULES = {
    "margin:0.5": "`margin:0.5`", "margin:1": "`margin:1`", "margin:price=0.2": "margin, price 0.2",
    "judged:R": "judged R", "judged:price=0.04": "judged, price 0.04",  "judged:F": "judged F",
}  # fmt: skip


def relaxed() -> str:
    """Gain in m, same answers, points, by rule and task."""
    tasks = ("gsm8k", "mmlu", "livecodebench", "dolly")
    known = figures()
    titles = [f"{task_title(task)}, {known[f'rule-{task}-exact']['n']:,.0f}" for task in tasks]
    rows = []
    for rule, title in RULES.items():
        cells = []
        for task in tasks:
            row = known.get(f"rule-{task}-{rule}")
            score = f", {points(row['points'])}" if row and task != "dolly" else ""
            cells.append(f"{change(row['gain'])}, {share(row['same'])}{score}" if row else "–")
        rows.append([title, *cells])
    return markdown_table(["gain in m, same answers, points", *titles], rows)


STRONG = f"{QWEN}/strong-draft/cells.json"
STRONG_TUNED = "results/tune/qwen2.5-coder-1.5b/mmlu-8b-strong.json"


def relaxing() -> str:
    """Beside a strong draft: plain, `exact` at its best γ and the fastest rule, by task and answers at a time."""
    rows = []
    cells = [cell for cell in read(STRONG)["cells"].values() if cell["part"] == "speed"]
    for task, load in (("gsm8k", 1), ("mmlu", 1), ("gsm8k", 64)):
        mine = [cell for cell in cells if (cell["task"], cell["load"]) == (task, load)]
        exact = [cell for cell in mine if cell["rule"] == "exact"]
        plain, top = exact[0], best(cell for cell in exact if cell["gamma"])
        rule = best(cell for cell in mine if cell["rule"] != "exact")
        name = f"`{rule['rule'].split(',')[0]}` {number(rule['tokens_per_second'])} (γ = {rule['gamma']})"
        worth = [f"{rule['over_same_gamma']:.2f}", f"{rule['tokens_per_second'] / top['tokens_per_second']:.2f}"]
        rows.append([f"{task_title(task)}, {load}", *_speeds(plain, top), name, *worth])
    tuned = read(STRONG_TUNED)
    run = best(run for run in tuned["candidates"] if run["tokens_per_second"])
    name = f"`{run['rule'].split(',')[0]}` {number(run['tokens_per_second'])} (γ = {run['gamma']})"
    speeds = [number(tuned["exact"]["plain_tokens_per_second"]), f"{number(tuned['exact']['tokens_per_second'])} (γ = {tuned['exact_gamma']})"]  # fmt: skip
    rows.append(["MMLU, 1, loss certified", *speeds, name, "the same", f"{run['speed_ratio']:.2f}"])
    head = ["task, at a time", "plain", "`exact`", "fastest rule", "over `exact`, same γ", "over `exact`, its best γ"]
    return markdown_table(head, rows)


def regime() -> str:
    """Quality in the paper's regime: what rules gain in m and cost beside a strong draft and long blocks, guards on."""
    rows = []
    for name in ("quality-g20.json", "quality-g15.json"):
        for cell in read(f"{QWEN}/strong-draft/{name}")["cells"].values():
            if "change" not in cell or cell["rule"] == "null":
                continue
            title = task_title(cell["task"])
            rule = "SelfJudge, R" if cell["rule"].startswith("judged") else f"`{cell['rule'].split(',')[0]}`"
            half = 50 * (cell["change_ci"][1] - cell["change_ci"][0])
            gain, score = 100 * (cell["m_ratio"] - 1), f"{100 * cell['change']:+.1f} ± {half:.1f}".replace("-", "−")
            rows.append(
                (title, rule, f"{gain:+.1f} %", score, f"{cell['lost']} / {cell['gained']}", share(cell["same"]))
            )
    rows.sort(key=lambda row: (row[0], float(row[2].split()[0])))
    return markdown_table(["task", "rule", "gain in m", "points", "lost / gained", "same answers"], rows)


def _speeds(plain: dict[str, Any], exact: dict[str, Any]) -> list[str]:
    return [number(plain["tokens_per_second"]), f"{number(exact['tokens_per_second'])} (γ = {exact['gamma']})"]


SMOLLM2 = {
    "H200, bfloat16, benchmark prompts": "results/speed/h200/decode-benchmarks-256.json",
    "two ARM cores, float32, int8 draft": "results/speed/cpu-2core/decode-float32.json",
    "two ARM cores, int8": "results/speed/cpu-2core/decode-int8.json",
}
LOADS = {"h200": "results/load/h200-qwen2.5-coder-1.5b.json", "arm": "results/load/cpu-2core-smollm2-135m-q4.json"}
OVER_HTTP = "results/load/h200-http.json"
MIXED = "results/load/h200-mix.json"


def over_http() -> str:
    """Ours and vLLM on one host."""
    known, clients = figures(), _clients()
    rows = [
        [
            f"{task_title(task)}, {title}",
            *(
                " / ".join(number(known[f"http-{task}-{n}"][kind + server]) for server in ("ours", "vllm"))
                for n in clients
            ),
        ]
        for kind, title, tasks in (("", "tokens/s", ("gsm8k", "dolly")), ("p50-", "first token, ms", ("gsm8k",)))
        for task in tasks
    ]
    return markdown_table(["clients (ours / vLLM)", *map(str, clients)], rows)


def later_http() -> str:
    """Ours later, on another host: prompts that are new, and those that the prefix cache knows."""
    known, clients = figures(), _clients()
    rows = [
        [f"{task_title(task)}, tokens/s", *(
            " / ".join(number(known[f"http-{task}-{n}"][column]) for column in ("later", "again")) for n in clients
        )]
        for task in ("gsm8k", "dolly")
    ]  # fmt: skip
    return markdown_table(["clients (new prompts / known ones)", *map(str, clients)], rows)


def _clients() -> list[int]:
    return sorted({run["clients"] for run in read(OVER_HTTP)["servers"]["ours"]["rows"]})


INSIDE = {"1.5 B": WORKER, "8.4 B": "results/vllm/h200-8b-head.json"}
INSIDE_STRONG = "results/vllm/h200-8b-strong-draft.json"
INSIDE_AT_ONCE = {"1.5 B": (1, 64), "8.4 B": (16, 64)}
INSIDE_RULES = ("margin:price=0.2,guard=on", "margin:1,guard=on", "judged:price=0.04,guard=on")


def worker_off() -> dict[str, float]:
    """Our worker in vLLM with requests that say off, beside vLLM without it: equal answers and speeds."""
    modes, ratios, equal, total = read(WORKER)["modes"], [], 0, 0
    for task, batch in dict.fromkeys((run["task"], run["batch"]) for run in modes["head"]["runs"]):
        own, off = ([run for run in modes[mode]["runs"] if _of(run, setting, task, batch)] for mode, setting in (("head", "head"), ("recipe", "off")))  # fmt: skip
        ratios.append(median(r["tokens_per_second"] for r in off) / median(r["tokens_per_second"] for r in own))
        equal += sum(map(str.__eq__, own[0]["answers"], off[0]["answers"]))
        total += len(own[0]["answers"])
    shares = [run["worker_share"] for run in modes["recipe"]["runs"] if run["setting"] != "off"]
    off_share = max(run["worker_share"] for run in modes["recipe"]["runs"] if run["setting"] == "off")
    mean = math.prod(ratios) ** (1 / len(ratios))
    return {"equal": equal, "n": total, "mean": mean, "mlow": min(ratios), "mhigh": max(ratios), "least": min(shares), "worst": max(shares), "off": off_share}  # fmt: skip


def worth_inside(file: str, task: str, batch: int) -> dict[str, float]:
    """What our worker makes in vLLM: tokens/s of requests that say off, and rules over it; medians of the repeats."""
    runs = [run for run in read(file)["modes"]["recipe"]["runs"] if (run["task"], run["batch"]) == (task, batch)]
    names = dict.fromkeys(run["setting"] for run in runs)
    speeds = {name: median(run["tokens_per_second"] for run in runs if run["setting"] == name) for name in names}
    return {name: speed if name == "off" else speed / speeds["off"] for name, speed in speeds.items()}


def inside_head() -> str:
    rows = []
    for name, file in INSIDE.items():
        for task, batch in itertools.product(("gsm8k", "dolly"), INSIDE_AT_ONCE[name]):
            worth = worth_inside(file, task, batch)
            ratios = [f"{worth[rule]:.2f}" if rule in worth else "–" for rule in INSIDE_RULES]
            rows.append([f"{name}, {task_title(task)}, {batch}", number(worth["off"]), *ratios])
    return markdown_table(
        ["target, task, at a time", "off", *(f"`{rule.split(',')[0]}`" for rule in INSIDE_RULES)], rows
    )


TABLES: dict[str, Callable[[], str]] = {
    "engines": engines, "beside vllm": beside_vllm_table, "beside llama": beside_llama_table,
    "speed by task": speed_by_task, "speed by rows": speed_by_rows, "drafts": drafts, "relaxed": relaxed,
    "relaxing": relaxing, "regime": regime, "over http": over_http, "later http": later_http,
    "inside head": inside_head,
}  # fmt: skip
FORMATS: dict[str, Callable[[float], str]] = {
    "same": share, "changed": share, "top1": share, "gain": change, "low": change, "high": change, "least": share, "worst": share, "off": share, "0.1": "{:.2f}".format, "0.2": "{:.2f}".format, "points": points, "score": lambda x: f"{100 * x:.1f}", "gamma": lambda x: f"{x:.1f}".removesuffix(".0"),
    "size": size, "longer": lambda x: f"{x:+.0f} %",
}  # fmt: skip


def figure(name: str) -> str:
    """What `{{name}}` stands for."""
    row, _, column = name.rpartition(" ")
    if row == "table":
        return TABLES[column.replace("-", " ")]()
    values = figures()[row]
    if "/" in column:
        over, under = column.split("/")
        return f"{values[over] / values[under]:.1f}"
    if column.startswith(("m", "worth", "slowest", "fastest")):
        return f"{values[column]:.2f}"
    return FORMATS.get(column, number)(values[column])


def page(name: str) -> str:
    """A page: its template with tables and figures; links to files from where the page lies."""
    text = (ROOT / "docs" / "templates" / f"{name}.in").read_text()
    text = re.sub(r"\{\{(.+?)\}\}", lambda found: figure(found[1]), text)
    return text.replace("](FILES", "](" + ("" if name == "README.md" else "../"))


if __name__ == "__main__":
    for name, file in PAGES.items():
        file.write_text(page(name))
