"""Where judges come from and go to: those that ship, folders, and repositories of the hub. Imports no torch."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.store import hub_options, unreachable


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

        wanted = ["config.json", "model.safetensors", "prompts.json", "README.md"]
        return Path(snapshot_download(text, allow_patterns=wanted, **hub_options()))
    except Exception as error:  # the hub client raises many kinds
        reason = unreachable() or first_line(error)
        raise SelfJudgeError(f"{text} is not a folder, and the hub did not give it ({reason})") from None


def push_folder(folder: Path, repository: str, api: Any, **options: Any) -> str:
    """Upload a whole folder, card and figures included."""
    try:
        api.create_repo(repository, exist_ok=True, **options)
        return str(api.upload_folder(folder_path=folder, repo_id=repository, commit_message="Judge made by selfjudge"))
    except Exception as error:  # the hub client raises many kinds
        raise SelfJudgeError(f"cannot upload to {repository}: {first_line(error)}") from None
