"""Tables in Markdown, for cards, pages and reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(head: Sequence[str], rows: Iterable[Iterable[object]], align: str = "") -> str:
    """A GitHub table, without a final line end. Cells must be escaped already.

    `align` has a letter for each column: `l` for text, `r` for numbers. By default the first column alone is text.
    """
    align = align or "l" + "r" * (len(head) - 1)
    ruler = ["---:" if side == "r" else "---" for side in align]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (head, ruler, *rows))
