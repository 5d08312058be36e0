"""A worker whose ranks have different judges: only the first one's word may count."""

from __future__ import annotations

from typing import Any

from selfjudge.integrations.vllm import JudgeWorker


class DisagreeingWorker(JudgeWorker):
    def load_model(self, *args: Any, **options: Any) -> None:
        super().load_model(*args, **options)
        if self.rank:
            self._judge.weight.neg_()
            self._judge.bias.neg_()
