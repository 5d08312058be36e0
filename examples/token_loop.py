"""The loop itself, on token ids: an engine, a draft, a rule, one Step per target pass.

Rows of a batch advance at their own pace.
"""

from selfjudge import Margin, Pair, decode, make_draft, make_engine

pair = Pair.load("smollm2-135m")
prompts = [pair.encode(text) for text in ("Name three colours.", "What is 12 times 12?")]
answers = [[], []]
for step in decode(
    make_engine(pair.target),
    make_draft(pair.draft, pair.target),
    prompts,
    Margin(0.5),
    max_new_tokens=40,
    eos_ids=pair.eos_ids,
):
    for emission in step.emissions:
        answers[emission.row] += emission.tokens
        print(f"pass {step.cycle}, row {emission.row}: {pair.tokenizer.decode(emission.tokens)!r}")
print([pair.tokenizer.decode(tokens) for tokens in answers])
