"""Training an EAGLE-3 head: unrolled over the steps it will draft, against the target's own distribution.

The target reads every batch once, as it is needed: its states would fill a disk, its tokens do not.

Index t of a row is the draft that begins there: at step 0 the head gets the target's states at t and the token
at t+1, at step j its own output of the step before and the token at t+1+j, and proposes the token at t+2+j. An entry
sees the entries of step 0 up to t, made from true states, and the chain of its own earlier steps: what it will see when
it drafts. Tokens are the right ones: where all steps up to j are right, the chain is the one that decoding would make.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfjudge.distill.data import MEASURE_TOKENS, Corpus, Dataset
from selfjudge.distill.train import HeldOutScore, with_gradients
from selfjudge.engine.teacher_forced import sdpa_without_cudnn
from selfjudge.models.eagle import EagleConfig, EagleHead, captured_states
from selfjudge.models.speculators import write_head

DECAY = 0.8  # weight of a step in the loss over that of the step before
LOSS_ROWS = 4096  # rows of logits at a time


@dataclass(frozen=True)
class TargetPass:
    """What the target computed for some sequences in one pass."""

    ids: Tensor  # [B, T] the tokens
    prompts: Tensor  # [B] number of tokens of the prompt
    lengths: Tensor  # [B] number of tokens of prompt and answer
    features: Tensor  # [B, T, 3H] the states that the head reads
    states: Tensor  # [B, T, H] after the final norm: what the output matrix multiplies

    @property
    def columns(self) -> Tensor:
        """[T] the indices of the tokens."""
        return torch.arange(self.ids.shape[1], device=self.ids.device)


@torch.no_grad()
def read_batch(target: PreTrainedModel, aux_layers: tuple[int, ...], corpus: Corpus, rows: Tensor) -> TargetPass:
    """One pass of the target over these rows of the corpus."""
    device = target.device
    ids = corpus.ids(rows, device)
    with sdpa_without_cudnn(), captured_states(target, aux_layers) as states:
        final = target.base_model(input_ids=ids, use_cache=False).last_hidden_state
    prompts, lengths = (t[rows].to(device) for t in (corpus.prompt_lengths, corpus.lengths))
    return TargetPass(ids, prompts, lengths, torch.cat(states, -1), final)


@torch.no_grad()
def measure_sizes(target: PreTrainedModel, aux_layers: tuple[int, ...], corpus: Corpus) -> tuple[Tensor, Tensor]:
    """Root mean squares of the features [3H] and of the final states [H], over answers in a few batches of a corpus.

    A few columns are hundreds of times larger than the others."""
    squares: list[Any] = [0.0, 0.0]
    count = 0
    for rows in corpus.batches(MEASURE_TOKENS, torch.Generator().manual_seed(0))[:4]:
        batch = read_batch(target, aux_layers, corpus, rows)
        inside = (batch.columns >= batch.prompts[:, None] - 1) & (batch.columns < batch.lengths[:, None])
        for n, states in enumerate((batch.features, batch.states)):
            squares[n] = squares[n] + states[inside].float().square().sum(0)
        count += int(inside.sum())
    features, states = ((square / count).sqrt().clamp_min(1e-4) for square in squares)
    return features, states


def draft_vocabulary(corpus: Corpus, vocabulary: int, size: int, always: Sequence[int]) -> Tensor:
    """[D] ids of the `size` tokens that occur most often in answers, ascending; those in `always` are among them."""
    counts = corpus.counts(vocabulary).cpu()[:vocabulary]
    counts[[token for token in always if token < vocabulary]] = counts.max() + 1
    chosen: Tensor = counts.argsort(descending=True, stable=True)[:size].sort().values
    return chosen


def new_head(target: PreTrainedModel, config: EagleConfig, draft_ids: Tensor, sizes: Tensor, seed: int) -> EagleHead:
    """A head to be trained, in float32, for features of size 1: what it gives begins as the state of the high layer.

    The final norm begins with the `sizes` of the states that the output matrix is used to: it is not trained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = EagleHead(config, draft_ids.cpu())
        for module in head.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0.0, 0.02)
    with torch.no_grad():
        head.fc.weight *= 0.25
        head.fc.weight[:, -config.hidden_size :] += torch.eye(config.hidden_size)
        head.norm.weight.copy_(sizes.float().cpu())
    return head.bind(target, dtype=torch.float32)


