"""Which folders hold EAGLE-3 heads, ours or those of others. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from selfjudge.errors import SelfJudgeError
from selfjudge.models.catalogue import find_embedded
from selfjudge.store import read_json, refuse_foreign

KIND = "eagle3"
"""The `kind` in the config of a head of ours."""


def is_head(folder: Path) -> bool:
    """Whether a folder holds a head of ours: its config says so."""
    return _read_config(folder).get("kind") == KIND


def is_public_head(folder: Path) -> bool:
    """Whether a folder holds a head in one of the formats of others: its config says so."""
    record = _read_config(folder)
    architectures = record.get("architectures")
    named = isinstance(architectures, list) and any("Eagle3" in str(name) for name in architectures)
    return named or "speculators_model_type" in record


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    return read_json(file) if file.is_file() else {}


def head_folder(reference: str) -> Path | None:
    """The folder of the head that a draft's name means, in any format; None where it means a model."""
    found = find_embedded(reference)
    if found is not None:
        return found[0].head if found[1] == "eagle3" else None
    folder = Path(reference).expanduser()
    return folder if folder.is_dir() and (is_head(folder) or is_public_head(folder)) else None


def check_export(draft: str, out: Path) -> None:
    """Refuse to export a draft that is not a head, or into a folder with other things in it."""
    if head_folder(draft) is None:
        raise SelfJudgeError(f"{draft} is not an EAGLE-3 head: vLLM loads a draft that is a model as it is")
    ours = is_public_head(out) or not (out / "config.json").exists()
    refuse_foreign(out, ("config.json", "model.safetensors") if ours else ())
