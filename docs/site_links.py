"""A hook of mkdocs: what pages cite outside docs/ is named on the site, not linked; files of the repository are not on it."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links that leave docs/ as text, outside blocks of code."""
    blocks = CODE.findall(markdown)
    prose = CODE.sub("\0", markdown)
    prose = OUTSIDE.sub(lambda m: m[1] if m[2] in m[1] else f"{m[1]} (`{m[2]}`)", prose)
    return re.sub("\0", lambda _: blocks.pop(0), prose)