@dataclass(eq=False)
class HeadLearner:
    """A head that learns to draft `unroll` tokens in a row; m at that γ is measured."""

    target: PreTrainedModel
    head: EagleHead
    sizes: Tensor  # [3H] the sizes of the features, by which they are divided
    data: Dataset
    unroll: int
    layers: tuple[str, ...] = ("fc.", "layers.")

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.head.named_parameters()

    def unrolled(self, batch: TargetPass) -> Iterator[Tensor]:
        """The head's output [B, T, H] of each step."""
        head, layer = self.head, self.head.layer
        g = head.fuse(batch.features / self.sizes.to(batch.features.dtype))
        positions = batch.columns[None]
        true: tuple[Tensor, Tensor] | None = None
        chain: list[tuple[Tensor, Tensor]] = []
        for step in range(self.unroll):
            tokens = F.pad(batch.ids, (0, 1 + step))[:, 1 + step :]
            q, k, v = layer.project(head.embed(tokens), g, head.rotary(positions + step, g))
            if true is None:
                true = k, v
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            else:
                chain.append((k, v))
                attended = chain_attention(q, *true, chain)
            g = layer.finish(g, attended)
            yield g

    def loss(self, rows: Tensor) -> tuple[Tensor, int]:
        """Cross-entropy against the target's distribution over the draft vocabulary, later steps weighing less."""
        batch = read_batch(self.target, self.head.config.aux_layers, self.data.training, rows)
        assert self.head.output is not None
        later = (batch.columns >= batch.prompts[:, None]) & (batch.columns < batch.lengths[:, None] - 1)
        row, column = later.nonzero(as_tuple=True)  # where the target predicts a token of the answer but its first
        since = column - batch.prompts[row]  # tokens of the answer before it: a draft of so many steps may lead here
        hidden, weights = [], []
        with sdpa_without_cudnn(), self._autocast():
            for step, a in enumerate(self.unrolled(batch)):
                leading = a[row, (column - 1 - step).clamp_min(0)]
                hidden.append(self.head.norm(leading).to(self.head.output.dtype))
                counts = (since >= step).float()
                weights.append(counts * DECAY**step / counts.sum().clamp_min(1))
        cap = getattr(self.target.config.get_text_config(), "final_logit_softcapping", None)
        wanted = batch.states[row, column]
        loss = unrolled_loss(torch.stack(hidden), torch.stack(weights), wanted, self.head.output, cap)
        return loss, len(since)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.target.dtype != torch.float32)

    @torch.no_grad()
    def measure(self) -> HeldOutScore:
        """m at γ = `unroll`, greedy and exact."""
        passes: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        for rows in self.data.held_out.batches(MEASURE_TOKENS, torch.Generator().manual_seed(0)):
            batch = read_batch(self.target, self.head.config.aux_layers, self.data.held_out, rows)
            lengths = self._right_in_a_row(batch).cpu()
            for row, i in enumerate(rows.tolist()):
                first, end = int(batch.prompts[row]) - 1, int(batch.lengths[row]) - 2
                tokens, cycles = simulate(lengths[row, first : max(first, end)].tolist())
                for key in ("all", self.data.held_out.sources[i]):
                    passes[key][0] += tokens
                    passes[key][1] += cycles
        m = {key: round(tokens / max(1, cycles), 4) for key, (tokens, cycles) in passes.items()}
        return HeldOutScore(m["all"], {"m": m}, f"m {m['all']:.3f} at γ = {self.unroll}")

    def _right_in_a_row(self, batch: TargetPass) -> Tensor:
        """[B, T] how many tokens of the draft that begins there would be accepted."""
        accepted = torch.ones_like(batch.ids, dtype=torch.bool)
        lengths = torch.zeros_like(batch.ids)
        with sdpa_without_cudnn(), self._autocast():
            for step, a in enumerate(self.unrolled(batch)):
                best = torch.cat([self.head.logits(piece).argmax(-1) for piece in a.flatten(0, 1).split(LOSS_ROWS)])
                wanted = F.pad(batch.ids, (0, 2 + step), value=-1)[:, 2 + step :]
                accepted = accepted & (self.head.draft_ids[best].view_as(wanted) == wanted)
                lengths += accepted
        return lengths

    def save(self, folder: Path, figures: Mapping[str, Any], verifier: str = "") -> None:
        """Write the current weights as a head that takes the target's states as they are: see `write_head`."""
        tensors = {name: p.detach().clone() for name, p in self.head.named_parameters()}
        tensors["fc.weight"] /= self.sizes.to(tensors["fc.weight"])  # trained on features of size 1
        finished = EagleHead(self.head.config, self.head.draft_ids.cpu())
        finished.load_state_dict(tensors)
        finished.bind(self.target, self.head.target_sha256, self.head.target, dtype=torch.float32)
        write_head(finished, folder, steps=self.unroll, verifier=verifier, metrics=figures)


