"""llama.cpp and our loop on the same GGUF file, prompts and threads, by turns: `python benchmarks/llama_cpp.py --node DIR`.

DIR is a folder in which `npm install --ignore-scripts node-llama-cpp` was run: its prebuilt binaries need no compiler.
Where Python's llama-cpp-python is installed, `--node` may be left out. Both sides get the same token ids, decode greedily
and stop at the same end tokens. Tokens per second are those after the first; the time to the first is reported apart.
Ours is timed as a user of `stream` sees it: with tokenizing, and text for every token. Resident memory is that of the whole
process, Python and torch or Node included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import say

from selfjudge.decoding.text import stream
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import BUILT_IN
from selfjudge.store import measured_on, write_json
from selfjudge.tasks import load_task
from selfjudge.types import Generation, pooled_figures

WORKER = Path(__file__).with_name("llama_cpp.mjs")


class Timed(NamedTuple):
    """One answer."""

    tokens: list[int]
    first: float
    """Seconds until the first token."""
    seconds: float
    """Until the last."""
    made: Generation | None = None
    """As our loop gives it."""


Answer = Callable[[list[int], int], Timed]


@dataclass
class Contestant:
    """One way to decode, and what it took in each repeat."""

    name: str
    answer: Answer
    timed: list[list[Timed]] = field(default_factory=list)

    def speeds(self, places: Sequence[int] | None = None) -> list[float]:
        """Tokens per second after the first token, of each repeat; of some of the prompts, or of all."""
        chosen = [[repeat[i] for i in (range(len(repeat)) if places is None else places)] for repeat in self.timed]
        return [
            sum(len(t.tokens) - 1 for t in repeat) / max(sum(t.seconds - t.first for t in repeat), 1e-9)
            for repeat in chosen
        ]


class NodeLlama:
    """llama.cpp inside a Node process."""

    def __init__(self, folder: Path, gguf: Path, threads: int, end: Sequence[int]) -> None:
        self.end = list(end)
        command = ["node", str(WORKER), str(gguf), str(threads), "4096"]
        self.process = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = "node-llama-cpp " + self._read()["version"]
        self.resident = 0

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("llama.cpp ended: was `npm install --ignore-scripts node-llama-cpp` run in --node?")
        return dict(json.loads(line))

    def __call__(self, prompt: list[int], tokens: int) -> Timed:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompt": prompt, "tokens": tokens, "end": self.end}) + "\n")
        self.process.stdin.flush()
        reply = self._read()
        self.resident = reply["resident"]
        return Timed(reply["tokens"], reply["first"], reply["seconds"])


class PythonLlama:
    """llama.cpp through llama-cpp-python."""

    def __init__(self, gguf: Path, threads: int, end: Sequence[int]) -> None:
        import llama_cpp

        self.version, self.resident, self.end = f"llama-cpp-python {llama_cpp.__version__}", 0, set(end)
        self.model = llama_cpp.Llama(
            str(gguf), n_ctx=4096, n_threads=threads, n_threads_batch=threads, n_gpu_layers=0, verbose=False
        )

    def __call__(self, prompt: list[int], tokens: int) -> Timed:
        self.model.reset()
        given: list[int] = []
        start = time.perf_counter()
        first = 0.0
        for token in self.model.generate(prompt, temp=0.0, repeat_penalty=1.0, reset=True):
            first = first or time.perf_counter() - start
            given.append(token)
            if len(given) == tokens or token in self.end:
                break
        return Timed(given, first, time.perf_counter() - start)


def ours(pair: Pair, rule: str, gamma: int | None, texts: dict[tuple[int, ...], str]) -> Answer:
    """Our loop as `stream` gives it, tokenising included; `texts` says which text a prompt's ids are of."""

    def answer(prompt: list[int], tokens: int) -> Timed:
        start = time.perf_counter()
        first = 0.0
        answers = stream(pair, texts[tuple(prompt)], rule, gamma=gamma, max_new_tokens=tokens, raw=True, trace=False)
        for _ in answers:
            first = first or time.perf_counter() - start
        seconds, made = time.perf_counter() - start, answers.generation
        return Timed(list(made.tokens), first, seconds, made)

    return answer


def prompts_of(pair: Pair, source: str | None, data: Path | None, count: int) -> tuple[list[str], list[str]]:
    """Kinds, and texts as the chat template writes them: the built-in prompts, or unseen ones of a task."""
    if source is None:
        kinds, chosen = map(list, zip(*BUILT_IN[:count], strict=True))
    else:
        origin = load_task(source, data)
        chosen = [origin.prompt(row) for row in origin.examples("test", count)]
        kinds = [source] * len(chosen)
    return kinds, [pair.tokenizer.decode(pair.encode(prompt)) for prompt in chosen]


def long_text(pair: Pair, length: int) -> str:
    """A text of about `length` tokens."""
    ids = pair.tokenizer.encode(" ".join(text for _, text in BUILT_IN * 3), add_special_tokens=False)
    return str(pair.tokenizer.decode(ids[:length]))


def time_all(contestants: Sequence[Contestant], prompts: Sequence[list[int]], tokens: int, repeats: int) -> None:
    """All by turns within a prompt, so that a machine that slows down slows down all of them; the first turn warms up."""
    for contestant in contestants:
        contestant.answer(prompts[0], 8)
    for repeat in range(repeats):
        for contestant in contestants:
            contestant.timed.append([])
        for prompt in prompts:
            for contestant in contestants:
                contestant.timed[-1].append(contestant.answer(prompt, tokens))
        say(f"repeat {repeat + 1}:", ", ".join(f"{c.name} {c.speeds()[-1]:.1f}" for c in contestants))


