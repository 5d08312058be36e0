"""The steps of a pass as Triton kernels; their contracts are those of `kernels_torch.Kernels`.
Decoding with few rows is a chain of small kernels, each bound by the time its weights take to arrive. Products of up to
FEW rows split their inputs over enough programs to keep the device reading; the next kernel adds the parts. A kernel
starts while the one before it runs (programmatic dependent launch): it loads its weights, then waits for its inputs
(`gdc_wait`). Few variants are compiled: of the batch and of γ only tile sizes are constants, and `@run_time` keeps
Triton from compiling again for numbers that are 1 or divisible by 16, and for aligned pointers."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from selfjudge.engine.cuda import programs_triton as programs
from selfjudge.engine.cuda.kernels_torch import HeadNorms, Kernels, Scoring, TensorPair

FEW = 32  # rows of a split product; larger products are compute-bound and go to torch
SHARED_BYTES = 160 << 10  # shared memory that a split product may need; with less, torch does all products
SHARES = 16  # most parts that attention splits the keys of a row into
PROCESSORS = 132  # multiprocessors of an H100 or H200; with more or fewer the work spreads less evenly


def _tiles(outputs: int, inputs: int) -> dict[str, int]:
    """Tiles of a product with few rows, tuned on an H200: about one program per multiprocessor, few parts to add."""
    block_n, block_k, span = 32, 512, 512
    if not 1024 < inputs <= 2048:
        blocks = triton.cdiv(inputs, 256) * triton.cdiv(outputs, 64)
        block_n, block_k, span = 64, 256, 256 * triton.cdiv(blocks, PROCESSORS)
    return {"BLOCK_N": block_n, "BLOCK_K": block_k, "SPAN": span, "num_warps": 4, "num_stages": 3}


class TritonKernels(Kernels):
    """The steps of a pass as Triton kernels."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.early, self.split = False, True
        if device is not None and device.type == "cuda":
            known = torch.cuda.get_device_properties(device)
            nvidia = torch.version.hip is None
            self.early = nvidia and (known.major, known.minor) >= (9, 0)
            self.split = nvidia and known.shared_memory_per_block_optin >= SHARED_BYTES

    def _launch(self, rows: int) -> dict[str, bool]:
        """Launch options: small kernels start early; large ones would only take room from those before them."""
        early = self.early and rows <= FEW
        return {"EARLY": early, "launch_pdl": early} if early else {"EARLY": False}

    def begin(
        self, tokens: Tensor, counts: Tensor | None, lengths: Tensor, slots: int, embedding: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, width = tokens.shape
        vocabulary, hidden = embedding.shape
        x = torch.empty(batch, width, hidden, dtype=embedding.dtype, device=tokens.device)
        slot, position = torch.empty_like(tokens), torch.empty_like(tokens)
        programs.begin[(batch * width,)](
            tokens.contiguous(), lengths if counts is None else counts, lengths, embedding, x, slot, position,
            width, slots, vocabulary, hidden, COUNTS=counts is not None, BLOCK=triton.next_power_of_2(hidden),
            **self._launch(batch * width),
        )  # fmt: skip
        return x, slot, position

    def norm(
        self,
        x: Tensor,
        parts: Tensor | None,
        weight: Tensor | None,
        epsilon: float,
        after: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        if parts is None and weight is None:
            return x
        rows, hidden = x.shape
        block = triton.next_power_of_2(hidden)
        y = x if weight is None else torch.empty_like(x)
        programs.norm[(rows,)](
            x, parts, None if parts is None else after, weight, y, hidden, x.numel(), epsilon,
            None if scale == 1 else scale, PARTS=0 if parts is None else len(parts), BLOCK=block,
            num_warps=4 if block <= 2048 else 8, **self._launch(rows),
        )  # fmt: skip
        return y

    def _few(self, x: Tensor) -> bool:
        return self.split and len(x) <= FEW and x.dtype != torch.float32

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self._few(x):
            return super().product(x, weight, bias)
        rows, inputs = x.shape
        outputs = len(weight)
        c = _tiles(outputs, inputs)
        shares = triton.cdiv(inputs, c["SPAN"])
        out = torch.empty(shares, rows, outputs, dtype=torch.float32, device=x.device)
        programs.product[(triton.cdiv(outputs, c["BLOCK_N"]), shares)](
            x, weight, x if bias is None else bias, out, rows, outputs, inputs,
            ROWS=16 if rows <= 16 else 32, BIAS=bias is not None, **c, **self._launch(rows),
        )  # fmt: skip
        return out

    def add(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, apart: bool = False) -> Tensor | None:
        return super().add(x, y, weight, bias, apart or self._few(x))

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "silu") -> Tensor:
        rows, inputs = x.shape
        inner = len(weight) // 2
        y = torch.empty(rows, inner, dtype=x.dtype, device=x.device)
        gelu = activation == "gelu"
        if bias is not None or not self._few(x):
            programs.gate[(rows, triton.cdiv(inner, 1024))](
                torch.nn.functional.linear(x, weight, bias), y, inner, BLOCK=1024, GELU=gelu, num_warps=4,
                **self._launch(rows),
            )  # fmt: skip
            return y
        # large: tiles that one warp group multiplies at once; small: more programs, so that no multiprocessor is idle
        block_n, block_k, stages = (64, 64, 5) if inner >= 64 * PROCESSORS else (32, 128, 4)
        programs.gated[(triton.cdiv(inner, block_n),)](
            x, weight, y, rows, inner, inputs, ROWS=16 if rows <= 16 else 32, BLOCK_N=block_n, BLOCK_K=block_k,
            GELU=gelu, num_warps=4, num_stages=stages, **self._launch(rows),
        )  # fmt: skip
        return y

    def rotate(
        self, qkv: Tensor, rotary: TensorPair, at: TensorPair, cache: TensorPair, norms: HeadNorms | None = None
    ) -> Tensor:
        (cosine, sine), (slot, position), (keys, values) = rotary, at, cache
        batch, width = slot.shape
        kv, slots, dim = keys.shape[1:]
        heads = qkv.shape[2] // dim - 2 * kv
        q = torch.empty(batch, width, heads, dim, dtype=keys.dtype, device=qkv.device)
        if norms is not None and norms.query.dim() == 2:
            qkv, norms = self._whole_norms(qkv, norms, keys.dtype), None
        epsilon, columns = (0.0, 0) if norms is None else (norms.epsilon, norms.dim)
        programs.rotate[(batch * width, heads + 2 * kv)](
            qkv, cosine, sine, slot.contiguous(), position.contiguous(),
            *((q, q) if norms is None else (norms.query, norms.key)),
            q, keys, values, width, slots, heads, kv, qkv[0].numel(), epsilon, columns, PARTS=len(qkv), DIM=dim,
            NORMS=norms is not None, num_warps=1, **self._launch(batch * width),
        )  # fmt: skip
        return q

    def _whole_norms(self, qkv: Tensor, norms: HeadNorms, dtype: torch.dtype) -> Tensor:
        """[S, M, N] with normed queries and keys, as [1, M, N]."""
        out = torch.empty(1, *qkv.shape[1:], dtype=dtype, device=qkv.device)
        block = triton.next_power_of_2(norms.query.numel())
        programs.whole_norms[(qkv.shape[1], 3)](
            qkv, norms.query, norms.key, out, norms.query.numel(), norms.key.numel(), qkv[0].numel(), norms.epsilon,
            norms.dim / norms.query.shape[1], PARTS=len(qkv), BLOCK=block, num_warps=4 if block <= 2048 else 8,
            **self._launch(qkv.shape[1]),
        )  # fmt: skip
        return out

    def attention(
        self, q: Tensor, keys: Tensor, values: Tensor, position: Tensor, scoring: Scoring | None = None
    ) -> Tensor:
        batch, width, heads, dim = q.shape
        tokens = batch * width
        kv, slots = keys.shape[1:3]
        group = heads // kv
        scale, window, cap = scoring or Scoring(dim**-0.5)
        span = min(slots, window + width) if window else slots
        # many rows: the heads of a key-value head share one reading of its keys; few rows: a program for each head, and
        # the keys themselves are split until the device is busy
        exact = q.dtype == torch.float32
        rows = 16 if exact else 64  # float32 has no tensor cores: a product of many rows takes minutes to compile
        together = group if batch * kv >= 64 and width * group <= rows else 1
        queries = min(width, max(1, rows // together))
        blocks = triton.cdiv(width, queries)
        launched = batch * (heads // together) * blocks
        splits = min(
            SHARES, triton.next_power_of_2(max(1, PROCESSORS // launched)), triton.next_power_of_2(max(1, span // 32))
        )
        out = torch.empty(tokens, heads * dim, dtype=q.dtype, device=q.device)
        parts = out if splits == 1 else q.new_empty((tokens * heads, splits, dim + 2), dtype=torch.float32)
        programs.attention[(batch, heads // together, blocks * splits)](
            q, keys, values, position.contiguous(), out, parts,
            scale, width, slots, heads, kv, blocks, queries, splits, window, cap,
            GROUP=group, TOGETHER=together, ROWS=max(16, triton.next_power_of_2(queries * together)),
            DIM=dim, BLOCK=32 if exact or splits > 1 else 64, SPLIT=splits > 1, EXACT=exact,
            WINDOW=window > 0, CAP=cap > 0,
            num_warps=2 if splits > 1 and not exact else 4, num_stages=2, **self._launch(tokens),
        )  # fmt: skip
        if splits > 1:
            programs.combine[(tokens * heads,)](
                parts, out, splits, SHARES=SHARES, DIM=dim, num_warps=1, **self._launch(tokens)
            )  # fmt: skip
        return out
