"""Objects that read or change the target's logits of one row: grammars, penalties, biases, log-probabilities.
A request brings them (`Request.edits`). Between verification and judge the host hands them the logits of their row, so
rules, judges and captured cycles know nothing of them. Batches without edits skip this step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from selfjudge.ops import argmax_checked


class LogitsEdit(Protocol):
    """What a row does with the target's logits. It belongs to one request and follows the answer."""

    def edit(self, logits: Tensor, drafts: Sequence[int]) -> None:
        """Read or change in place the logits [γ+1, V] of a pass; row i follows the answer so far and drafts[:i].
        The pass after a prompt has no drafts. The state must stay as it is: drafts may be rejected."""

    def draft(self, logits: Tensor, drafts: Sequence[int], ids: Tensor | None) -> None:
        """Change in place the draft's logits [D] after these drafts, of the tokens `ids` or of all; few do."""
        return

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow the tokens that the row has emitted, up to its end token."""


RowEdits = tuple[LogitsEdit, ...]  # of one row, in the order in which they see the logits


@torch.inference_mode()  # an engine's logits may be inference tensors, which are changed in this mode alone
def apply_edits(
    edits: Sequence[RowEdits], logits: Tensor, drafts: Tensor | None = None, limits: Tensor | None = None
) -> None:
    """Let each row's edits change its logits [B, γ+1, V]; of row b only the first limits[b] drafts are verified."""
    tokens = [[]] * len(logits) if drafts is None else drafts.tolist()
    counts = [len(row) for row in tokens] if limits is None else limits.tolist()
    for row, objects in enumerate(edits):
        for edit in objects:
            edit.edit(logits[row, : counts[row] + 1], tokens[row][: counts[row]])


@torch.inference_mode()
def edit_draft(edits: Sequence[RowEdits], logits: Tensor, drafts: Sequence[Tensor], ids: Tensor | None) -> None:
    """Let each row's edits change the draft's logits [B, D] after the drafts so far, each [B]."""
    rows = torch.stack(list(drafts), 1).tolist() if drafts else [[]] * len(logits)
    for row, objects, own in zip(rows, edits, logits, strict=True):
        for edit in objects:
            edit.draft(own, row, ids)


class VerifiedLogits(NamedTuple):
    """What a pass leaves for the edits of a cycle. Where the cycle was captured, these are its buffers."""

    logits: Tensor  # [B, γ+1, V]
    argmax: tuple[Tensor, Tensor]  # as in `Block`
    drafts: Tensor  # [B, γ]
    limits: Tensor | None  # as in `Block`

    @torch.inference_mode()
    def edit(self, edits: Sequence[RowEdits]) -> None:
        """Apply the edits of the rows, and take the argmax again."""
        apply_edits(edits, self.logits, self.drafts, self.limits)
        for old, new in zip(self.argmax, argmax_checked(self.logits), strict=True):
            old.copy_(new)

    def unowned(self) -> VerifiedLogits:
        """The same buffers, without a claim to their memory: later captures may use it between two cycles."""
        choice, bad = map(_without_claim, self.argmax)
        limits = None if self.limits is None else _without_claim(self.limits)
        return VerifiedLogits(_without_claim(self.logits), (choice, bad), _without_claim(self.drafts), limits)


class _DeviceMemory:
    """The bytes of a CUDA tensor, as other libraries lend them to torch."""

    def __init__(self, tensor: Tensor) -> None:
        shape, data = (tensor.numel() * tensor.element_size(),), (tensor.data_ptr(), False)
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": data, "version": 2}


def _without_claim(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda or not tensor.numel():
        return tensor
    assert tensor.is_contiguous()
    return torch.as_tensor(_DeviceMemory(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)
