"""The ledger of attempts: which prompts rules of which target were tested on, on this machine. Loads no torch.

HOME/attempts.jsonl, or the file that SELFJUDGE_LEDGER names, has a row for every run of `tune`. An attempt whose
prompts overlap with those of an earlier one of the same target is a further one, and spends a share of δ of its own
(`certify.share_delta`). A run that is resumed is the same attempt. Who removes the file, or tunes on another machine,
hides attempts: no file can tell."""

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from selfjudge.errors import SelfJudgeError
from selfjudge.store import home, locked, read_rows, write_rows
from selfjudge.store.artefacts import LedgerRow


def ledger_file() -> Path:
    return Path(os.environ.get("SELFJUDGE_LEDGER") or home() / "attempts.jsonl").expanduser()


def _read(file: Path) -> list[dict[str, Any]]:
    try:
        return list(read_rows(file, LedgerRow)) if file.is_file() else []
    except OSError as error:
        raise SelfJudgeError(f"cannot read {file}: {error.strerror}; let SELFJUDGE_LEDGER name another file") from None


def find_earlier(attempt: str | None, target: str, keys: Collection[str]) -> list[str]:
    """Dates of the attempts on some of these prompts, by `keys`, with this target, before `attempt`; None: all."""
    own, dates = frozenset(keys), []
    for row in _read(ledger_file()):
        if row["id"] == attempt:
            break
        if row["target"] == target and not own.isdisjoint(row["prompts"]):
            dates.append(row["date"])
    return dates


def note_attempt(attempt: str, target: str, keys: Collection[str]) -> list[str]:
    """Add an attempt to the ledger unless it is there; the dates of the earlier ones."""
    file = ledger_file()
    try:
        with locked(file.with_name(f".{file.name}.lock")):
            rows = _read(file)
            if all(row["id"] != attempt for row in rows):
                date = time.strftime("%Y-%m-%d", time.gmtime())
                write_rows(file, [*rows, {"id": attempt, "date": date, "target": target, "prompts": sorted(keys)}])
    except OSError as error:
        raise SelfJudgeError(
            f"cannot note this attempt in {file}: {error.strerror}; let SELFJUDGE_LEDGER name another file"
        ) from None
    return find_earlier(attempt, target, keys)
