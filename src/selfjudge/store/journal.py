"""Rows that are saved one by one while a part of a run is made."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

from selfjudge.errors import SelfJudgeError
from selfjudge.store.files import dumped, parse_json
from selfjudge.store.schema import conform


class Journal:
    """Appends JSON lines to a file; after a kill at any moment the rows added before are read again.

    A line that was cut short, or does not match the schema, is left out: its row is made again.
    When the part is sealed, `remove` deletes the file.
    """

    def __init__(self, path: Path, schema: Any) -> None:
        self.path, self.rows = path, _rows(path, schema)
        self.seconds = max((float(row["seconds"]) for row in self.rows), default=0.0)
        """Seconds that earlier processes had worked when the last row was added."""
        self._begun = time.monotonic() - self.seconds
        self._file: IO[str] | None = None

    def add(self, row: Mapping[str, Any]) -> None:
        """Save one more row, with the seconds of work after which it came."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
            self._file.write("\n")  # the line before may have been cut short
        self._file.write(dumped({**row, "seconds": round(time.monotonic() - self._begun, 1)}) + "\n")
        self._file.flush()

    def remove(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _rows(path: Path, schema: Any) -> list[dict[str, Any]]:
    rows = []
    if path.is_file():
        for line in path.read_bytes().split(b"\n"):
            try:
                rows.append(conform(parse_json(line.decode()), schema, path))
            except (ValueError, SelfJudgeError):
                continue
    return rows
