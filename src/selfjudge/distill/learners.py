"""What is trained: a student, or an EAGLE-3 head.
The student is a small model of the target's family whose embeddings are the target's own, times learned projections.
A vocabulary of 50,000 or 150,000 tokens would be most of a small model, and the target has learned one already.
`build_draft` (models/convert.py) turns layers and projections into an ordinary model.
A head is unrolled over the steps it will draft, against the target's own distribution. The target reads every batch
once, as it is needed: its states would fill a disk. Index t of a row is the draft that begins there: at step 0 the head
gets the target's states at t and the token at t+1, at step j its own output of the step before and the token at t+1+j,
and proposes the token at t+2+j. An entry sees what it will see when it drafts: the entries of step 0 up to t, made from
true states, and the chain of its own earlier steps. Tokens are the right ones: where all steps up to j are right, the
chain is the one that decoding would make."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from selfjudge.distill.config import HEAD_DIM, DistillConfig
from selfjudge.distill.data import MEASURE_TOKENS, Corpus, Dataset
from selfjudge.distill.train import HeldOutScore, with_gradients
from selfjudge.engine.teacher_forced import sdpa_without_cudnn
from selfjudge.models.device import send
from selfjudge.models.eagle import EagleConfig, EagleHead, captured_states, write_head

LOSS_ROWS = 8192  # rows of a student's logits that are in memory at a time
HEAD_ROWS = 4096  # rows of a head's logits that are in memory at a time
STEP_WEIGHT = 0.8  # weight of a step in a head's loss over that of the step before


class Student(nn.Module):
    """The student of a target."""

    input_matrix: Tensor  # [V, H] the target's embeddings
    output_matrix: Tensor  # [V, H] what the target's states are multiplied with

    def __init__(self, target: PreTrainedModel, config: DistillConfig) -> None:
        super().__init__()
        large, heads = target.config.get_text_config(), config.width // HEAD_DIM
        self.raw = {  # an ordinary Llama or Qwen2 of this size with the target's vocabulary
            "model_type": "qwen2" if large.model_type == "qwen2" else "llama",
            "vocab_size": target.get_input_embeddings().weight.shape[0],
            "hidden_size": config.width,
            "intermediate_size": config.inner or round(config.width * 8 / 3 / 64) * 64,
            "num_hidden_layers": config.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": large.max_position_embeddings,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "bos_token_id": large.bos_token_id,
            "eos_token_id": large.eos_token_id,
            "pad_token_id": large.pad_token_id,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.model = AutoModel.from_config(
                AutoConfig.for_model(**self.raw),
                dtype=torch.float32,
                attn_implementation="sdpa",
                trust_remote_code=False,
            )
        self.model.embed_tokens = nn.Identity()
        self.register_buffer("input_matrix", target.get_input_embeddings().weight.detach(), persistent=False)
        self.register_buffer("output_matrix", target.get_output_embeddings().weight.detach(), persistent=False)
        self.proj_in = nn.Parameter(_find_principal(self.input_matrix, config.width, 0.5))
        self.proj_out = nn.Parameter(_find_principal(self.output_matrix, config.width, 0.05))
        self.to(target.device)

    def hidden(self, ids: Tensor) -> Tensor:
        """[B, T] → [B, T, W]: what the output matrix multiplies."""
        x = F.embedding(ids, self.input_matrix) @ self.proj_in.to(self.input_matrix.dtype)
        states: Tensor = self.model(inputs_embeds=x, use_cache=False).last_hidden_state
        return states

    def output(self) -> Tensor:
        """[V, W] the output matrix."""
        return self.output_matrix @ self.proj_out.to(self.output_matrix.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that is learned: layers and projections by name, in the order of the parameters."""
        return {name: p.detach() for name, p in self.named_parameters()}


