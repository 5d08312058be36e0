"""Answers token by token, for the report's viewer, and what was accepted in place of the target's choices."""

from collections import Counter
from collections.abc import Sequence

from selfjudge.models.pair import Pair, Prompt
from selfjudge.tasks.base import Row, join_messages
from selfjudge.types import Generation

KEPT_SUBSTITUTIONS = 50


def count_substitutions(answers: Sequence[Generation]) -> list[tuple[str, str, int]]:
    """(the target's choice, what was accepted, how often) in traced answers, the most frequent first."""
    pairs = Counter((token.target_text, token.text) for answer in answers for token in answer.judged_tokens)
    return [(choice, taken, n) for (choice, taken), n in pairs.most_common(KEPT_SUBSTITUTIONS)]


def make_example_row(pair: Pair, prompt: Prompt, answer: Generation) -> Row:
    """Prompt, text and tokens of an answer."""
    return {"prompt": join_messages(prompt), "text": answer.text, "tokens": make_token_rows(pair, answer)}


def make_token_rows(pair: Pair, answer: Generation) -> list[Row]:
    """Each token's text, origin and cycle; traced judged tokens add the choice, both probabilities and the score."""
    traced = {token.index: token for token in answer.judged_tokens}
    rows: list[Row] = []
    cycle = 0
    for k, (token, origin) in enumerate(zip(answer.tokens, answer.origins, strict=True)):
        row: Row = {"text": str(pair.tokenizer.decode([token], skip_special_tokens=True)), "origin": origin}
        if (seen := traced.get(k)) is not None:
            row |= {
                "choice": seen.target_text,
                "p": round(seen.probability, 4),
                "p_choice": round(seen.target_probability, 4),
                "judge": None if seen.score is None else round(seen.score, 4),
            }
        rows.append({**row, "cycle": cycle})
        cycle += origin == "target"
    return rows
