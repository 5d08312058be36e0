"""Print docs/cli.md from the program's own --help; `make docs` writes it and a test compares."""

from __future__ import annotations

import os

os.environ.update(COLUMNS="100", TERM="dumb", NO_COLOR="1")

from typer.testing import CliRunner

from selfjudge.cli.main import app

COMMANDS = (
    [], ["pull"], ["generate"], ["distill"], ["export"], ["label"], ["labels", "info"], ["train"], ["eval"], ["tune"], ["certificate", "verify"], ["report"],
    ["reproduce"], ["ls"], ["bench"], ["serve"], ["demo"], ["doctor"],
)  # fmt: skip

print("# Command line\n\nMade by `make docs` from the program itself.\n")
for command in COMMANDS:
    text = CliRunner().invoke(app, [*command, "--help"], prog_name="selfjudge").output
    body = "\n".join(line.rstrip() for line in text.strip().splitlines())
    print(f"## {' '.join(['selfjudge', *command])}\n\n```\n{body}\n```\n")
