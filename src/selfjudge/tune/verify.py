"""Recomputes a certificate from its evidence. A check returns a line about it or raises a one-line error. No torch."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from selfjudge.decoding.rule_parser import STRICT, RuleRequest, rule_text
from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import JudgeConfig
from selfjudge.report.certificate import list_loads
from selfjudge.store import sha256
from selfjudge.tune.certify import Claim, average_groups, decide, describe_evidence, find_upper_bound, share_delta
from selfjudge.tune.families import FAMILIES, NAMED, Pairs, list_families, plan_pairs, split_by_gamma

CERTIFICATE = "certificate.json"
SHARED = (  # what recipe and certificate both say
    *("pair", "rule", "resolved", "gamma", "target_sha256", "draft_sha256", "tokenizer_sha256", "prompts_sha256"),
    *("engine", "dtype", "draft_dtype"),
)
ROW = ("load", "rule", "resolved", "gamma")  # what both say of each load
JUDGE_FILES = ("config.json", "model.safetensors")
Content = Mapping[str, Any]  # of a file
TestedPair = tuple[str, int]  # a rule and γ
MOST = 200_000  # packed numbers, and prompts
_SMALLEST = 1e-100  # δ; shares of a smaller one are no numbers any more
_CLOSE = 1e-6  # figures that another version of numpy may round differently


def pack(values: Sequence[float]) -> str:
    """Numbers as text, those that repeat counted: `466*0 1 12*0 -0.25`."""
    runs = ((value, sum(1 for _ in equal)) for value, equal in groupby(values))
    return " ".join(f"{value:g}" if count == 1 else f"{count}*{value:g}" for value, count in runs)


def unpack(text: str) -> list[float]:
    """The numbers that `pack` wrote."""
    values: list[float] = []
    try:
        for part in text.split():
            count, _, value = part.rpartition("*")
            if not 1 <= (repeated := int(count or 1)) <= MOST - len(values):
                raise ValueError
            values += [float(value)] * repeated
    except ValueError:
        raise SelfJudgeError(f"{CERTIFICATE}: {text[:40]!r} is not a list of numbers") from None
    return values


def hash_recipe(recipe: Content) -> str:
    """SHA-256 of all that recipe.json says but for this digest."""
    content = {key: value for key, value in recipe.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_files(folder: Path, recipe: Content, certificate: Content) -> str:
    """Recipe, certificate and judge are as they were written, and belong together."""
    if hash_recipe(recipe) != recipe["digest"]:
        raise SelfJudgeError(f"{folder / 'recipe.json'} was changed after it was written")
    judge = [f"{recipe['judge']}/{name}" for name in JUDGE_FILES] if recipe["judge"] else []
    for name in (*recipe["files"], CERTIFICATE, *judge):
        try:
            same = (folder / name).is_file() and sha256(folder / name) == recipe["files"].get(name)
        except OSError as error:
            raise SelfJudgeError(f"cannot read {folder / name}: {error.strerror}") from None
        if not same:
            raise SelfJudgeError(f"{folder / name} is not the file that this recipe was certified with")
    for key in SHARED:
        if certificate[key] != recipe[key]:
            raise SelfJudgeError(f"{folder}: the certificate is of another {key}: it does not belong to the recipe")
    return f"{len(recipe['files'])} files as written, digest {recipe['digest'][:12]}"


def check_rules(folder: Path, recipe: Content, certificate: Content, judge: JudgeConfig | None) -> str:
    """The rule for each load is the one whose numbers the recipe states, and a relaxed one is certified."""
    rows = list_loads(certificate)
    if [{name: row[name] for name in ROW} for row in rows[1:]] != recipe["more_loads"]:
        raise SelfJudgeError(f"{folder}: the certificate is of another more_loads: it does not belong to the recipe")
    if len({row["load"] for row in rows}) < len(rows) or recipe["load"] != certificate["load"]:
        raise SelfJudgeError(f"{folder}: recipe and certificate are not of the same loads, each once")
    requests = []
    for row in rows:  # with the guards that it was certified with: those of its text with all numbers
        guards = {name: value for name, value in RuleRequest(row["resolved"]).options.items() if name in STRICT}
        requests.append(RuleRequest(row["rule"], gamma=row["gamma"], **guards))
    if any(request.needs_judge for request in requests) != bool(recipe["judge"]):
        raise SelfJudgeError(f"{folder}: the judge of the rule {recipe['rule']} is missing, or not used by it")
    for row, request in zip(rows, requests, strict=True):
        if row["certified"] != (row["rule"] != "exact"):
            raise SelfJudgeError(f"{folder}: the rule {row['rule']} is not certified by its certificate")
        if (resolved := rule_text(request.resolve((), judge))) != row["resolved"]:
            raise SelfJudgeError(f"{folder}: {row['rule']} is {resolved}, not {row['resolved']} as it was certified")
    return "; ".join(f"rule {row['resolved']}, γ = {row['gamma']}, load {row['load']}" for row in rows)


def check_bet(folder: Path, certificate: Content, judge: JudgeConfig | None) -> str:
    """The bets, computed from the differences of every prompt, end as the certificate says; `judge` is the recipe's."""
    epsilon, delta, families = certificate["epsilon"], certificate["delta"], len(set(certificate["families"]))
    sizes, candidates = _read_sizes(certificate["groups"]), certificate["candidates"]
    tested = sum(row["n_used"] > 0 for row in candidates)
    if not (_CLOSE**2 < epsilon < 1 - _CLOSE**2 and _SMALLEST < delta < 1 and (families or not tested) and sizes):
        raise SelfJudgeError(f"{folder}: the certificate has no ε, δ, families or prompts to bet with")
    attempt = certificate["attempt"]
    if attempt != 1 + len(certificate["earlier_attempts"]):
        raise SelfJudgeError(f"{folder}: attempt {attempt} does not follow from the earlier ones")
    claim = Claim(epsilon, share_delta(delta, attempt) / max(1, families), len(sizes))
    won: dict[TestedPair, list[float]] = {}
    for row in candidates:
        differences = _check_candidate(folder, row, claim, sizes)
        won |= {(row["rule"], row["gamma"]): differences} if row["refuted"] else {}
    _check_pairs(folder, certificate, judge)
    said = [_check_chosen(folder, row, claim, won, sizes) for row in list_loads(certificate) if row["certified"]]
    if not said:
        bets = f"{tested} tested, their bets computed again" if tested else "none tested"
        return f"exact loses nothing; other rules: {len(candidates)} considered, {bets}"
    over = "1 family" if families == 1 else f"{families} families"
    return (
        f"{'; '.join(dict.fromkeys(said))}; at most {epsilon:g} lost with confidence {1 - delta:g};"
        f" attempt {attempt}, {over}, so δ = {claim.delta:.3g}"
    )


