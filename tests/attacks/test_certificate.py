"""Certificates that somebody has changed: by hand, or with all checksums written anew. All that load a recipe refuse it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fake_certificate import certificate, recipe_folder, tamper
from selfjudge.cli import main as cli
from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.report.certificate import certificate_page
from selfjudge.tune.recipe import Recipe
from selfjudge.tune.verify import pack, unpack

Change = Callable[[dict[str, Any]], Any]
BOTH = "recipe.json certificate.json"
CURVE = ((0.5, 0.2), (0.8, 0.4), (0.9, 0.6), (0.95, 0.8))


def setting(**values: Any) -> Change:
    return lambda content: content.update(values)


def within(key: str, **values: Any) -> Change:
    return lambda content: content[key].update(values)


def first_candidate(**values: Any) -> Change:
    return lambda content: content["candidates"][0].update(values)


def renaming(rule: str = "", new: str = "", resolved: str = "", gamma: int = 3, **values: Any) -> Change:
    """Another name for the rule of a bet, its recipe changed with it; or another γ for the first bet."""

    def change(content: dict[str, Any]) -> None:
        content.update(values)
        if content["rule"] == rule:
            content.update(rule=new, resolved=resolved)
        for number, row in enumerate(content.get("candidates", [])):
            row["rule"] = new if row["rule"] == rule else row["rule"]
            row["gamma"] = gamma if number == 0 else row["gamma"]

    return change


ROW = (
    *("rule", "resolved", "gamma", "n", "certified", "mean_difference", "mean_difference_ci", "lost", "gained", "exact_gamma"),
    *("speed_measure", "speed_ratio", "speed_ci", "exact_over_plain", "evidence", "overlap"),
)  # fmt: skip


def adding_row(**values: Any) -> Change:
    """A further load, with what is said of the first one but for `values`."""

    def change(content: dict[str, Any]) -> None:
        own = {name: content[name] for name in ROW if name in content}
        content["more_loads"] = [{"load": 8, **own, **{k: v for k, v in values.items() if k in own or k == "load"}}]

    return change


SPEEDS = [
    {"load": 1, "rule": rule, "gamma": gamma, "mean_accepted_length": 2.0, "tokens_per_second": rate}
    for rule, gamma, rate in (("exact", 3, 1.0), ("judged:q0.95", 5, 9.0), ("judged:q0.9", 5, 9.0), ("judged:q0.8", 5, 9.0))
]  # fmt: skip
TAMPERINGS: dict[str, tuple[str, Change, str]] = {
    "every θ of the quality curve 0": ("judge/config.json", setting(quality_curve=[[0.5, 0.0], [0.9, 0.0]]), "not judged:theta=0.6,"),
    "not certified": ("certificate.json", setting(certified=False), "is not certified"),
    "ε 0": ("certificate.json", setting(epsilon=0.0), "no ε"),
    "ε 0.0001": ("certificate.json", setting(epsilon=0.0001), "refuted of judged:q0.95 does not follow"),
    "δ smaller": ("certificate.json", setting(delta=1e-30), "does not follow"),
    "δ larger": ("certificate.json", setting(delta=0.4), "does not follow"),
    "no judge": ("recipe.json", setting(judge=None), "the judge of the rule judged:q0.9 is missing"),
    "no evidence": ("certificate.json", setting(evidence=None), "evidence of the certificate does not follow"),
    "empty evidence": ("certificate.json", setting(evidence={}), "evidence"),
    "another p-value": ("certificate.json", within("evidence", p_value=1e-9), "evidence of the certificate does not follow"),
    "no differences": ("certificate.json", first_candidate(differences=""), "does not follow"),
    "other differences": ("certificate.json", first_candidate(differences="4000*1"), "does not follow"),
    "differences beyond 1": ("certificate.json", first_candidate(differences="4000*-2"), "are not those of these prompts"),
    "more differences than prompts": ("certificate.json", first_candidate(differences="4001*0"), "are not those of these prompts"),
    "differences without end": ("certificate.json", first_candidate(differences="99999999999*0"), "is not a list of numbers"),
    "all lost": ("certificate.json", setting(lost=4000), "lost of the certificate does not follow"),
    "a better mean": ("certificate.json", setting(mean_difference=0.1), "mean_difference of the certificate does not follow"),
    "more prompts": ("certificate.json", setting(n=40_000), "n of the certificate does not follow"),
    "other groups": ("certificate.json", setting(groups="2000*2"), "does not follow"),
    "groups of half a prompt": ("certificate.json", setting(groups="8000*0.5"), "no ε"),
    "groups without end": ("certificate.json", setting(groups="199999*1 99999999"), "no ε"),
    "a group beyond all numbers": ("certificate.json", setting(groups="9" * 400), "no ε"),
    "a negative count": ("certificate.json", setting(groups="-5*1 4000*1"), "is not a list of numbers"),
    "ε nearly 1": ("certificate.json", setting(epsilon=1 - 2.0**-53), "no ε"),
    "δ nearly 0": ("certificate.json", setting(delta=5e-324), "no ε"),
    "no speed": ("certificate.json", setting(speed_ratio=None), "how fast its rule is"),
    "a word as speed": ("certificate.json", setting(exact_over_plain="fast"), "exact_over_plain"),
    "no groups": ("certificate.json", setting(groups=""), "no ε"),
    "an attempt less": ("certificate.json", setting(attempt=2), "attempt 2 does not follow"),
    "a family less": ("certificate.json", setting(families=["judged"]), "does not follow"),
    "a family that there is not": ("certificate.json", renaming(families=["judged", "luck"]), "families that there are not"),
    "rules of several γ": ("certificate.json", renaming(gamma=5), "rules of several γ"),
    "the name of a later rule": (BOTH, renaming("judged:q0.9", "judged:q0.8", "judged:theta=0.4,confirm=0,guard=True"), "judged:q0.95 at γ = 3, judged:q0.8 at γ = 3, judged:q0.8 at γ = 3 are not the first rules of the family judged"),
    "the name of a rule that no family has": (BOTH, renaming("judged:q0.9", "judged:q0.7", "judged:theta=0.4,confirm=0,guard=True"), "are not the first rules"),
    "no family": ("certificate.json", setting(families=[]), "no ε"),
    "words of another certificate": ("certificate.json", within("overlap", bound=1.0), "overlap of the certificate does not follow"),
    "no words": ("certificate.json", setting(overlap=None), "the overlap of every prompt"),
    "another target": ("certificate.json", setting(target_sha256="0" * 64), "another target_sha256"),
    "another draft": ("certificate.json", setting(draft_sha256="0" * 64), "another draft_sha256"),
    "another tokenizer": ("certificate.json", setting(tokenizer_sha256="0" * 64), "another tokenizer_sha256"),
    "other prompts": ("certificate.json", setting(prompts_sha256="0" * 64), "another prompts_sha256"),
    "another rule": (BOTH, setting(rule="judged:q0.5", resolved="judged:theta=0.2,confirm=0,guard=True"), "no bet certifies judged:q0.5"),
    "another γ": (BOTH, setting(gamma=8), "no bet certifies judged:q0.9 at γ = 8"),
    "another θ": (BOTH, setting(resolved="judged:theta=0.1,confirm=0,guard=True"), "as it was certified"),
    "no guard": (BOTH, setting(resolved="judged:theta=0.6,confirm=0,guard=False"), "as it was certified"),
    "another rule that failed": (BOTH, setting(rule="margin:1,guard=on", resolved="margin:threshold=1.0,guard=True"), "judge of the rule"),
    "a load of another γ": (BOTH, adding_row(gamma=8), "no bet certifies judged:q0.9 at γ = 8"),
    "a load that lost less": (BOTH, adding_row(lost=0), "lost of the certificate does not follow"),
    "a load that is not certified": (BOTH, adding_row(certified=False), "is not certified"),
    "a load twice": (BOTH, adding_row(load=1), "loads, each once"),
    "a load of the certificate alone": ("certificate.json", adding_row(), "another more_loads"),
    "another load": ("certificate.json", setting(load=64), "not of the same loads"),
    "speeds that chose other pairs": ("certificate.json", setting(speeds=SPEEDS), "are not the first rules of the family judged"),
    "an older version": (BOTH, setting(format_version=1), "made by another version"),
}  # fmt: skip
"""File, change, and what is said even if all checksums are written anew."""


@pytest.fixture(scope="module")
def good(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = JudgeConfig(hidden_size=tiny_pair.hidden_size, target=tiny_pair.target_id, quality_curve=CURVE)
    return recipe_folder(tmp_path_factory.mktemp("good") / "tuned", tiny_pair, judge=Judge(config), rule="judged:q0.9")


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "tuned"))


def change_all(folder: Path, case: str, *, sealed: bool) -> str:
    files, change, said = TAMPERINGS[case]
    for file in files.split():
        tamper(folder, file, change, sealed=sealed)
    return said


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["selfjudge", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code


def test_what_is_not_changed_is_loaded(folder: Path) -> None:
    Recipe.load(folder)


@pytest.mark.parametrize("case", TAMPERINGS)
def test_what_does_not_follow_is_refused(folder: Path, case: str) -> None:
    """With all checksums written anew."""
    said = change_all(folder, case, sealed=True)
    with pytest.raises(SelfJudgeError, match=said) as refused:
        Recipe.load(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("case", ["every θ of the quality curve 0", "all lost", "no judge", "another rule"])
def test_files_that_differ_from_their_checksums_are_refused(folder: Path, case: str) -> None:
    """One of each file: judge, certificate, recipe, both."""
    change_all(folder, case, sealed=False)
    with pytest.raises(SelfJudgeError) as refused:
        Recipe.load(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("command", "case"),
    [
        *((command, "not certified") for command in ("serve", "serve --backend vllm", "serve --shadow 0.1", "bench decode", "eval")),
        *(("generate", case) for case in list(TAMPERINGS)[:7]),
    ],
)  # fmt: skip
def test_no_command_runs_a_changed_recipe(
    folder: Path, command: str, case: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    more = {"generate": ["w1"], "eval": ["--tasks", "arithmetic", "--out", str(tmp_path / "out")]}.get(command, [])
    said = change_all(folder, case, sealed=True)
    assert run(monkeypatch, *command.split(), *more, "--recipe", str(folder)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    assert not (tmp_path / "out").exists()


def test_verify_says_what_was_checked(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert run(monkeypatch, "certificate", "verify", str(folder)) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line[:3] for line in lines[:4]] == ["ok:"] * 4
    for line, words in zip(
        lines,
        ("3 files as written", "rule judged:theta=0.6", "bet won after", "no signature", "On prompts like these"),
        strict=True,
    ):
        assert words in line
    assert err == ""
    change_all(folder, "all lost", sealed=True)
    assert run(monkeypatch, "certificate", "verify", str(folder)) == 1
    assert (
        capsys.readouterr().err
        == f"selfjudge: does not hold: {folder}: lost of the certificate does not follow from the differences of its prompts\n"
    )
    assert run(monkeypatch, "certificate", "verify", str(folder / "nowhere")) == 1
    assert "has no recipe.json" in capsys.readouterr().err


def test_a_file_that_is_missing_or_another(folder: Path) -> None:
    weights = (folder / "judge" / "model.safetensors").read_bytes()
    (folder / "judge" / "model.safetensors").write_bytes(weights[:-1] + b"\1")
    with pytest.raises(SelfJudgeError, match=r"model\.safetensors is not the file that this recipe was certified with"):
        Recipe.load(folder)
    (folder / "judge" / "model.safetensors").unlink()
    with pytest.raises(SelfJudgeError, match=r"model\.safetensors is not the file"):
        Recipe.load(folder)


def test_a_file_that_cannot_be_read_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("selfjudge.tune.verify.sha256", refuse)
    with pytest.raises(SelfJudgeError, match=r"^cannot read .*: Permission denied$"):
        Recipe.load(folder)


def test_a_rule_after_one_that_failed_is_refused(folder: Path) -> None:
    def turn(content: dict[str, Any]) -> None:
        content["candidates"][1:3] = content["candidates"][2:0:-1]

    tamper(folder, "certificate.json", turn, sealed=True)
    with pytest.raises(SelfJudgeError, match="was tested after a rule of its family that is not certified"):
        Recipe.load(folder)


def test_packed_numbers_come_back() -> None:
    for values in ([], [0.0], [0.0] * 7 + [1.0, -0.25, -0.25, 0.3333], [1.0] * 3):
        assert unpack(pack(values)) == values
    assert pack([0.0] * 466 + [1.0]) == "466*0 1"


def test_whoever_makes_up_the_evidence_is_caught_by_the_signature_alone(
    folder: Path, tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from selfjudge.tune.recipe import sign

    for name in ("key", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    public = str(tmp_path / "key.pub")
    assert run(monkeypatch, "certificate", "verify", str(folder), "--key", public) == 1
    assert "is not signed" in capsys.readouterr().err
    sign(folder, Recipe.load(folder).content["digest"], tmp_path / "key")
    assert run(monkeypatch, "certificate", "verify", str(folder), "--key", public) == 0
    assert "ok: signed with" in capsys.readouterr().out
    assert run(monkeypatch, "certificate", "verify", str(folder), "--key", str(tmp_path / "other.pub")) == 1
    assert "was not signed with" in capsys.readouterr().err
    monkeypatch.setenv("SELFJUDGE_RECIPE_KEY", public)
    Recipe.load(folder)
    shutil.copytree(folder, tmp_path / "forged")
    tamper(tmp_path / "forged", "certificate.json", setting(task="another task"), sealed=True)  # nothing contradicts it
    with pytest.raises(SelfJudgeError, match=r"was not signed with .*, or was changed since"):
        Recipe.load(tmp_path / "forged")
    assert run(monkeypatch, "certificate", "verify", str(tmp_path / "forged")) == 1
    assert "or was changed since" in capsys.readouterr().err
    monkeypatch.delenv("SELFJUDGE_RECIPE_KEY")
    Recipe.load(tmp_path / "forged")
    assert run(monkeypatch, "certificate", "verify", str(tmp_path / "forged"), "--key", public) == 1
    for wrong in (folder / "recipe.json", tmp_path / "missing"):
        assert run(monkeypatch, "certificate", "verify", str(folder), "--key", str(wrong)) == 1
        assert "is not a public Ed25519 key" in capsys.readouterr().err


def test_a_recipe_without_a_judge_has_no_other_rules_among_the_judged(tiny_pair: Pair, tmp_path: Path) -> None:
    folder = recipe_folder(tmp_path / "tuned", tiny_pair)

    def rename(content: dict[str, Any]) -> None:
        content["families"] = ["judged", "topk"]
        for row in content["candidates"]:
            row["family"] = "judged"

    tamper(folder, "certificate.json", rename, sealed=True)
    with pytest.raises(SelfJudgeError, match="are not the first rules of the family judged"):
        Recipe.load(folder)


def test_the_environment_names_the_key_that_verify_checks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("SELFJUDGE_RECIPE_KEY", str(folder / "missing.pub"))
    assert run(monkeypatch, "certificate", "verify", str(folder)) == 1
    said = capsys.readouterr().err
    assert "missing.pub is not a public" in said or "need cryptography" in said


def test_without_the_package_it_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert run(monkeypatch, "certificate", "verify", str(folder), "--key", "key.pub") == 1
    assert "signatures need cryptography: pip install cryptography" in capsys.readouterr().err


HOSTILE = [
    '<img src=x onerror="alert(1)">',
    "[x](javascript:alert(1))",
    "</details><script>alert(1)</script>",
    "a\n\n<b>b</b>\n\n# c",
]


@pytest.mark.parametrize(
    "text", [HOSTILE[0], *(pytest.param(text, marks=pytest.mark.slow) for text in HOSTILE[1:3]), HOSTILE[3]]
)
def test_hostile_names_are_text_in_the_certificate(text: str) -> None:
    content = certificate(pair=text, task=f"file:{text}")
    content["versions"] = {"torch": text}
    page = certificate_page(content, [])
    assert "<script>alert" not in page
    assert "<img" not in page
    json.dumps(content)