def chain_attention(q: Tensor, keys: Tensor, values: Tensor, chain: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of queries [B, heads, T, dim] at t to true entries up to t and, of each later step, to the one at t.

    Keys and values are [B, kv_heads, T, dim] each. One softmax goes over both."""
    batch, heads, wide, dim = q.shape
    grouped = q.view(batch, keys.shape[1], -1, wide, dim) * dim**-0.5
    later = torch.ones(wide, wide, dtype=torch.bool, device=q.device).triu(1)
    scores = (grouped @ keys.unsqueeze(2).transpose(-1, -2)).masked_fill_(later, -torch.inf)
    own = torch.stack([(grouped * key.unsqueeze(2)).sum(-1) for key, _ in chain], -1)
    own = F.pad(own, (0, -len(chain) % 8), value=-torch.inf)  # other widths than multiples of 8 are slow on CUDA
    shares = torch.cat([scores, own.to(scores.dtype)], -1).softmax(-1).to(values.dtype)
    out = shares[..., :wide] @ values.unsqueeze(2)
    for n, (_, value) in enumerate(chain):
        out = out + shares[..., wide + n, None] * value.unsqueeze(2)
    return out.reshape(batch, heads, wide, dim)


def simulate(accepted: Sequence[int]) -> tuple[int, int]:
    """Tokens and target passes, given how many drafts are accepted at each index; the last pass may be cut short."""
    index = cycles = 0
    while index < len(accepted):
        index += accepted[index] + 1
        cycles += 1
    return len(accepted), cycles


def unrolled_loss(hidden: Tensor, weights: Tensor, states: Tensor, output: Tensor, cap: float | None) -> Tensor:
    """Σ weights · cross-entropy of hidden [J, R, H] against the target's states [R, H], both on output [D, H].

    Logits exist for LOSS_ROWS rows at a time only: their gradient is softmax − p, so that it is known at once."""
    gradient = torch.empty_like(hidden)
    total = hidden.new_zeros((), dtype=torch.float32)
    with torch.no_grad():
        for start in range(0, hidden.shape[1], LOSS_ROWS):
            piece = slice(start, start + LOSS_ROWS)
            logits = (states[piece].to(output.dtype) @ output.T).float()
            p = (cap * torch.tanh(logits / cap) if cap else logits).softmax(-1)
            for step, h in enumerate(hidden[:, piece]):
                log_q = (h @ output.T).float().log_softmax(-1)
                weight = weights[step, piece, None]
                total -= (p * log_q * weight).sum()
                rest = log_q.exp_().sub_(p).mul_(weight)  # ∂/∂logits = softmax − p
                gradient[step, piece] = rest.to(output.dtype) @ output
    return with_gradients(total, (hidden, gradient))
