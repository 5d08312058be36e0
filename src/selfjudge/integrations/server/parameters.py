"""What the parameters of a request ask of decoding: sampling, and edits of the logits."""

from collections.abc import Sequence

from selfjudge.decoding.adjust import LeastTokens, Penalties, TokenBias
from selfjudge.decoding.edits import LogitsEdit, RowEdits
from selfjudge.decoding.rules import AcceptanceRule, FLy
from selfjudge.decoding.sampling import Sampling
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.asgi import RefusedError
from selfjudge.integrations.server.schema import CompletionRequest

NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}  # filters that filter nothing


def choose_sampling(body: CompletionRequest, own: float) -> Sampling | None:
    """None is greedy. `own` is the server's temperature; a filter without a temperature is at 1, OpenAI's default."""
    filters = {name: value for name in NEUTRAL if (value := getattr(body, name)) is not None}
    temperature = body.temperature
    if temperature is None:
        temperature = own or (0.0 if filters.items() <= NEUTRAL.items() else 1.0)
    try:
        return Sampling(temperature, **filters) if temperature else None
    except SelfJudgeError as error:  # above 0 and too small to divide by
        raise RefusedError(400, str(error), param="temperature") from None


def make_edits(body: CompletionRequest, prompt: Sequence[int], eos_ids: Sequence[int], vocabulary: int) -> RowEdits:
    """Edits for one answer, without its log-probabilities; none where they would change nothing."""
    edits: list[LogitsEdit] = []
    for name, tokens in (("logit_bias", body.logit_bias or ()), ("stop_token_ids", body.stop_token_ids)):
        if not all(0 <= token < vocabulary for token in tokens):
            raise RefusedError(400, f"{name}: token ids lie between 0 and {vocabulary - 1}", param=name)
    if body.logit_bias:
        edits.append(TokenBias(body.logit_bias))
    penalties = body.presence_penalty or 0.0, body.frequency_penalty or 0.0, body.repetition_penalty or 1.0
    if penalties != (0.0, 0.0, 1.0):
        edits.append(Penalties(*penalties, prompt))
    if body.min_tokens:
        ends = [token for token in (*eos_ids, *body.stop_token_ids) if token < vocabulary]
        edits.append(LeastTokens(body.min_tokens, ends))
    return tuple(edits)


def is_blind(rule: AcceptanceRule) -> bool:
    """Whether a rule accepts drafts without looking at their logits, and so cannot honour edits."""
    return rule.judge is not None or isinstance(rule, FLy)
