"""Folders of judges: those that ship, local ones, repositories of the hub, and the prompts that they were trained on.

Imports no torch.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.store import hub_options, read_json, unreachable, write_json
from selfjudge.store.artefacts import TrainingPrompts

PROMPTS_FILE = "prompts.json"
KEY_DIGITS = 16  # of a prompt's key that are kept


def shipped_judge(name: str) -> Path | None:
    """The folder of the judge that ships for an embedded target, if there is one."""
    folder = Path(str(resources.files("selfjudge"))) / "models" / "judges" / name
    return folder if "/" not in name and (folder / "config.json").is_file() else None


def find_judge(source: str | Path) -> Path:
    """The folder of a judge: a local one, that of an embedded name, or the local copy of a hub repository."""
    folder = Path(source).expanduser()
    text = str(source)
    if isinstance(source, Path) or folder.exists():
        return folder
    if (shipped := shipped_judge(text)) is not None:
        return shipped
    if text.count("/") != 1 or text.startswith((".", "~", "/")):
        return folder
    try:
        from huggingface_hub import snapshot_download

        wanted = ["config.json", "model.safetensors", PROMPTS_FILE, "README.md"]
        return Path(snapshot_download(text, allow_patterns=wanted, **hub_options()))
    except Exception as error:  # the hub client raises many kinds
        reason = unreachable() or first_line(error)
        raise SelfJudgeError(f"{text} is not a folder, and the hub did not give it ({reason})") from None


def push_folder(folder: Path, repository: str, **options: Any) -> str:
    """Upload a whole folder, card and figures included."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repository, exist_ok=True, **options)
        return str(api.upload_folder(folder_path=folder, repo_id=repository, commit_message="Judge made by selfjudge"))
    except Exception as error:  # the hub client raises many kinds
        raise SelfJudgeError(f"cannot upload to {repository}: {first_line(error)}") from None


def prompt_key(ids: Sequence[int]) -> str:
    """The name of a prompt, by its token ids: the same in all label folders."""
    return hashlib.sha256(array("q", ids).tobytes()).hexdigest()


def write_training_prompts(folder: Path, keys: Iterable[str]) -> None:
    """Keep the keys of the prompts that a judge was trained, selected or measured with."""
    write_json(folder / PROMPTS_FILE, {"prompts": sorted({key[:KEY_DIGITS] for key in keys})})


def read_training_prompts(source: str | Path) -> frozenset[str] | None:
    """The first digits of those keys, of a judge by embedded name, folder or hub id; None if it does not keep them."""
    file = find_judge(source) / PROMPTS_FILE
    return frozenset(read_json(file, TrainingPrompts)["prompts"]) if file.is_file() else None
