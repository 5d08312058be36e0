"""Log-probabilities in the shapes of OpenAI's two endpoints, and the bytes of single tokens."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from selfjudge.decoding.adjust import TokenLogprobs

BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # as byte-level vocabularies write them


class TokenTexts:
    """The bytes and texts of single tokens: together they are those of the answer, special tokens included."""

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
