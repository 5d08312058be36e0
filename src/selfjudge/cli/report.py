"""`selfjudge report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from selfjudge.cli.options import AsJson
from selfjudge.cli.output import print_json, waiting, warn
from selfjudge.report.charts import MOST_METHODS


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders that eval or reproduce wrote.")],
    out: Annotated[Path, typer.Option(help="The page; figures and tables go into a folder of the same name.")] = Path(
        "report.html"
    ),
    methods: Annotated[
        int, typer.Option(min=2, help="Most methods in a trade-off; the tables always have all.")
    ] = MOST_METHODS,
    as_json: AsJson = False,
) -> None:
    """One self-contained page: a verdict, tables, trade-offs, a token viewer; figures and Markdown beside it.

    Example: selfjudge report eval --out report.html
    """
    with waiting("reading results and drawing …"):
        from selfjudge.report.page import report as run

        result = run(folders, out, methods=methods)
    for folder in result["left_out"]:
        warn(f"left out {folder['folder']}: {folder['why']}")
    if as_json:
        print_json(result["tables"])
        return
    typer.echo(
        f"{out}: {result['runs']} runs, {len(result['tables'])} tables;"
        f" {len(result['figures'])} figures and tables.md in {out.with_suffix('')}"
    )
