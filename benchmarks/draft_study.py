"""Which draft suits a target: `python benchmarks/draft_study.py --target T --data DIR --out DIR`.

Makes the training data once, trains a student of each shape for the same few minutes, measures all of them on held-out
benchmark prompts, then trains the chosen shape for longer and writes it like `selfjudge distill`. The data, the
measurements and the final draft follow from the seed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from common import read_task_prompts, say
from draft_quality import DraftBenchConfig, bench_draft

from selfjudge.cli.output import Progress
from selfjudge.distill.config import DistillConfig, Schedule
from selfjudge.distill.data import DataMaker
from selfjudge.distill.learners import Student, StudentLearner
from selfjudge.distill.pipeline import export_student
from selfjudge.distill.train import Trainer
from selfjudge.models.convert import build_draft
from selfjudge.models.load import Draft
from selfjudge.models.pair import Pair
from selfjudge.store import RunFolder, write_json

PROMPTS = ["self:14000x2", "self-summaries:3500x2", "gsm8k:7473x4", "mbpp:374x12", "dolly:13500x3"]
DOMAINS = {"math": "gsm8k", "code": "mbpp", "open": "dolly", "summarisation": "cnn_dailymail"}


def shaped(settings: DistillConfig, text: str) -> DistillConfig:
    """The settings of a student of a shape such as 4x384x1024: layers, width, width of the feed-forward layers."""
    layers, width, inner = map(int, text.split("x"))
    return replace(settings, layers=layers, width=width, inner=inner)


def held_out_prompts(pair: Pair, data: Path, count: int) -> dict[str, list[list[int]]]:
    """The first prompts of every domain's test split."""
    return {domain: pair.encode_many(read_task_prompts(name, data, count)) for domain, name in DOMAINS.items()}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", nargs="+", default=PROMPTS)
    parser.add_argument("--shapes", nargs="*", default=["6x256x768", "4x384x1024", "2x576x1536"])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--final", default="", help="shape to train for longer and to write, or `best`")
    parser.add_argument("--final-minutes", type=float, default=7.0)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--held-out", type=int, default=128, help="prompts of each benchmark")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--device", default=None)
    return parser.parse_args()


def main() -> None:
    o = options()
    pair = Pair.load(o.target, device=o.device, needs_draft=False, full_precision=True)
    say("loaded", o.target)
    settings = DistillConfig(
        minutes=o.final_minutes, prompts=tuple(o.prompts), rate=o.rate, batch_tokens=o.batch_tokens,
        max_new_tokens=o.max_new_tokens, batch=o.batch,
    )  # fmt: skip
    work, progress = o.out / "work", Progress()
    data = DataMaker(pair, settings, RunFolder(o.out), o.data, progress).make()
    say("prompts", json.dumps(data.report))
    say("corpus", len(data.training.answers), "answers", data.training.answer_tokens, "tokens")
    benchmark_prompts = held_out_prompts(pair, o.data, o.held_out)

    def trained(text: str, minutes: float) -> tuple[Student, object]:
        student = Student(pair.target, shaped(settings, text))
        checkpoint = work / f"train-{text}-{minutes:g}.safetensors"
        schedule = Schedule(minutes, rate=o.rate, batch_tokens=o.batch_tokens)
        state = Trainer(StudentLearner(student, data), checkpoint, schedule, progress).run()
        return student, state

    def measured(student: Student, text: str) -> dict[str, object]:
        small = build_draft(student.tensors(), student.raw, pair.target).to(pair.target.device, pair.target.dtype)
        config = DraftBenchConfig(max_new_tokens=o.max_new_tokens, batch=64)
        result = bench_draft(replace(pair, draft_model=Draft(small)), benchmark_prompts, config)
        trained_parameters = sum(t.numel() for t in student.tensors().values())
        result |= {"shape": text, "trained_parameters": trained_parameters}
        say(
            text,
            json.dumps(
                {r["prompts"]: {k: round(v, 3) for k, v in r.items() if isinstance(v, float)} for r in result["runs"]}
            ),
        )
        return result

    study = []
    for text in o.shapes:
        student, state = trained(text, o.minutes)
        study.append({**measured(student, text), "minutes": o.minutes, "history": state.history})
        write_json(o.out / "study.json", {"settings": asdict(settings), "runs": study})
        del student
    if not o.final:
        return
    if o.final == "best":  # by accepted length over all domains
        o.final = max(study, key=lambda run: run["runs"][-1]["m_gamma_10"])["shape"]
    student, state = trained(o.final, o.final_minutes)
    maker = DataMaker(pair, shaped(settings, o.final), RunFolder(o.out / "draft"), o.data, progress)
    export_student(maker, StudentLearner(student, data), state)
    write_json(
        o.out / "final.json", {**measured(student, o.final), "minutes": o.final_minutes, "history": state.history}
    )
    say("done", (o.out / "draft" / "model.safetensors").stat().st_size)


if __name__ == "__main__":
    main()
