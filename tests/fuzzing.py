"""Mutants of files, tried in a process of their own: a signal ends that process and nothing else.

Started as a program it reads `KIND SEED` a line and answers `refused`, `accepted` or the error that should not be.
"""

from __future__ import annotations

import functools
import json
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NUMBERS = (0, 1, 2, 3, 7, 31, 64, 255, 1 << 15, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1)
FLOATS = (0.0, -0.0, 1e-38, 1e-45, 3e38, -3e38, float("inf"), float("-inf"), float("nan"), 1.0)
VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1,
    3,
    8,
    1 << 40,
    0.5,
    1e308,
    "",
    "x",
    "../x",
    [],
    {},
    [[]],
    [None],
    [0.1, 2],
)


def mutate_bytes(content: bytes, head: int, dice: random.Random) -> bytes:
    """A few changes, most of them in the first `head` bytes: bits, numbers, floats, pieces moved or cut off."""
    data = bytearray(content)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        at = dice.randrange(head if dice.random() < 0.8 else len(data))
        kind = dice.randrange(7)
        if kind == 0:
            data[at] ^= 1 << dice.randrange(8)
        elif kind == 1:
            data[at] = dice.randrange(256)
        elif kind in (2, 3):
            form = "<I" if kind == 2 else "<Q"
            new = struct.pack(form, dice.choice(NUMBERS) & (1 << 8 * struct.calcsize(form)) - 1)
            data[at : at + len(new)] = new
        elif kind == 4:
            at = dice.randrange(len(data) - 4) // 4 * 4
            data[at : at + 4] = struct.pack("<f", dice.choice(FLOATS))
        elif kind == 5:
            size, source = dice.randrange(1, 64), dice.randrange(len(data))
            piece = data[source : source + size]
            data[at : at + len(piece)] = piece
        elif dice.random() < 0.3:
            del data[at:]
            break
    return bytes(data)


def mutate_json(text: str, dice: random.Random) -> str:
    content = json.loads(text)
    for _ in range(dice.choice((1, 1, 2))):
        at = content
        while True:
            keys: list[Any] = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = dice.choice(keys)
            if isinstance(at[key], dict | list) and at[key] and dice.random() < 0.7:
                at = at[key]
            elif isinstance(at, dict) and dice.random() < 0.2:
                del at[key]
                break
            else:
                at[key] = dice.choice((*VALUES, at[key] * 2 if isinstance(at[key], int | float | str) else 0))
                break
    return json.dumps(content)


