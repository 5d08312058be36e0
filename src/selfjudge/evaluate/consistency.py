"""Factual consistency of a summary: FC = mean over its sentences of P(entailed) − P(contradicted) by its story. An NLI
classifier measures it, or the target itself by choosing between three letters: the proxy `fc_proxy`."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from selfjudge.engine.teacher_forced import logits_of, teacher_forced
from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.models.checkpoint import check_weights
from selfjudge.models.convert import quiet
from selfjudge.models.pair import Pair
from selfjudge.store import hub_options

DEFAULT_NLI = "microsoft/deberta-large-mnli"
BATCH = 16
LONGEST = 1024  # tokens of a story that the proxy reads
_QUESTION = (
    "Read the article, then the statement.\n\nArticle: {story}\n\nStatement: {sentence}\n\n"
    "Does the article (A) support the statement, (B) leave it open, or (C) contradict it? Answer with one letter."
)

Entails = Callable[[Sequence[tuple[str, str]]], list[float]]  # (story, sentence) pairs → P(entailed) − P(contradicted)


def split_sentences(text: str) -> list[str]:
    """Split a text at punctuation and at line ends; list marks are left out."""
    lines = (re.sub(r"^\s*(?:[-*•]|\d+[.)])\s+", "", line) for line in text.splitlines())
    ends = r"(?:(?<=[.!?])|(?<=[.!?][\"')\]]))\s+(?=[A-Z0-9\"'(])"
    return [part.strip() for line in lines for part in re.split(ends, line) if re.search(r"\w", part)]


def measure_consistency(entails: Entails, stories: Sequence[str], texts: Sequence[str]) -> list[float | None]:
    """FC of every text against its story; None for a text without a sentence."""
    split = [split_sentences(text) for text in texts]
    values = iter(entails([(story, part) for story, parts in zip(stories, split, strict=True) for part in parts]))
    return [sum(next(values) for _ in parts) / len(parts) if parts else None for parts in split]


def load_entailment(pair: Pair, nli: str, warn: Callable[[str], None]) -> tuple[Entails | None, str]:
    """What measures FC, and its name: an NLI model, `proxy` (the target; `auto` falls back to it) or `off`."""
    if nli == "off":
        return None, "off"
    if nli != "proxy":
        name = DEFAULT_NLI if nli == "auto" else nli
        try:
            return load_classifier(name, pair.target.device), name
        except SelfJudgeError as error:
            if nli != "auto":
                raise
            warn(f"{error}; the target itself judges factual consistency (fc_proxy)")
    return make_proxy(pair), "proxy"


def load_classifier(name: str, device: torch.device | str = "cpu") -> Entails:
    """An NLI classifier of transformers: a hub id or a folder."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

    try:
        with quiet():
            where = {} if Path(name).is_dir() else hub_options()
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **where)
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                name, trust_remote_code=False, output_loading_info=True, **where
            )
    except Exception as error:  # transformers raises many kinds for a missing, gated or malformed checkpoint
        raise SelfJudgeError(f"cannot load the NLI model {name}: {first_line(error)}") from None
    check_weights(model.eval(), {**loading, "unexpected_keys": ()}, name)  # heads of other tasks may lie beside its own
    labels = [str(label) for label in model.config.id2label.values()]
    entailed, contradicted = (
        next((label for label in labels if start in label.lower()), None) for start in ("entail", "contra")
    )
    if entailed is None or contradicted is None:
        raise SelfJudgeError(f"{name} is not an NLI model: its labels are {', '.join(labels)}")
    classify = pipeline(
        "text-classification", model=model, tokenizer=tokenizer, device=device, batch_size=BATCH, top_k=None,
        function_to_apply="softmax", truncation="longest_first", max_length=min(512, tokenizer.model_max_length),
    )  # fmt: skip

    def entails(pairs: Sequence[tuple[str, str]]) -> list[float]:
        with quiet():  # on a GPU it advises to use data sets
            found = classify([{"text": story, "text_pair": sentence} for story, sentence in pairs])
        shares = ({share["label"]: share["score"] for share in each} for each in found)
        return [p[entailed] - p[contradicted] for p in shares]

    return entails


def make_proxy(pair: Pair) -> Entails:
    """The target as classifier: its probabilities of the letters A (supported) and C (contradicted)."""
    pair.target_model.check_full_precision()
    letters = [pair.tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in "ABC"]

    def cut(story: str) -> str:
        ids = pair.tokenizer.encode(story, add_special_tokens=False)
        return story if len(ids) <= LONGEST else str(pair.tokenizer.decode(ids[:LONGEST]))

    @torch.no_grad()
    def entails(pairs: Sequence[tuple[str, str]]) -> list[float]:
        questions = [_QUESTION.format(story=cut(story), sentence=sentence) for story, sentence in pairs]
        prompts = pair.encode_many(questions)
        values = [0.0] * len(pairs)
        for part, hidden in teacher_forced(pair.target_model, [(ids, letters[:1]) for ids in prompts]):
            p = logits_of(pair.target, hidden)[:, letters].float().softmax(-1)
            for i, value in zip(part, (p[:, 0] - p[:, 2]).tolist(), strict=True):
                values[i] = value
        return values

    return entails