class StudentLearner:
    """A student that learns from the target's most likely tokens; its top-1 agreement with the target is measured."""

    layers: tuple[str, ...] = ("model.",)

    def __init__(self, student: Student, data: Dataset) -> None:
        self.student, self.data = student, data

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.student.named_parameters()

    def _read(self, corpus: Corpus, rows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The student's states where it predicts, its output matrix, where that is, and the teacher's top-k there."""
        device = self.student.proj_in.device
        ids, predicts, log_p, index = corpus.batch(rows, device)
        with sdpa_without_cudnn(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            output = self.student.output()
            hidden = self.student.hidden(ids)[predicts].to(output.dtype)
        return hidden, output, predicts, log_p, index

    def loss(self, rows: Sequence[int]) -> tuple[Tensor, int]:
        hidden, output, _, log_p, index = self._read(self.data.training, rows)
        return top_k_loss(hidden, output, log_p, index), len(index)  # outside autocast: its softmax would be float32

    @torch.no_grad()
    def agreement(self) -> dict[str, float]:
        """How often the student's most likely token is the target's over all held-out answers, and by source."""
        corpus, right, seen = self.data.held_out, Counter[str](), Counter[str]()
        self.student.eval()
        for rows in corpus.batches(MEASURE_TOKENS, torch.Generator().manual_seed(0)):
            hidden, output, predicts, _, index = self._read(corpus, rows)
            same = torch.cat([(h @ output.T).argmax(-1) for h in hidden.split(LOSS_ROWS)]) == index[:, 0]
            for row, answer in zip(rows, same.split(predicts.sum(1).tolist()), strict=True):
                for key in ("all", corpus.answers[row].source):
                    right[key] += int(answer.sum())
                    seen[key] += len(answer)
        self.student.train()
        return {key: right[key] / seen[key] for key in right}

    def measure(self) -> HeldOutScore:
        agreement = self.agreement()["all"]
        return HeldOutScore(agreement, {"top1": round(agreement, 4)}, f"top-1 {agreement:.1%}")


def _find_principal(matrix: Tensor, width: int, scale: float) -> Tensor:
    """[H, W] the directions in which the rows of a matrix vary most; projected rows have the deviation `scale`."""
    wide = matrix.float()
    _, directions = torch.linalg.eigh((wide.T @ wide) / len(wide))
    if width <= directions.shape[1]:
        chosen = directions[:, -width:]
    else:  # wider than the target: the rest starts at zero
        chosen = F.pad(directions, (0, width - directions.shape[1]))
    scaled: Tensor = chosen * (scale / (wide @ chosen).std())
    return scaled.contiguous()


def top_k_loss(hidden: Tensor, output: Tensor, log_p: Tensor, index: Tensor) -> Tensor:
    """Mean over rows of −Σ p log q: hidden [R, W], output [V, W], the teacher's top-k [R, k] each, renormalised.
    Logits exist for LOSS_ROWS rows at a time only: their gradient is softmax − p, so that it is known at once."""
    grad_hidden, grad_output = torch.empty_like(hidden), torch.zeros_like(output, dtype=torch.float32)
    total = hidden.new_zeros((), dtype=torch.float32)
    with torch.no_grad():
        for start in range(0, len(hidden), LOSS_ROWS):
            piece = slice(start, start + LOSS_ROWS)
            h, at = hidden[piece], index[piece].long()
            p = log_p[piece].float().softmax(-1)  # renormalised over the k tokens
            q = (h @ output.T).softmax(-1)
            total -= (p * q.gather(1, at).float().clamp_min(1e-20).log()).sum()
            q.scatter_add_(1, at, -p.to(q.dtype))  # ∂/∂logits = softmax − p
            grad_hidden[piece] = q @ output
            grad_output += (q.T @ h).float()
    return with_gradients(total, (hidden, grad_hidden), (output, grad_output.to(output.dtype))) / len(hidden)


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
def read_batch(target: PreTrainedModel, aux_layers: tuple[int, ...], corpus: Corpus, rows: Sequence[int]) -> TargetPass:
    """One pass of the target over these answers of the corpus."""
    ids, answers = corpus.ids(rows, target.device), [corpus.answers[i] for i in rows]
    with sdpa_without_cudnn(), captured_states(target, aux_layers) as states:
        final = target.base_model(input_ids=ids, use_cache=False).last_hidden_state
    prompts = send([answer.prompt_length for answer in answers], target.device)
    lengths = send([len(answer.tokens) for answer in answers], target.device)
    return TargetPass(ids, prompts, lengths, torch.cat(states, -1), final)


@torch.no_grad()
def measure_sizes(target: PreTrainedModel, aux_layers: tuple[int, ...], corpus: Corpus) -> tuple[Tensor, Tensor]:
    """RMS of the features [3H] and final states [H] over a few batches: a few columns are hundreds of times larger."""
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


def choose_vocabulary(corpus: Corpus, vocabulary: int, size: int, always: Sequence[int]) -> Tensor:
    """[D] ids of the `size` tokens that occur most often in answers, ascending; those in `always` are among them."""
    counts = corpus.count_tokens(vocabulary)
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
        g = head.fc(batch.features / self.sizes.to(batch.features.dtype))
        positions = batch.columns[None]
        true: tuple[Tensor, Tensor] | None = None
        chain: list[tuple[Tensor, Tensor]] = []
        for step in range(self.unroll):
            tokens = F.pad(batch.ids, (0, 1 + step))[:, 1 + step :]
            q, k, v = layer.project(head.embed(tokens), g, head.rotary_emb(g, positions + step))
            if true is None:
                true = k, v
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            else:
                chain.append((k, v))
                attended = chain_attention(q, *true, chain)
            g = layer.finish(g, attended)
            yield g

    def loss(self, rows: Sequence[int]) -> tuple[Tensor, int]:
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
                weights.append(counts * STEP_WEIGHT**step / counts.sum().clamp_min(1))
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
            for row, answer in zip(lengths, (self.data.held_out.answers[i] for i in rows), strict=True):
                first, end = answer.prompt_length - 1, len(answer.tokens) - 2
                tokens, cycles = count_cycles(row[first : max(first, end)].tolist())
                for key in ("all", answer.source):
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
                best = torch.cat([self.head.logits(piece).argmax(-1) for piece in a.flatten(0, 1).split(HEAD_ROWS)])
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


def count_cycles(accepted: Sequence[int]) -> tuple[int, int]:
    """Tokens and cycles of an answer, given how many drafts each index would accept; the last cycle may be short."""
    index = cycles = 0
    while index < len(accepted):
        index += accepted[index] + 1
        cycles += 1
    return len(accepted), cycles


def unrolled_loss(hidden: Tensor, weights: Tensor, states: Tensor, output: Tensor, cap: float | None) -> Tensor:
    """Σ weights · cross-entropy of hidden [J, R, H] against the target's states [R, H], both on output [D, H].
    Logits exist for HEAD_ROWS rows at a time only: the gradient is known at once (see `top_k_loss`)."""
    gradient = torch.empty_like(hidden)
    total = hidden.new_zeros((), dtype=torch.float32)
    with torch.no_grad():
        for start in range(0, hidden.shape[1], HEAD_ROWS):
            piece = slice(start, start + HEAD_ROWS)
            logits = (states[piece].to(output.dtype) @ output.T).float()
            p = (cap * torch.tanh(logits / cap) if cap else logits).softmax(-1)
            for step, h in enumerate(hidden[:, piece]):
                log_q = (h @ output.T).float().log_softmax(-1)
                weight = weights[step, piece, None]
                total -= (p * log_q * weight).sum()
                rest = log_q.exp_().sub_(p).mul_(weight)  # ∂/∂logits = softmax − p
                gradient[step, piece] = rest.to(output.dtype) @ output
    return with_gradients(total, (hidden, gradient))
