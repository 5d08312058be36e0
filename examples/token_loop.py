"""The loop itself, on token ids: the engines of a pair, requests, a rule, one Step per target pass.

Rows of a batch advance at their own pace.
"""

from selfjudge import Margin, Pair, PairEngines, Request, decode

pair = Pair.load("smollm2-135m")
requests = [Request(pair.encode(text), 40) for text in ("Name three colours.", "What is 12 times 12?")]
answers = [[], []]
with PairEngines(pair).borrow() as engines:
    for step in decode(engines, requests, Margin(0.5), eos_ids=pair.eos_ids):
        for emission in step.emissions:
            answers[emission.row] += emission.tokens
            print(f"pass {step.cycle}, row {emission.row}: {pair.tokenizer.decode(emission.tokens)!r}")
print([pair.tokenizer.decode(tokens) for tokens in answers])
