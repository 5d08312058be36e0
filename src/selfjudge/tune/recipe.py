"""The recipe: which rule at which γ for which pair, and its certificate. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfjudge.errors import SelfJudgeError
from selfjudge.store import read_json, sha256
from selfjudge.store.artefacts import Certificate, RecipeFile

if TYPE_CHECKING:
    from selfjudge.models.pair import Pair

RECIPE, CERTIFICATE, JUDGE = "recipe.json", "certificate.json", "judge"
FORMAT = 1


@dataclass(frozen=True)
class Recipe:
    """A recipe in its folder."""

    folder: Path
    content: dict[str, Any]
    certificate: dict[str, Any]

    @classmethod
    def load(cls, folder: str | Path) -> Recipe:
        """The recipe of a folder that `tune` has finished. Refused if its judge is not the one it was made with."""
        folder = Path(folder).expanduser()
        if not (folder / RECIPE).is_file():
            unfinished = (folder / "settings.json").is_file()
            hint = "its tuning is not finished: give `resume`" if unfinished else "selfjudge tune makes one"
            raise SelfJudgeError(f"{folder} has no {RECIPE}: {hint}")
        content = read_json(folder / RECIPE, RecipeFile)
        recipe = cls(folder, content, read_json(folder / content["certificate"], Certificate))
        for key in ("rule", "gamma", "prompts_sha256"):
            if recipe.certificate[key] != content[key]:
                raise SelfJudgeError(f"{folder}: the certificate is of another {key}: it does not belong to the recipe")
        if recipe.judge is not None and sha256(recipe.judge / "model.safetensors") != content["judge_sha256"]:
            raise SelfJudgeError(f"{recipe.judge} is not the judge that this recipe was certified with")
        return recipe

    @property
    def rule(self) -> str:
        return str(self.content["rule"])

    @property
    def gamma(self) -> int:
        return int(self.content["gamma"])

    @property
    def judge(self) -> Path | None:
        """The folder of its judge, if its rule has one."""
        name = self.content["judge"]
        return None if name is None else self.folder / name

    @property
    def draft(self) -> str | None:
        """The draft's reference; None if it is the target's own."""
        content = self.content
        return None if content["pair"] == content["target"] else str(content["draft"])

    def check(self, pair: Pair, warn: Callable[[str], None]) -> None:
        """Refuse another target or draft; warn if the certificate was measured with another dtype."""
        self.check_models(target=(pair.target_id, pair.target_sha256), draft=(pair.draft_id, pair.draft_sha256))
        if pair.dtype != self.content["dtype"]:
            warn(f"{self.folder} was certified with {self.content['dtype']}, this is {pair.dtype}: not covered by it")

    def check_models(self, **models: tuple[str, str]) -> None:
        """Refuse another `target` or `draft`, each given by its name and its hash."""
        for role, (name, digest) in models.items():
            known = self.content[f"{role}_sha256"]
            if known != digest if known and digest else self.content[role] != name:
                raise SelfJudgeError(
                    f"{self.folder} is a recipe for the {role} {self.content[role]} (sha256 {known[:12] or 'unknown'}),"
                    f" not for {name} ({digest[:12] or 'unknown'}): tune this pair"
                )


def make_recipe(pair: Pair, certificate: Mapping[str, Any], judge: Path | None) -> dict[str, Any]:
    """The content of recipe.json, for a certificate and the folder of the judge, if the rule has one."""
    recipe: dict[str, Any] = {
        "format_version": FORMAT,
        "pair": pair.name,
        "target": pair.target_id,
        "draft": pair.draft_id,
        "target_sha256": pair.target_sha256,
        "draft_sha256": pair.draft_sha256,
        "judge_sha256": None if judge is None else sha256(judge / "model.safetensors"),
        **{name: certificate[name] for name in ("prompts_sha256", "rule", "gamma")},
        "judge": None if judge is None else judge.name,
        "certificate": CERTIFICATE,
        **{name: certificate[name] for name in ("engine", "dtype", "draft_dtype")},
    }
    return {**recipe, "flags": {"selfjudge": _describe_options(recipe), "vllm": None}}


def _describe_options(recipe: Mapping[str, Any]) -> str:
    """The options of our commands that do what --recipe does, in the recipe's folder."""
    own = recipe["pair"] == recipe["target"]
    models = f"--pair {recipe['pair']}" if own else f"--target {recipe['target']} --draft {recipe['draft']}"
    judge = f" --judge {recipe['judge']}" if recipe["judge"] else ""
    draft_dtype = f" --draft-dtype {recipe['draft_dtype']}" if recipe["draft_dtype"] else ""
    return f"{models} --rule {recipe['rule']} --gamma {recipe['gamma']}{judge}{draft_dtype}"
