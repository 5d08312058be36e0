"""Tool calls in the words of chat templates: what a grammar asks for, and what is read back from an answer. Under its
grammar an answer writes calls in one way alone, so that reading them back needs no guesses."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from selfjudge.decoding.grammar import json_rule
from selfjudge.errors import SelfJudgeError
from selfjudge.models.pair import Pair
from selfjudge.store import read_asset

MOST_CALLS = 32  # of an answer: a small model may find no end
TEXT = r"/(.|\n)*/"


@dataclass(frozen=True)
class ToolFormat:
    """How a chat template writes calls: MARKER BEGIN {"name": …, KEY: …} BETWEEN {…} END."""

    marker: str
    begin: str
    between: str
    end: str
    key: str = "arguments"
    at_start: bool = False  # whether calls are the whole answer; their marker may then be missing
    tokens: Mapping[str, int] = field(default_factory=dict)  # the tokens of texts that must be single ones
    shown: bool = True  # whether the marker is in the text of an answer: special tokens are not
    native: bool = True  # whether the template itself knows tools

    @classmethod
    def of(cls, pair: Pair) -> ToolFormat | None:
        """The format of a pair's chat template; Hermes', told in a system message, for a template without tools."""
        tokenizer = pair.tokenizer
        if not tokenizer.chat_template:
            return None
        template = str(tokenizer.get_chat_template(tools=[{}]))
        native = re.search(r"\btools\b", template) is not None
        for known in (MISTRAL, HERMES, LLAMA):
            own = known.marker in template or (known is LLAMA and '"parameters": ' in template)
            if own if native else known is HERMES:
                written = known.marker + known.begin + known.between + known.end
                tokens = {text: token for text, token in tokenizer.get_added_vocab().items() if text in written}
                token = tokens.get(known.marker)
                shown = token is None or not tokenizer.added_tokens_decoder[token].special
                return replace(known, tokens=tokens, shown=shown, native=native)
        return None

    @property
    def lead(self) -> str:
        """The text before the first call's name."""
        marker = self.marker if self.shown and not self.at_start else ""
        return f'{marker}{self.begin}{{"name": "'

    def _lark(self, text: str) -> str:
        """A text in Lark: what is a token of its own is named by its number, for no other tokens may spell it."""
        parts = re.split("|".join(f"({re.escape(one)})" for one in self.tokens), text) if self.tokens else [text]
        named = (f"<[{self.tokens[part]}]>" if part in self.tokens else json.dumps(part) for part in parts if part)
        return " ".join(named) or '""'

    def grammar(self, tools: Sequence[Mapping[str, Any]], content: str | None, several: bool) -> str:
        """Calls of these functions, or the Lark rule `content` in their place; None: calls alone."""
        marker, between = self._lark(self.marker), self._lark(self.between)
        calls, alone = f"({marker})? calls" if self.at_start else f"{marker} calls", content is None
        more = f" ({between} call){{0,{MOST_CALLS - 1}}}" if several else ""
        line = f"{self.end}\n"  # after a line end the answer may end, too: many models write one
        ends = (self.end, line) if several and self.between.startswith(line) else (self.end,)
        rules = [f"calls: {self._lark(self.begin)} call{more} ({' | '.join(map(self._lark, ends))})"]
        if alone:
            rules.append(f"start: {calls}")
        elif content != TEXT or self.at_start:
            rules.append(f"start: content | {calls}")
            rules.append(r"content: /([^{](.|\n)*)?/" if content == TEXT else f"content: {content}")
        elif self.marker not in self.tokens:  # free text until the marker, which ends it at once
            rules += ["start: content | head calls", f"content: {TEXT}", f"head[lazy]: {TEXT} {marker}"]
        else:
            rules += [f"start: content ({calls})?", f"content: {TEXT}"]
        for i, tool in enumerate(tools):
            name = json.dumps(f'{{"name": "{tool["name"]}", "{self.key}": ')
            schema = {"type": "object", **(tool.get("parameters") or {"properties": {}, "additionalProperties": False})}
            if schema["type"] != "object":
                raise SelfJudgeError(f"the parameters of tool {tool['name']} must be an object")
            rules.append(f'call_{i}: {name} args_{i} "}}"')
            rules.append(f"args_{i}: {json_rule(schema, strict=bool(tool.get('strict')))}")
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
        return "\n".join(("%llguidance {}", *rules))

    def messages(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages as the template takes them; one without tools reads of them, of calls and results, as text."""
        if self.native:
            return messages
        told: list[dict[str, Any]] = []
        if tools:
            first = messages[0]["content"] + "\n\n" if messages[0]["role"] == "system" else ""
            described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            told.append({"role": "system", "content": first + read_asset(__package__, "tools.txt").strip() % described})
        for message in messages[1 if tools and messages[0]["role"] == "system" else 0 :]:
            content = message["content"]
            if message["role"] == "tool":
                message = {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
            elif calls := message.get("tool_calls"):
                functions = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
                texts = [f"<tool_call>\n{function}\n</tool_call>" for function in functions]
                message = {"role": "assistant", "content": "\n".join([content, *texts] if content else texts)}
            told.append(message)
        return told


HERMES = ToolFormat("<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
LLAMA = ToolFormat("<|python_tag|>", "", "; ", "", "parameters", at_start=True)
MISTRAL = ToolFormat("[TOOL_CALLS]", "[", ", ", "]")


class CallReader:
    """Splits the text of an answer, as it comes, into content and parts of tool calls, as OpenAI streams them."""

    def __init__(self, written: ToolFormat) -> None:
        self.lead, self.at_start, name = written.lead, written.at_start, f'([\\w-]+)", "{written.key}": '
        self.first, self.later = re.compile(re.escape(self.lead) + name), re.compile('\\{"name": "' + name)
        self.rest, self.told, self.calls = "", False, 0  # text that is not told yet; whether content was
        self.open, self.depth, self.quoted, self.escaped = False, 0, False, False  # of arguments that are being read

    def read(self, text: str, *, last: bool = False) -> Iterator[dict[str, Any]]:
        """The deltas of a message; `last` says that no more text follows."""
        self.rest += text
        while self.rest:
            if self.open:
                yield self._delta({"arguments": self._take(self._scan())})
                continue
            found = (self.later if self.calls else self.first).search(self.rest)
            if found is None or (self.at_start and not self.calls and (self.told or found.start())):
                break
            if (content := self._take(found.start())) and not self.calls:
                yield {"content": content}
            self._take(len(found[0]))
            self.calls, self.open = self.calls + 1, True
            yield self._delta({"name": found[1], "arguments": ""}, id=secrets.token_hex(5)[:9], type="function")
        if not self.calls and (content := self._take(len(self.rest) if last else self._hold())):
            self.told = True
            yield {"content": content}

    def _delta(self, function: dict[str, str], **more: str) -> dict[str, Any]:
        return {"tool_calls": [{"index": self.calls - 1, **more, "function": function}]}

    def _take(self, length: int) -> str:
        taken, self.rest = self.rest[:length], self.rest[length:]
        return taken

    def _hold(self) -> int:
        """Where text begins that may turn out to be a call."""
        possible = [0] if self.at_start and not self.told else [] if self.at_start else range(len(self.rest))
        begins = (at for at in possible if self.lead.startswith(self.rest[at : at + len(self.lead)]))
        return next(begins, len(self.rest))

    def _scan(self) -> int:
        """Follow the arguments, which are a JSON object, to their end or that of the text."""
        for at, character in enumerate(self.rest):
            if self.escaped:
                self.escaped = False
            elif self.quoted:
                self.escaped, self.quoted = character == "\\", character != '"'
            elif character in "{[]}":
                self.depth += 1 if character in "{[" else -1
                if not self.depth:
                    self.open = False
                    return at + 1
            else:
                self.quoted = character == '"'
        return len(self.rest)
