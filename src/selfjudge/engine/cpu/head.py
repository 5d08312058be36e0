"""An EAGLE-3 head on a CPU: its one layer through the compiled forward pass, its vocabulary from the target."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfjudge.engine.base import Eager, Output, chunk_tokens
from selfjudge.engine.cpu.engine import CpuEngine
from selfjudge.engine.cpu.library import Matrix, Model
from selfjudge.engine.cpu.weights import F16, F32, Q8_0, PackedWeights, output_name
from selfjudge.models.device import give_back
from selfjudge.models.eagle import EagleHead
from selfjudge.models.gguf import MATRICES, GgufFile, gguf_file
from selfjudge.models.loaded import Draft, as_draft


class PackedHead(PackedWeights):
    """A head as the kernel reads it. The rows of embedding and output are the target's, in its own format."""

    def __init__(self, head: EagleHead, target: PreTrainedModel, int8: bool, processor: str = "native") -> None:
        config, file, layer = head.config, gguf_file(target), head.layer
        self._begin(int8, processor, layers=1)
        kind = Q8_0 if int8 else F32
        matrices: list[Any] = [layer.get_submodule(part.module) for part in MATRICES]
        shapes = [(kind, *module.weight.shape) for module in (*matrices, head.fc)]
        if file is not None and head.output is None:
            kind = file.tensors[f"{output_name(file)}.weight"].kind
        shapes.append((kind, len(head.draft_ids), config.hidden_size))
        self._make_room(shape for shape in shapes if shape[0] not in (F32, F16))
        self._fill_layer(self.layers[0], layer)
        embedding, rows = self._vocabulary(head, file)
        self.model = Model(
            1, config.hidden_size, config.heads, config.kv_heads, config.head_dim, config.intermediate_size, config.eps,
            *embedding, self.layers, self._pointer(head.norm.weight), rows, self._pointer(layer.hidden_norm.weight),
            self._matrix(head.fc.weight), config.norm_before_residual,
        )  # fmt: skip

    def _vocabulary(self, head: EagleHead, file: GgufFile | None) -> tuple[tuple[int, int], Matrix]:
        """The embedding, and the rows of the output matrix that the head proposes from."""
        if head.embedding is not None:
            embedding = self._pointer(head.embedding), F32
        else:
            assert file is not None
            embedding = self._file_embedding(file)
        if head.output is not None:
            return embedding, self._matrix(head.output)
        assert file is not None
        order = head.draft_ids.numpy().astype(np.int32)
        self.kept.append(order)
        return embedding, self._file_matrix(file, output_name(file), order)


class CpuHead(CpuEngine):
    """Entries of a token and a state each, in a cache of one layer."""

    def __init__(
        self, draft: EagleHead | Draft, target: PreTrainedModel, *, int8: bool = False, processor: str = "native"
    ) -> None:
        Eager.__init__(self)
        draft = as_draft(draft)
        head = draft.eagle_head
        self.device, self.window, self.chunk = head.device, head.window, chunk_tokens(head.device)
        self.vocab_size = self._embeddings = head.config.vocab_size
        self.vocabulary, self.hidden_size = head.draft_ids, head.config.hidden_size
        self._want_hidden = False

        def pack() -> PackedHead:
            weights = PackedHead(head.with_matrices(), target, int8, processor)
            if int8 and gguf_file(target) is not None:
                head.free_matrices()  # no other engine runs a head beside a file
            give_back()
            return weights

        self._use(draft.keep(("packed", int8, processor), pack), head.rotary_emb)

    @torch.inference_mode()
    def append(self, tokens: Tensor, states: Tensor, counts: Tensor | None = None, keep: int = 1) -> Output:
        output = self._run(tokens, counts, keep, states.float())
        return Output(output.logits, None, output.residual)
