"""Finding answers in texts, and comparing numbers, words and formulas."""

import logging
import re
import threading
from decimal import Decimal

NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<![\w.])[-+]?\.\d+")
_MINUS = str.maketrans("−–", "--")
_SECONDS = 5


def find_numbers(text: str) -> list[str]:
    """All numbers in a text, without thousands separators."""
    cleaned = re.sub(r"([-+])\s?([$€£])\s?(?=\d)", r"\1", text.translate(_MINUS)).replace("$", " ")
    cleaned = re.sub(r"(?<=[\w)])-(?=[\d.])", " - ", cleaned)  # 3-4 is no −4
    return [found.group().replace(",", "").lstrip("+") for found in NUMBER.finditer(cleaned)]


def find_final_number(text: str) -> str | None:
    """The number after the last "final answer is", else the last one; of an equation (`3 + 4 = 7`) the right side."""
    if (rest := _after_last(r"(?:final )?answer is", text)) is not None:
        line = next(iter(rest.strip().splitlines()), "")
        for part in (line.rpartition("=")[2], line):
            if found := find_numbers(part):
                return found[0]
    found = find_numbers(text)
    return found[-1] if found else None


def find_final_words(text: str) -> str | None:
    """What follows the last "answer is", up to the end of the sentence."""
    rest = _after_last(r"answer is:?", text) or ""
    return re.split(r"\.(?:\s|$)|\n", rest.strip(), maxsplit=1)[0].strip(" *\"'.") or None


def _after_last(pattern: str, text: str) -> str | None:
    """The text after the last match; None if nothing matches."""
    ends = [match.end() for match in re.finditer(pattern, text, re.IGNORECASE)]
    return text[ends[-1] :] if ends else None


def find_tagged(text: str) -> str | None:
    """What stands between the last [answer] and [/answer] (or [\\answer], or a second [answer])."""
    found = re.findall(r"\[answer\](.*?)\[[/\\]?answer\]", text, re.IGNORECASE | re.DOTALL)
    return found[-1].strip() or None if found else None


def find_boxed(text: str) -> str | None:
    """The content of the last \\boxed{…}, braces inside it included; None if it does not end."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    begin, depth = text.index("{", start) + 1, 1
    for end, letter in enumerate(text[begin:], begin):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return text[begin:end].strip() or None
    return None


def find_code(text: str, needs: str = "") -> str | None:
    """The last fenced block that names Python, else any, with the words `needs` if one has them; None if all are empty.
    A block that the length limit cut is taken as far as it goes."""
    blocks = re.findall(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", text, re.DOTALL)
    filled = [(name.lower(), str(body)) for name, body in blocks if body.strip()]
    found = [body for name, body in filled if name in ("python", "python3", "py")] or [body for _, body in filled]
    found = [body for body in found if needs in body] or found
    return found[-1] if found else None


def same_number(a: str | None, b: str | None) -> bool:
    """1,000 is 1000.0; what is no number equals nothing."""
    values = [_parse_number(text) for text in (a, b)]
    return values[0] is not None and values[0] == values[1]


def _parse_number(text: str | None) -> Decimal | None:
    if text is None or not NUMBER.fullmatch(stripped := text.strip().translate(_MINUS)):
        return None
    return Decimal(stripped.replace(",", ""))


def same_words(a: str | None, b: str | None) -> bool:
    """Equal but for case, blanks and marks at the ends; numbers as numbers."""
    if a is None or b is None:
        return False
    ours, theirs = (" ".join(text.casefold().split()).strip(" .,;:!\"'") for text in (a, b))
    return same_number(a, b) or (ours == theirs and ours != "")


def same_maths(a: str, b: str) -> bool:
    """Whether two formulas are written the same, or math-verify finds them equal; an empty one equals nothing."""
    return bool(a.strip()) and (a.strip() == b.strip() or verify_equal(a, b))


def verify_equal(a: str, b: str) -> bool:
    """Whether math-verify finds two formulas equal; False where it fails."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    # its clock is a signal, which only the main thread can set
    seconds = _SECONDS if threading.current_thread() is threading.main_thread() else None
    try:
        ours, theirs = (parse(f"${text}$", parsing_timeout=seconds) for text in (a, b))
        return bool(ours and theirs and verify(ours, theirs, timeout_seconds=seconds))
    except Exception:  # sympy fails in many ways on what is not a formula
        return False