def same_answers(one: Contestant, other: Contestant) -> float:
    """Share of the prompts that two answer with the same tokens."""
    same = [a.tokens == b.tokens for a, b in zip(one.timed[0], other.timed[0], strict=True)]
    return sum(same) / len(same)


def row(contestant: Contestant, contestants: Sequence[Contestant], kinds: Sequence[str]) -> dict[str, Any]:
    """Medians over the repeats; ratios are taken within a repeat. llama.cpp is the first contestant, then ours."""
    speeds, (baseline, ours) = contestant.speeds(), contestants[:2]
    ratios = [a / b for a, b in zip(speeds, baseline.speeds(), strict=True)]
    pooled = pooled_figures([t.made for t in contestant.timed[-1] if t.made is not None])
    places = {kind: [i for i, other in enumerate(kinds) if other == kind] for kind in kinds}
    return {
        "name": contestant.name,
        "tokens_per_second": statistics.median(speeds),
        "ratio_to_llama_cpp": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "by_kind": {kind: statistics.median(contestant.speeds(at)) for kind, at in places.items()},
        "mean_accepted_length": pooled["mean_accepted_length"],
        "gamma_mean": pooled["gamma_mean"],
        "first_token_seconds": statistics.median(t.first for timed in contestant.timed for t in timed),
        "tokens": sum(len(t.tokens) for t in contestant.timed[0]),
        "same_answers": same_answers(contestant, baseline),
        "same_answers_as_our_first": same_answers(contestant, ours),
    }


def prefill_speeds(contestant: Contestant, lengths: Sequence[int]) -> dict[str, float]:
    """Prompt tokens per second by length, from the time to the first token; the best repeat."""
    best = [min(repeat[i].first for repeat in contestant.timed) for i in range(len(lengths))]
    return {str(length): length / seconds for length, seconds in zip(lengths, best, strict=True)}


def resident() -> int:
    """Bytes of this process that are in memory."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="smollm2-135m")
    parser.add_argument("--gguf", type=Path, required=True, help="The target's GGUF file, which llama.cpp reads.")
    parser.add_argument("--node", type=Path, help="Folder with node_modules/node-llama-cpp.")
    parser.add_argument("--dtype", default=None, help="Of our side; the pair's default if not given.")
    parser.add_argument("--task", default=None, help="Prompts of a task's test split; the built-in ones if not given.")
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--rules",
        default="plain,exact,judged",
        help="Of our side, with the default γ of each; plain is exact with γ = 0. RULE+DRAFT takes another draft.",
    )
    parser.add_argument("--prefill", default="128,512,1024", help="Lengths of prompts; empty for none.")
    parser.add_argument("--prefill-repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def our_side(pair: Pair, rules: str, texts: dict[tuple[int, ...], str], dtype: str | None) -> list[Contestant]:
    """One contestant a rule, all on the same target."""
    contestants = []
    for name in rules.split(","):
        rule, _, draft = name.partition("+")
        own = (
            replace(Pair.load(pair.target_id, draft, device="cpu", dtype=dtype), target_model=pair.target_model)
            if draft
            else pair
        )
        answer = ours(own, "exact", 0, texts) if rule == "plain" else ours(own, rule, None, texts)
        contestants.append(Contestant(f"selfjudge-{name}", answer))
    return contestants


def main() -> None:
    o = options()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    before = resident()
    pair = Pair.load(o.pair, device="cpu", dtype=o.dtype)
    end = sorted(pair.eos_ids)
    peer = NodeLlama(o.node, o.gguf, threads, end) if o.node else PythonLlama(o.gguf, threads, end)
    kinds, texts = prompts_of(pair, o.task, o.data, o.prompts)
    longs = [long_text(pair, int(length)) for length in o.prefill.split(",") if length]
    encoded = {text: pair.encode(text, raw=True) for text in (*texts, *longs)}
    sides = our_side(pair, o.rules, {tuple(ids): text for text, ids in encoded.items()}, o.dtype)
    contestants = [Contestant("llama.cpp", peer), *sides]
    time_all(contestants, [encoded[text] for text in texts], o.tokens, o.repeats)
    rows = [row(contestant, contestants, kinds) for contestant in contestants]
    memory = {"llama.cpp": peer.resident, "selfjudge": resident(), "python_and_torch": before}
    lengths = [len(encoded[text]) for text in longs]
    readers = [Contestant(c.name, c.answer) for c in contestants[:2]]
    if longs:
        time_all(readers, [encoded[text] for text in longs], 1, o.prefill_repeats)
    write_json(o.out, {
        **measured_on(), "peer": peer.version, "pair": pair.name, "dtype": pair.dtype, "threads": threads, "batch": 1,
        "prompts": o.task or "built-in", "count": len(texts), "max_new_tokens": o.tokens, "repeats": o.repeats,
        "runs": rows, "resident_bytes": memory,
        "prefill_tokens_per_second": {c.name: prefill_speeds(c, lengths) for c in readers if longs},
    })  # fmt: skip
    for line in rows:
        say(
            f"{line['name']:18} {line['tokens_per_second']:7.1f} tokens/s, {line['ratio_to_llama_cpp']:.2f} x llama.cpp"
        )


if __name__ == "__main__":
    main()
