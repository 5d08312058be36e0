"""What a pipe is told of long work."""

from __future__ import annotations

import pytest

from selfjudge.cli import output


def test_a_stage_is_said_once_and_again_when_it_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    with output.progress() as update:
        for seconds, stage, share in (
            (0, "labels", 0.1),
            (5, "labels", 0.2),
            (output.QUIET, "labels", 0.5),
            (1, "labels", 0.6),
            (1, "τ", 0.0),
            (2, "ready", 1.0),
        ):
            now += seconds
            update(stage, share)
    assert capsys.readouterr().err.splitlines() == ["labels …", "labels 50%", "τ …", "ready"]
