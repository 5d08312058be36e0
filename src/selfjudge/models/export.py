"""Heads for vLLM: any EAGLE-3 head that our loop runs, in the format that vLLM loads."""

from __future__ import annotations

import hashlib
from pathlib import Path

from selfjudge.models.eagle import FILE, EagleHead
from selfjudge.models.heads import check_export, head_folder, is_public_head
from selfjudge.models.pair import Pair
from selfjudge.models.pull import served_reference
from selfjudge.models.speculators import FORMAT, write_speculators
from selfjudge.store import fingerprint, home, locked
from selfjudge.types import Notify


def export_head(target: str, draft: str, out: Path, *, steps: int = 5, progress: Notify | None = None) -> None:
    """Write the head `draft` of a target in speculators' format; `steps` is how many tokens vLLM drafts by default.

    Target and draft are named as for `Pair.load`. What was exported to `out` before is replaced.
    """
    check_export(draft, out)
    pair = Pair.load(target, draft, device="cpu", dtype="float16", progress=progress)
    assert isinstance(pair.draft, EagleHead)
    write_speculators(pair.draft, pair.target, out, steps=steps, verifier=served_reference(target))


def exported_head(target: str, draft: str, *, steps: int = 5) -> Path | None:
    """The folder of a head that vLLM loads: its own, or HOME/heads/KEY, made when first asked for; None: not a head."""
    if (folder := head_folder(draft)) is None:
        return None
    if is_public_head(folder):
        return folder.resolve()
    made_from = f"{fingerprint([folder / FILE])} {served_reference(target)} {FORMAT}"
    out = home() / "heads" / hashlib.sha256(made_from.encode()).hexdigest()[:16]
    with locked(out.with_suffix(".lock")):
        if not (out / "config.json").is_file():
            export_head(target, draft, out, steps=steps)
    return out
