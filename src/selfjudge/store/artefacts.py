"""The files that runs write, as schemas: every file is read through one of these, for it may come from anywhere.

`formats.json` declares them: for each key its type and, where it is documented, what it means; `?` marks a key that may
be absent. Keys that are not declared may be there as well. Whoever writes a file adds its keys there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict  # noqa: F401 (of formats.json)

from selfjudge.store.schema import Pattern, Range

Count = Annotated[int, Range(0)]
Share = Annotated[float, Range(0, 1)]
Score = Annotated[float, Range(-1, 1)]  # factual consistency may be negative
Difference = Annotated[float, Range(-2, 2)]
Amount = Annotated[float, Range(0)]
Width = Annotated[int, Range(1, 1 << 20)]
HeadCount = Annotated[int, Range(1, 1 << 16)]
HeadDim = Annotated[int, Range(2, 1 << 16)]
VocabSize = Annotated[int, Range(1, 1 << 31)]
SuffixLength = Annotated[int, Range(0, 1 << 16)]
AttemptNumber = Annotated[int, Range(1, 1 << 20)]
GammaLength = Annotated[int, Range(0, 1000)]
LoadSize = Annotated[int, Range(1, 1 << 20)]
PositiveGamma = Annotated[int, Range(1, 1000)]
Sha256 = Annotated[str, Pattern("[0-9a-f]{64}", "a sha256")]
PromptKey = Annotated[str, Pattern("[0-9a-f]{16}", "16 digits of a sha256")]
OriginLetters = Annotated[str, Pattern("[djt]*", "letters of origins")]
_NAME = r"[A-Za-z0-9_][\w.~-]{0,200}"
FileName = Annotated[str, Pattern(_NAME, "the name of a file in this folder")]
SealedFile = Annotated[str, Pattern(f"(work/)?{_NAME}", "the name of a file in this folder")]
TaskLabel = Annotated[str, Pattern(r"[^./\\\x00-\x1f][^/\\\x00-\x1f]{0,200}", "the name of a task")]
Packed = Annotated[str, Pattern("[0-9*. -]*", "numbers, such as '466*0 1 -0.25'")]
InnerPath = Annotated[str, Pattern(f"{_NAME}(/{_NAME})*", "a path in this folder")]


def read_formats() -> dict[str, dict[str, tuple[str, bool, str]]]:
    """Schema → key → its type, whether it may be absent, and what it means; `extends` adds the keys of another."""
    formats: dict[str, dict[str, tuple[str, bool, str]]] = {}
    declared = json.loads(Path(__file__).with_name("formats.json").read_text("utf-8"))
    for name, schema in declared.items():
        formats[name] = dict(formats[schema["extends"]]) if "extends" in schema else {}
        for key, about in schema["keys"].items():
            kind, _, meaning = about.partition(": ")
            formats[name][key.removesuffix("?")] = kind, key.endswith("?"), meaning
    return formats


def _declare(name: str, keys: dict[str, tuple[str, bool, str]]) -> Any:
    kinds = {key: f"NotRequired[{kind}]" if optional else kind for key, (kind, optional, _) in keys.items()}
    return TypedDict(name, kinds)  # type: ignore[operator]


globals().update({name: _declare(name, keys) for name, keys in read_formats().items()})

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The schemas of formats.json."""
