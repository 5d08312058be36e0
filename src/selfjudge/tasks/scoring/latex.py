"""Whether two formulas are equal: by their normalised strings, by their value, then by math-verify."""

from __future__ import annotations

import logging
import re
import threading
from fractions import Fraction

_GONE = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;: ]|\\(?:displaystyle|limits|quad|qquad)(?![a-z])"
    r"|\^\\circ|\^\{\\circ\}|\\degree|\\%|%|\\\$|\$|\\\(|\\\)|\\\[|\\\]"
)
_UNITS = re.compile(r"(?<=[\d}])\s*\\(?:text|mbox|mathrm|textrm)\{[^{}]*\}(?:\^\{?\d\}?)?$")
_WORDS = re.compile(r"\\(?:text|mbox|mathrm|textrm|textbf|mathbf)\{([^{}]*)\}")
_SECONDS = 5


def same_maths(a: str, b: str) -> bool:
    """Equal strings after `normalise`, equal numbers, or formulas that math-verify finds equal."""
    ours, theirs = normalise(a), normalise(b)
    if ours == theirs:
        return ours != ""
    values = parse_value(ours), parse_value(theirs)
    if None not in values:
        return values[0] == values[1]
    return verify_equal(a, b)


def normalise(text: str) -> str:
    """One way to write a formula: no blanks, sizes, units, degree or dollar signs; `\\frac{a}{b}`; lower case."""
    text = (
        text.strip().rstrip(".").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\dots", "\\ldots")
    )
    text = _UNITS.sub("", _GONE.sub("", text))
    text = _WORDS.sub(r"\1", text)
    text = re.sub(r"\\(frac|sqrt)\s*(\d)\s*(?=[\d{])", r"\\\1{\2}", text)  # \frac12
    text = re.sub(r"(\\frac\{[^{}]*\})\s*(\w)", r"\1{\2}", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"^[a-zA-Z]\s*(?:=|\\in(?![a-z]))", "", text.strip())  # x = 5
    text = re.sub(r"\s+", "", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text) if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", text) else text
    text = re.sub(r"^(-?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"(?<!\d)\.(?=\d)", "0.", text)
    return text.lower().rstrip(".")


def parse_value(text: str) -> Fraction | None:
    """The value of a normalised number or fraction of whole numbers."""
    if fraction := re.fullmatch(r"(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}", text):
        sign, above, below = fraction.groups()
        return Fraction(int(f"{above}"), int(below)) * (-1 if sign else 1) if int(below) else None
    return Fraction(text) if re.fullmatch(r"-?\d+(\.\d+)?", text) else None


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
