"""An acceptance rule of your own is one class: here, the draft decides wherever the target is unsure."""

from dataclasses import dataclass

from selfjudge import AcceptanceRule, Pair, stream


@dataclass(frozen=True, eq=False)
class Unsure(AcceptanceRule):
    """Accept any draft where the target's best token has less than `below` of the probability."""

    name, summary = "unsure", "the target is unsure"
    below: float = 0.2

    def accepts(self, block, logits, aligned):  # [B, γ], logits [B, γ, V] predict the drafts, aligned = exact accepts
        return aligned | (logits.float().softmax(-1).amax(-1) < self.below)


for piece in stream(Pair.load("smollm2-135m"), "Tell me about the sea.", rule=Unsure(), gamma=3, max_new_tokens=48):
    print(f"[{piece.text}]" if piece.judged else piece.text, end="", flush=True)
print()
