"""Provenance of files: command, versions, machine, date."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any


def versions(*more: str) -> dict[str, str]:
    """Versions of the packages that decide a result, and of `more`, where they are installed."""
    known = {"python": platform.python_version()}
    for name in ("selfjudge", "torch", "transformers", "safetensors", *more):
        with contextlib.suppress(metadata.PackageNotFoundError):
            known[name] = metadata.version(name)
    return known


def machine() -> dict[str, Any]:
    """The machine that figures are measured on."""
    described: dict[str, Any] = {"system": platform.system(), "arch": platform.machine(), "cpus": os.cpu_count()}
    if model := re.search(r"^model name:(.*)", _output("lscpu"), re.IGNORECASE | re.MULTILINE):
        described["cpu"] = model[1].strip()
    if (torch := sys.modules.get("torch")) is not None:
        described["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            described["gpu"] = torch.cuda.get_device_name()
    return described


def measured_on(*packages: str) -> dict[str, Any]:
    """The head of every file of figures: machine, versions (of these packages as well), date and commit."""
    commit = _output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD") or None
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return {"machine": machine(), "versions": versions(*packages), "date": date, "commit": commit}


def describe_machine(header: Mapping[str, Any]) -> str:
    """Processor and versions of such a head, in a few words."""
    machine, versions = header["machine"], header["versions"]
    processor = machine.get("gpu") or machine.get("cpu", machine["arch"])
    return f"{processor}, {machine['cpus']} cores, torch {versions['torch']}, transformers {versions['transformers']}"


def provenance(**extra: Any) -> dict[str, Any]:
    """The content of `run.json`: who made a folder, when, and on what."""
    return {"argv": sys.argv, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **measured_on(), **extra}


@cache
def _output(*command: str) -> str:
    """The output of another program, run once; empty where it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
