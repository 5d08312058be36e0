"""The one exception a user is meant to see: its text is a single line that says what is wrong and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches

EMPTY_PROMPT = "the prompt is empty: give at least one word"


class SelfJudgeError(Exception):
    """Wrong input or a failed resource. The command line prints it as one line and exits with 2.
    Messages name arguments in backticks (`max_new_tokens`); the command line shows them as its options."""


def expect(fits: object, name: str, wanted: str, value: object) -> None:
    """Refuse the value of an argument that does not fit."""
    if not fits:
        shown = " ".join(repr(value).split())
        raise SelfJudgeError(f"`{name}` must be {wanted}, not {shown if len(shown) < 80 else f'{shown[:76]} …'}")


def first_line(error: BaseException) -> str:
    """What somebody else's exception says, short enough for a line of ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:160]


def unknown(kind: str, name: str, known: Iterable[str]) -> SelfJudgeError:
    """A name that is not among the known ones: what was probably meant, else all of them."""
    names = list(known)
    if near := get_close_matches(name, names, 1, 0.75):
        return SelfJudgeError(f"unknown {kind} {name!r}: do you mean {near[0]}?")
    return SelfJudgeError(f"unknown {kind} {name!r}; {kind}s are: {', '.join(names)}")
