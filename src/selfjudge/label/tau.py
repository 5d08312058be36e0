"""The τ that ship with embedded pairs. Imports no torch: the command line says at once where there is none."""

from __future__ import annotations

from typing import Any

from selfjudge.errors import SelfJudgeError
from selfjudge.models.catalogue import EMBEDDED
from selfjudge.store import read_json
from selfjudge.store.artefacts import TauFile


def require_tau(target: str, draft_sha256: str | None, suffix_length: int) -> dict[str, Any]:
    """The τ that ships with a pair; where there is none, the error says how to find one."""
    if (shipped := find_shipped_tau(target, draft_sha256, suffix_length)) is None:
        raise SelfJudgeError(
            "no τ is known for this pair and suffix length: give `tau`, or find it with `calibrate`"
            " (gsm8k, or arithmetic, which needs no data)"
        )
    return shipped


def find_shipped_tau(target: str, draft_sha256: str | None, suffix_length: int) -> dict[str, Any] | None:
    """The τ that ships with an embedded pair, for its own draft and suffix length.

    A hash of None belongs to a draft that is not loaded yet: it is taken for the pair's own, which has no τ if it is a
    head.
    """
    embedded = EMBEDDED.get(target)
    if draft_sha256 is None and embedded is not None and embedded.head is not None:
        return None
    file = embedded.draft / "tau.json" if embedded is not None and embedded.draft is not None else None
    if file is None or not file.is_file():
        return None
    shipped = read_json(file, TauFile)
    if draft_sha256 not in (None, shipped["draft_sha256"]) or str(suffix_length) not in shipped["tau"]:
        return None
    return {**shipped["tau"][str(suffix_length)], "shipped": True}