def _read_sizes(groups: str) -> list[int]:
    """Prompts of each group; none if they are not whole numbers from 1, or too many."""
    given = unpack(groups)
    whole = sum(given) <= MOST and all(size >= 1 and size.is_integer() for size in given)
    return [int(size) for size in given] if whole else []


def _check_candidate(folder: Path, row: Content, claim: Claim, sizes: Sequence[int]) -> list[float]:
    """The differences of a rule that was tried; refused if its figures do not follow from them."""
    differences = unpack(row["differences"])
    if len(differences) > sum(sizes) or any(not -1 <= d <= 1 for d in differences):
        raise SelfJudgeError(f"{folder}: the differences of {row['rule']} are not those of these prompts")
    _compare(folder, row["rule"], row, describe_bet(claim, differences, sizes))
    return differences


def _check_pairs(folder: Path, certificate: Content, judge: JudgeConfig | None) -> None:
    """A family's pairs are the first in `tune`'s order for these speeds, and none follows one that is not certified."""
    families, failed = certificate["families"], set[str]()
    tested: dict[str, list[TestedPair]] = {family: [] for family in families}
    for row in certificate["candidates"]:
        if row["n_used"] and row["family"] in failed:
            raise SelfJudgeError(f"{folder}: {row['rule']} was tested after a rule of its family that is not certified")
        if row["n_used"]:
            tested.setdefault(row["family"], []).append((row["rule"], row["gamma"]))
        if not row["refuted"]:
            failed.add(row["family"])
    if len(tested) > len(families) or not set(families) <= {*FAMILIES, NAMED}:
        raise SelfJudgeError(f"{folder}: the certificate has families that there are not, or that have no share of δ")
    gammas = {row["gamma"] for row in certificate["candidates"]}
    if len(gammas) > 1 and not certificate["speeds"]:
        raise SelfJudgeError(f"{folder}: the certificate has rules of several γ, and no speeds that chose them")
    order = _plan_again(certificate, min(gammas, default=1), tested, judge)
    for family, pairs in tested.items():
        if pairs != [(pair.rule, pair.gamma) for pair in order.get(family, ())][: len(pairs)]:
            named = ", ".join(f"{rule} at γ = {gamma}" for rule, gamma in pairs)
            raise SelfJudgeError(f"{folder}: {named} are not the first rules of the family {family}")


