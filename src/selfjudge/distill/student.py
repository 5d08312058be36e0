"""The student: a small model of the target's family whose embeddings are the target's own, times learned projections.

A vocabulary of 50,000 or 150,000 tokens would be most of a small model; the target has learned one already, and two
projections [H, W] are enough to use it. `draft_model` (models/convert.py) turns layers and projections into an ordinary
model."""

from collections import Counter
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from selfjudge.distill.config import HEAD, DistillConfig
from selfjudge.distill.data import MEASURE_TOKENS, Corpus, Dataset
from selfjudge.distill.train import HeldOutScore, with_gradients
from selfjudge.engine.teacher_forced import sdpa_without_cudnn

LOSS_ROWS = 8192  # rows of logits at a time


class Student(nn.Module):
    """The student of a target."""

    table: Tensor
    head: Tensor

    def __init__(self, target: PreTrainedModel, config: DistillConfig) -> None:
        super().__init__()
        large, heads = target.config.get_text_config(), config.width // HEAD
        self.raw = {
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
        """The configuration of an ordinary Llama or Qwen2 of this size with the target's vocabulary."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.model = AutoModel.from_config(
                AutoConfig.for_model(**self.raw),
                dtype=torch.float32,
                attn_implementation="sdpa",
                trust_remote_code=False,
            )
        self.model.embed_tokens = nn.Identity()
        table, head = (m.weight.detach() for m in (target.get_input_embeddings(), target.get_output_embeddings()))
        self.proj_in = nn.Parameter(_principal(table, config.width, 0.5))
        self.proj_out = nn.Parameter(_principal(head, config.width, 0.05))
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("head", head, persistent=False)
        self.to(target.device)

    def hidden(self, ids: Tensor) -> Tensor:
        """[B, T] → [B, T, W]: what the output matrix multiplies."""
        x = F.embedding(ids, self.table) @ self.proj_in.to(self.table.dtype)
        states: Tensor = self.model(inputs_embeds=x, use_cache=False).last_hidden_state
        return states

    def output(self) -> Tensor:
        """[V, W] the output matrix."""
        return self.head @ self.proj_out.to(self.head.dtype)

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

    def _read(self, corpus: Corpus, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The student's states where it predicts, its output matrix, where that is, and the teacher's top-k there."""
        device = self.student.proj_in.device
        ids, predicts, log_p, index = corpus.batch(rows, device)
        with sdpa_without_cudnn(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            output = self.student.output()
            hidden = self.student.hidden(ids)[predicts].to(output.dtype)
        return hidden, output, predicts, log_p, index

    def loss(self, rows: Tensor) -> tuple[Tensor, int]:
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
            for row, answer in zip(rows.tolist(), same.split(predicts.sum(1).tolist()), strict=True):
                for key in ("all", corpus.sources[row]):
                    right[key] += int(answer.sum())
                    seen[key] += len(answer)
        self.student.train()
        return {key: right[key] / seen[key] for key in right}

    def measure(self) -> HeldOutScore:
        agreement = self.agreement()["all"]
        return HeldOutScore(agreement, {"top1": round(agreement, 4)}, f"top-1 {agreement:.1%}")


def _principal(matrix: Tensor, width: int, scale: float) -> Tensor:
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
