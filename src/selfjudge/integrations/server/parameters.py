"""What the parameters of a request ask of decoding: sampling, edits of the logits, grammars and log-probabilities."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from selfjudge.decoding.adjust import LeastTokens, Penalties, TokenBias, TokenLogprobs
from selfjudge.decoding.edits import LogitsEdit, RowEdits
from selfjudge.decoding.grammar import Grammar, compile_grammar, grammar_text, json_rule
from selfjudge.decoding.sampling import Sampling
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.asgi import RefusedError
from selfjudge.integrations.server.schema import ChatRequest, CompletionRequest, NamedTool
from selfjudge.integrations.server.tools import TEXT, ToolFormat
from selfjudge.models.pair import Pair

BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # as byte-level vocabularies write them
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


def read_grammar(pair: Pair, body: CompletionRequest, written: ToolFormat | None) -> Grammar | None:
    """The grammar that a request asks for; compiles it, for up to seconds. `written` is how tools are called."""
    form, tools = next(iter(body.forms), None), body.usable_tools
    try:
        if not (tools and isinstance(body, ChatRequest)):
            text = None if form is None else grammar_text(form.kind, form.value, strict=form.strict)
            return None if text is None else compile_grammar(pair, text)
        if written is None:
            raise SelfJudgeError("tools: how this model's chat template has them called is not known here")
        content = TEXT if form is None else json_rule(form.value, strict=form.strict)
        functions, free = [tool.function.model_dump() for tool in tools], body.tool_choice in (None, "auto")
        several = body.parallel_tool_calls is not False and not isinstance(body.tool_choice, NamedTool)
        return compile_grammar(pair, written.grammar(functions, content if free else None, several))
    except SelfJudgeError as error:
        raise RefusedError(400, str(error), param=body.form) from None


class TokenTexts:
    """The bytes and texts of single tokens, together those of the answer with its special tokens, and log-probabilities
    in the shapes of OpenAI's two endpoints."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.tokenizer, self.bytewise = tokenizer, backend is not None and "ByteLevel" in repr(backend.decoder)
        self.read = cache(self._read)

    def _read(self, token: int) -> bytes:
        piece = str(self.tokenizer.convert_ids_to_tokens(token) or "")
        if self.bytewise:  # but for special tokens
            return bytes(map(BYTES.__getitem__, piece)) if BYTES.keys() >= {*piece} else piece.encode()
        single = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
        return bytes.fromhex(single[1]) if single else piece.replace("▁", " ").encode()

    def text(self, token: int) -> str:
        return self.read(token).decode(errors="replace")

    def join(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens))

    def for_chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The field `logprobs` of a chat's choice."""

        def describe(token: int, logprob: float | None) -> dict[str, Any]:
            return {"token": self.text(token), "logprob": logprob, "bytes": list(self.read(token))}

        tops = [[describe(*best) for best in entry.top] for entry in entries]
        content = [describe(entry.token, entry.logprob) for entry in entries]
        return {"content": [{**c, "top_logprobs": t} for c, t in zip(content, tops, strict=True)], "refusal": None}

    def for_text(self, entries: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        """The field `logprobs` of a text's choice, whose first token begins at `offset`."""
        tokens, offsets = [self.text(one.token) for one in entries], []
        for text in tokens:
            offsets.append(offset)
            offset += len(text)
        tops = [  # the first token of a prompt has none
            None if one.logprob is None else {self.text(t): p for t, p in (*one.top, (one.token, one.logprob))}
            for one in entries
        ]
        logprobs = [one.logprob for one in entries]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