def _plan_again(
    certificate: Content, gamma: int, tested: Mapping[str, list[TestedPair]], judge: JudgeConfig | None
) -> Pairs:
    """The pairs in `tune`'s order; without speeds all have `gamma`. Named rules are in the order in which they were
    tested. So are judged rules without a judge, which cannot be looked up: none of them is the recipe's."""
    known = [name for name in tested if name != NAMED and (name != "judged" or judge is not None)]
    rules, speeds = list_families(sorted(known), judge), certificate["speeds"]
    if rules and not speeds:
        rules, _ = split_by_gamma(rules, gamma, judge)
    for name in tested.keys() - known:
        rules[name] = tuple(dict.fromkeys(r for r, _ in tested[name] if name == NAMED or r.startswith("judged:")))
    loads = [row["load"] for row in list_loads(certificate)]
    version = certificate.get("least_gain", 0), certificate.get("put_off", math.inf)  # as now, or as they were once
    return plan_pairs(rules, speeds, loads, gamma, *version)


def _check_chosen(
    folder: Path, certificate: Content, claim: Claim, won: Mapping[TestedPair, list[float]], sizes: list[int]
) -> str:
    """All figures of a load follow from its pair's differences; `won` has those of all bets that were won."""
    if (differences := won.get((certificate["rule"], certificate["gamma"]))) is None:
        raise SelfJudgeError(f"{folder}: no bet certifies {certificate['rule']} at γ = {certificate['gamma']}")
    if certificate["speed_ratio"] is None or certificate["speed_ci"] is None:
        raise SelfJudgeError(f"{folder}: the certificate does not say how fast its rule is")
    losses = None
    if certificate["measure"] != "overlap":
        losses = unpack((certificate["overlap"] or {"losses": ""})["losses"])
        if len(losses) != len(differences) or any(not 0 <= loss <= 1 for loss in losses):
            raise SelfJudgeError(f"{folder}: the certificate does not hold the overlap of every prompt")
    figures = describe_certified(claim, differences, sizes, certificate["delta"], losses)
    _compare(folder, "the certificate", certificate, figures)
    return (
        f"bet won after {figures['evidence']['refuted_at']} of {len(sizes)} observations ({certificate['rule']}):"
        f" {figures['lost']} answers lost, {figures['gained']} gained"
    )


def describe_overlap(losses: Sequence[float], sizes: Sequence[int], delta: float) -> dict[str, Any]:
    """Share of the words of `exact` that is lost: of each prompt, the mean over groups, and its upper bound."""
    observed = average_groups(losses, sizes)
    mean, bound = float(observed.mean()), find_upper_bound(observed, delta, len(sizes))
    return {"losses": pack(losses), "mean": mean, "bound": bound}


def count_changes(differences: Sequence[float], sizes: Sequence[int]) -> dict[str, Any]:
    """Answers lost and gained, and the mean over groups of rule − `exact`."""
    observed = average_groups(differences, sizes)
    return {
        "mean_difference": float(-observed.mean()) if len(observed) else None,
        "lost": sum(d > 0 for d in differences),
        "gained": sum(d < 0 for d in differences),
    }


def describe_bet(claim: Claim, differences: Sequence[float], sizes: Sequence[int]) -> dict[str, Any]:
    """What a certificate says of every rule that was tried."""
    certified = decide(claim, average_groups(differences, sizes)).certified
    return {"n_used": len(differences), "refuted": certified, **count_changes(differences, sizes)}


def describe_certified(
    claim: Claim, differences: Sequence[float], sizes: Sequence[int], delta: float, losses: Sequence[float] | None
) -> dict[str, Any]:
    """What it says of the rule that is taken; `losses` are shares of the words of `exact`, if not certified anyway."""
    observed = average_groups(differences, sizes)
    return {
        "n": len(observed),
        **count_changes(differences, sizes),
        "evidence": describe_evidence(claim, observed, delta),
        "overlap": None if losses is None else describe_overlap(losses, sizes, delta),
    }


def _compare(folder: Path, what: str, stated: Mapping[str, Any], computed: Mapping[str, Any]) -> None:
    """Refuse figures that differ from what was computed by more than rounding."""
    for key, value in computed.items():
        if not _is_same(stated[key], value):
            raise SelfJudgeError(f"{folder}: {key} of {what} does not follow from the differences of its prompts")


def _is_same(stated: Any, computed: Any) -> bool:
    if isinstance(computed, Mapping):
        return isinstance(stated, Mapping) and all(_is_same(stated[key], computed[key]) for key in computed)
    if isinstance(computed, list):
        return len(stated) == len(computed) and all(map(_is_same, stated, computed))
    if isinstance(computed, float) and isinstance(stated, int | float):
        return math.isclose(stated, computed, rel_tol=_CLOSE, abs_tol=1e-12)
    return bool(stated == computed)
