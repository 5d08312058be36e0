"""The fastest rule that is certified to lose at most 20 points on prompts like these, and the certificate."""

from pathlib import Path
from tempfile import TemporaryDirectory

from selfjudge import Pair, generate
from selfjudge.report.certificate import describe_claim, describe_verdict
from selfjudge.tune import TuneConfig, tune_pair

pair = Pair.load("smollm2-135m")
config = TuneConfig(
    tasks=("arithmetic",), limit=24, epsilon=0.2, families=("margin",), gamma=3, max_new_tokens=32, minutes=1
)
with TemporaryDirectory() as folder:
    recipe = tune_pair(pair, Path(folder) / "tuned", config, warn=print)
    for row in recipe.certificate["candidates"]:
        print(row["rule"], "|", row["why"])
    print(describe_verdict(recipe.certificate), describe_claim(recipe.certificate), sep="\n\n")
    print(generate(pair, "Why is the sky blue?", rule=recipe.rule, gamma=recipe.gamma, max_new_tokens=32).text)
