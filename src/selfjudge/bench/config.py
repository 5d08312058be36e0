"""Settings of measurements. Imports no torch, so that the command line can check its options at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from selfjudge.types import MAX_GAMMA, Gamma, setting


@dataclass(frozen=True)
class DecodeBenchConfig:
    """`bench decode`: which configurations are timed, and how often."""

    gammas: tuple[Gamma, ...] = setting(
        (1, 2, 3, 4, 6, "auto"), "Draft lengths to try.", minimum=1, maximum=MAX_GAMMA, word="auto"
    )
    max_new_tokens: int = setting(64, "Most tokens an answer may have.", minimum=1)
    repeats: int = setting(3, "Repeats of the whole round.", minimum=1)
    peers: bool = setting(True, "Time transformers as well; without, our own plain decoding is the baseline.")


@dataclass(frozen=True)
class DemoConfig:
    """`demo`: how much is decoded by each rule."""

    small: bool = setting(False, "Leave out the large model (1.1 GB) and the gain on it.")
    turns: int = setting(3, "Turns of plain, exact and relaxed on the large model.", minimum=1)
    limit: int = setting(6, "How many of the built-in prompts.", minimum=1)
    max_new_tokens: int = setting(64, "Most tokens an answer may have.", minimum=1)
    labels: bool = setting(True, "Label and train a small judge first.")
    quick: bool = setting(False, "The shortest demo: two turns, two prompts of 48 tokens, no labels, no checkpoints.")

    @property
    def as_asked(self) -> DemoConfig:
        """The config, cut down for the quick demo."""
        if not self.quick:
            return self
        limit, tokens, turns = min(self.limit, 2), min(self.max_new_tokens, 48), min(self.turns, 2)
        return replace(self, limit=limit, max_new_tokens=tokens, turns=turns, labels=False)
