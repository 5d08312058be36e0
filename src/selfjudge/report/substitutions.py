"""What kind of change a judged substitution is: a rough guess from the two tokens alone, without their context.

Checked in this order, else `other`, as are differing numbers and operators:
- `format`: no letters or digits on either side, or the same word in other case, spacing or marks;
- `article`: a, an, the against another determiner;
- `starter`: two capitalised words, one of which often begins a sentence;
- `synonym`: a short list of words of worked answers, or two forms of one word.
"""

from __future__ import annotations

GROUPS = ("format", "article", "synonym", "starter", "other")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ARTICLES = frozenset(("a", "an", "the"))
DETERMINERS = ARTICLES | _words("this that these those its his her their our my your some any each every one")
STARTERS = _words(
    "so now then next first second third finally therefore thus hence we to let since because if when given after"
    " however also in as for this here step it you i"
)
SYNONYM_LISTS = (
    "find calculate compute determine get obtain evaluate solve figure / total sum overall combined"
    " / need must should have / is equals are be / number amount count quantity / use apply"
    " / so therefore thus hence / same equal identical / because since as / which that / big large"
    " / small little / start begin / also too / each every / buy purchase / however but / show demonstrate"
    " / give provide / make create / return output / list array / value result / but though"
    " / about around approximately / like such / say says said state stated states / many several"
)
SYNONYMS = tuple(map(_words, SYNONYM_LISTS.split(" / ")))
OPERATORS = frozenset("+/=<>^%")


def group(choice: str, taken: str) -> str:
    """One of GROUPS for `taken` in the place of the target's `choice`."""
    a, b = _word(choice), _word(taken)
    low_a, low_b = a.casefold(), b.casefold()
    if low_a == low_b:
        return "format" if OPERATORS & set(choice) == OPERATORS & set(taken) else "other"
    if {low_a, low_b} <= DETERMINERS and (low_a in ARTICLES or low_b in ARTICLES):
        return "article"
    if a[:1].isupper() and b[:1].isupper() and (low_a in STARTERS or low_b in STARTERS):
        return "starter"
    if any({low_a, low_b} <= words for words in SYNONYMS) or _one_stem(low_a, low_b):
        return "synonym"
    return "other"


def _word(token: str) -> str:
    """Letters and digits alone."""
    return "".join(c for c in token if c.isalnum())


def _one_stem(a: str, b: str) -> bool:
    """Whether two words begin alike for four letters and three fifths of the longer."""
    longest = max(len(a), len(b))
    alike = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a.isalpha() and b.isalpha() and alike >= 4 and 5 * alike >= 3 * longest
