"""An answer with the judge that ships, and every token that it took against the target's choice."""

from selfjudge import Pair, generate

pair = Pair.load("smollm2-135m")
answer = generate(pair, "Why is the sky blue?", rule="judged", quality=0.8, gamma=3, max_new_tokens=64)
print(answer.text)
print(f"{answer.mean_accepted_length:.2f} tokens per target pass, {answer.tokens_per_second:.1f} tokens/s")
for token in answer.judged_tokens:
    wanted = f"{token.target_text!r} (p = {token.target_probability:.2f})"
    print(f"{token.text!r} for {wanted}, judge's score {token.score:.2f}")