class Mutants:
    """Good files in a folder, and what is done with a mutant of each."""

    def __init__(self, root: Path) -> None:
        import torch
        import transformers as hf
        from tokenizers import Tokenizer, models

        from conftest import tiny_model
        from fake_certificate import recipe_folder
        from fake_gguf import write_model
        from selfjudge.judge.config import JudgeConfig
        from selfjudge.judge.model import Judge
        from selfjudge.models.shape import head_width

        torch.set_num_threads(1)
        self.root = root
        small = functools.partial(tiny_model, hidden_size=64, intermediate_size=96, vocab_size=64, num_hidden_layers=1)
        kinds = {"_norm": "F32", "rope": "F32", "ffn_down": "Q4_1", "attn_v": "Q5_0", "weight": "Q8_0"}
        for number, (kind, tied) in enumerate((("llama", True), ("qwen2", False))):
            model: Any = small(kind, tie_word_embeddings=tied)
            model.model.register_parameter("rope_freqs", torch.nn.Parameter(torch.ones(head_width(model.config) // 2)))
            write_model(model, root / f"{number}.gguf", kinds)
        small().save_pretrained(root / "checkpoint")
        inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, "w0"))
        hf.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0").save_pretrained(root / "checkpoint")
        Judge(JudgeConfig(8, "t", thresholds={"R": 0.5}, quality_curve=((0.5, 0.4),))).save_pretrained(root / "judge")
        config = JudgeConfig(8, "t", features="hidden+margin+previous", thresholds={"R": 0.5})
        Judge(config).save_pretrained(root / "judge" / "wide")
        hashes = {"target_sha256": "a" * 64, "draft_sha256": "b" * 64}
        pair: Any = SimpleNamespace(name="p", target_id="t", draft_id="d", dtype="float32", **hashes)
        recipe_folder(root / "recipe", pair, judge=Judge(JudgeConfig(8, "t", thresholds={"R": 0.5})))

    def gguf(self, dice: random.Random) -> None:
        import torch

        from selfjudge.engine.select import make_engine
        from selfjudge.models.gguf import open_model
        from selfjudge.models.load import Target

        content = (self.root / f"{dice.randrange(2)}.gguf").read_bytes()
        path = self.root / "mutant.gguf"
        head = content.index(b"tokenizer.ggml") if dice.random() < 0.5 else content.rindex(b".weight") + 40
        path.write_bytes(mutate_bytes(content, head, dice))
        engine = make_engine(Target(open_model(path), "mutant"))
        logits = engine.extend(torch.tensor([[3, 9, 1]])).logits
        assert logits.isfinite().all(), "logits are not finite"

    def safetensors(self, dice: random.Random) -> None:
        import torch

        from selfjudge.engine.select import make_engine
        from selfjudge.models.load import Loader

        folder = self._copy("checkpoint")
        self._change(folder, dice, "config.json", "model.safetensors")
        loader = Loader.choose(str(folder), "cpu", None, None, False)
        target, _ = loader.load_target(str(folder))
        make_engine(target).extend(torch.tensor([[3, 9, 1]]))

    def judge(self, dice: random.Random) -> None:
        import torch

        from selfjudge.judge.model import Judge

        folder = self._copy("judge") / dice.choice((".", "wide"))
        self._change(folder, dice, "config.json", "model.safetensors")
        judge = Judge.from_pretrained(folder)
        assert judge.score(torch.ones(judge.config.width)).isfinite(), "the score is not finite"
        judge.threshold("R" if judge.config.thresholds.get("R") is not None else None)

    def recipe(self, dice: random.Random) -> None:
        from selfjudge.tune.recipe import Recipe

        folder = self._copy("recipe")
        self._change(folder, dice, "recipe.json", "certificate.json", "judge/config.json")
        recipe = Recipe.load(folder)
        assert recipe.rule
        assert recipe.gamma >= 1

    def _copy(self, name: str) -> Path:
        shutil.rmtree(self.root / "mutant", ignore_errors=True)
        return Path(shutil.copytree(self.root / name, self.root / "mutant"))

    def _change(self, folder: Path, dice: random.Random, *names: str) -> None:
        file = folder / dice.choice(names)
        if file.suffix == ".json" and dice.random() < 0.9:
            file.write_text(mutate_json(file.read_text(), dice))
        else:
            content = file.read_bytes()
            file.write_bytes(mutate_bytes(content, min(len(content), 1000), dice))


class Worker:
    """The process, as tests see it; started again after a signal."""

    def __init__(self) -> None:
        memory = Path("/dev/shm")  # thousands of small files: a disk would take most of the time
        self.root = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
        self.started = 0
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        self.started += 1
        command = [sys.executable, __file__, str(Path(self.root.name, str(self.started)))]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def __call__(self, kind: str, seed: int) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{kind} {seed}\n")
        self.process.stdin.flush()
        if answer := self.process.stdout.readline():
            return answer.strip()
        code = self.process.wait()
        self.process = self._start()
        return f"signal {-code}"

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.root.cleanup()


def main() -> None:
    import warnings

    from selfjudge.errors import SelfJudgeError
    from selfjudge.models.convert import quiet

    warnings.simplefilter("ignore")
    root = Path(sys.argv[1])
    root.mkdir()
    with quiet():
        mutants = Mutants(root)
    print("ready", flush=True)
    for line in sys.stdin:
        kind, seed = line.split()
        use: Callable[[random.Random], None] = getattr(mutants, kind)
        try:
            use(random.Random(f"{kind}-{seed}"))
            said = "accepted"
        except SelfJudgeError as error:
            said = "refused" if "\n" not in str(error) else "error: more than one line"
        except BaseException as error:
            said = f"error: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        print(said, flush=True)


if __name__ == "__main__":
    main()
