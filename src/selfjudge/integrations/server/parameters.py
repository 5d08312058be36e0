"""What the parameters of a request ask of decoding: sampling, edits of the logits, the seeds of several answers."""

from collections.abc import Sequence

from selfjudge.decoding.adjust import LeastTokens, LogProbabilities, Penalties, TokenBias
from selfjudge.decoding.edits import LogitsEdit, RowEdits
from selfjudge.decoding.rules import AcceptanceRule, FLy
from selfjudge.decoding.sampling import Sampling
from selfjudge.decoding.text import row_seed
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.asgi import RefusedError
from selfjudge.integrations.server.schema import CompletionRequest


def choose_sampling(body: CompletionRequest, own: float) -> Sampling | None:
    """None is greedy. `own` is the server's temperature; a filter without a temperature is at 1, OpenAI's default."""
    filters = {name: value for name in ("top_p", "top_k", "min_p") if (value := getattr(body, name)) is not None}
    temperature = body.temperature
    if temperature is None:
        temperature = own or (0.0 if filters.items() <= NEUTRAL.items() else 1.0)
    try:
        return Sampling(temperature, **filters) if temperature else None
    except SelfJudgeError as error:  # above 0 and too small to divide by
        raise RefusedError(400, str(error), param="temperature") from None


NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}  # filters that filter nothing


def make_edits(body: CompletionRequest, prompt: Sequence[int], ends: Sequence[int], vocabulary: int) -> RowEdits:
    """Edits for one answer, without the log-probabilities; none where they would change nothing. `ends` end it."""
    edits: list[LogitsEdit] = []
    bias = body.logit_bias or {}
    for name, tokens in (("logit_bias", bias), ("stop_token_ids", body.stop_token_ids)):
        if not all(0 <= token < vocabulary for token in tokens):
            raise RefusedError(400, f"{name}: token ids lie between 0 and {vocabulary - 1}", param=name)
    if bias:
        edits.append(TokenBias(bias))
    penalties = body.presence_penalty or 0.0, body.frequency_penalty or 0.0, body.repetition_penalty or 1.0
    if penalties != (0.0, 0.0, 1.0):
        edits.append(Penalties(*penalties, prompt))
    if body.min_tokens:
        edits.append(LeastTokens(body.min_tokens, [token for token in ends if token < vocabulary]))
    return tuple(edits)


def note_logprobs(body: CompletionRequest) -> LogProbabilities | None:
    """What notes the log-probabilities of an answer, where they are asked for."""
    top = body.wanted_logprobs
    return None if top is None else LogProbabilities(top)


def is_blind(rule: AcceptanceRule) -> bool:
    """Whether a rule accepts drafts without looking at their logits, and so cannot honour edits."""
    return rule.judge is not None or isinstance(rule, FLy)


def derive_seed(seed: int, copy: int) -> int:
    """The seed of the n-th answer to a prompt; the first has the request's own."""
    return row_seed(seed, copy) if copy else seed
