"""Teacher-forced passes of transformers models, without an engine: the states at every token of given answers."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from selfjudge.models.eagle import EagleHead, captured_states
from selfjudge.models.load import LoadedModel, Target, as_loaded
from selfjudge.models.tokens import context_window

GRID = 64  # widths of batches are multiples of this: the first pass of every new shape is slow on CUDA
TOKENS = {"cuda": 131072}  # tokens of a pass, by device
LOGITS = {"cuda": 1 << 29}  # logits that are computed at a time, by device
Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]  # prompts and their answers


def choose_width(longest: int, device: torch.device, window: int = 1 << 30) -> int:
    """The width of a batch whose longest row has `longest` tokens, for a model with this context window."""
    return min(-(-longest // GRID) * GRID, max(longest, window)) if device.type == "cuda" else longest


sdpa_without_cudnn = partial(sdpa_kernel, [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
"""All kernels of scaled dot-product attention except cuDNN's, which makes a plan for every new shape."""


@torch.no_grad()
def teacher_forced(model: PreTrainedModel | LoadedModel, sequences: Sequences) -> Iterator[tuple[list[int], Tensor]]:
    """Yield indices of sequences and, for all tokens of their answers in that order, the states [R, H] before them.
    States are those after the final norm. Sequences of similar length share a pass, halved when memory runs out."""
    loaded = as_loaded(model)
    if isinstance(loaded, Target) and loaded.remote is not None:
        whole = [[*prompt, *answer] for prompt, answer in sequences]
        answer_states = loaded.remote.states(whole, [len(answer) + 1 for _, answer in sequences])
        yield list(range(len(sequences))), torch.cat([rows[:-1] for rows in answer_states])
        return
    module = loaded.causal_lm

    def states(ids: Tensor, predicts: Tensor) -> Tensor:
        hidden: Tensor = module.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden[predicts]

    yield from _passes(module, sequences, states)


@torch.no_grad()
def head_choices(head: EagleHead, target: PreTrainedModel, sequences: Sequences) -> Iterator[tuple[list[int], Tensor]]:
    """Yield indices of sequences and, for all tokens of their answers in that order, what a head proposes there [R].
    Entries are made of the target's states; there is none before the second token, where the answer's is returned."""

    def choices(ids: Tensor, predicts: Tensor) -> Tensor:
        with captured_states(target, head.config.aux_layers) as states:
            target.base_model(input_ids=ids, use_cache=False)
        a = head(ids[:, 1:], head.fc(torch.cat(states, -1)[:, :-1]))[predicts[:, 1:]]
        best = [head.logits(rows).argmax(-1) for rows in a.split(logit_rows(target))]
        chosen = ids.roll(-1, 1)
        chosen[:, 1:][predicts[:, 1:]] = head.draft_ids[torch.cat(best)]
        return chosen[predicts]

    yield from _passes(target, sequences, choices)


def _passes(
    model: PreTrainedModel, sequences: Sequences, run: Callable[[Tensor, Tensor], Tensor]
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield indices of sequences and `run` of their tokens and of the mask of those before an answer's, both [B, T]."""
    device, window = model.device, context_window(model)
    embeddings = model.get_input_embeddings().weight.shape[0]
    tokens = TOKENS.get(device.type, 8192)
    sizes = [len(prompt) + len(answer) for prompt, answer in sequences]
    order = sorted(range(len(sequences)), key=lambda i: -sizes[i])
    while order:
        width = choose_width(sizes[order[0]], device, window)
        count = max(1, tokens // width)
        part, order = order[:count], order[count:]
        ids = torch.zeros(len(part), width, dtype=torch.long)
        predicts = torch.zeros(len(part), width, dtype=torch.bool)
        for row, i in enumerate(part):
            prompt, answer = sequences[i]
            ids[row, : sizes[i]] = torch.tensor([*prompt, *answer])
            predicts[row, len(prompt) - 1 : sizes[i] - 1] = True
        ids.clamp_(max=embeddings - 1)  # a target may have more tokens than its draft
        try:
            with sdpa_without_cudnn():
                result = run(ids.to(device), predicts.to(device))
        except torch.OutOfMemoryError:
            if len(part) == 1:
                raise
            tokens, order = tokens // 2, part + order
            continue
        yield part, result


def logit_rows(model: PreTrainedModel) -> int:
    """Rows of logits that are computed at a time."""
    return max(1, LOGITS.get(model.device.type, 1 << 26) // int(model.get_output_embeddings().weight.shape[0]))


def logits_of(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits of states, with the soft cap that some models put on them."""
    logits: Tensor = model.get_output_embeddings()(hidden)
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return cap * torch.tanh(logits / cap) if cap else logits


def log_probabilities(model: PreTrainedModel, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[R] log-probabilities of `tokens` at their states, those of the most likely tokens there, and these tokens."""
    parts = []
    step = logit_rows(model)
    for rows, chosen in zip(states.split(step), tokens.split(step), strict=True):
        logits = logits_of(model, rows).float()
        total, top = logits.logsumexp(-1), logits.max(-1)
        parts.append((logits.gather(1, chosen[:, None]).squeeze(1) - total, top.values - total, top.indices))
    log_p, highest, choices = map(torch.cat, zip(*parts, strict=True))
    return log_p, highest, choices
