"""The files that runs write, as schemas: every file is read through one of these, for it may come from anywhere.

Keys that are not declared here may be there as well. Whoever writes a file adds its keys here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from selfjudge.store.schema import Pattern, Range

Count = Annotated[int, Range(0)]
Share = Annotated[float, Range(0, 1)]
Score = Annotated[float, Range(-1, 1)]  # factual consistency may be negative
Difference = Annotated[float, Range(-2, 2)]
Amount = Annotated[float, Range(0)]
Width = Annotated[int, Range(1, 1 << 20)]
HeadCount = Annotated[int, Range(1, 1 << 16)]
VocabSize = Annotated[int, Range(1, 1 << 31)]
GammaLength = Annotated[int, Range(0, 1000)]
PositiveGamma = Annotated[int, Range(1, 1000)]
Sha256 = Annotated[str, Pattern("[0-9a-f]{64}", "a sha256")]
_NAME = r"[A-Za-z0-9_][\w.~-]{0,200}"
FileName = Annotated[str, Pattern(_NAME, "the name of a file in this folder")]
SealedFile = Annotated[str, Pattern(f"(work/)?{_NAME}", "the name of a file in this folder")]
TaskLabel = Annotated[str, Pattern(r"[^./\\\x00-\x1f][^/\\\x00-\x1f]{0,200}", "the name of a task")]
Packed = Annotated[str, Pattern("[0-9*. -]*", "numbers, such as '466*0 1 -0.25'")]
InnerPath = Annotated[str, Pattern(f"{_NAME}(/{_NAME})*", "a path in this folder")]


class Seal(TypedDict):
    """`work/NAME.json`: a part of a run is whole."""

    files: dict[SealedFile, Sha256]
    made_from: str


class PromptsSeal(Seal):
    yields: dict[str, Any]


class CalibrationSeal(Seal):
    tau: float


class LabelShard(Seal):
    rows: Count
    acceptable: Count
    target_tokens: NotRequired[Count]
    response_tokens: NotRequired[Count]
    searched: NotRequired[Count]
    controls: NotRequired[Count]
    controls_kept: NotRequired[Count]


class TauEvidence(TypedDict):
    reject_recall: NotRequired[Share]


class LabelManifest(TypedDict):
    """`manifest.json` of a label folder."""

    format_version: Literal[1]
    target: str
    draft: str
    target_sha256: str
    draft_sha256: str
    dtype: NotRequired[str]
    hidden_size: Width
    hidden_dtype: NotRequired[str]
    layer: Literal["final"]
    norm: Literal["post_final_norm"]
    method: str
    suffix_length: Annotated[int, Range(0, 1 << 16)]
    tau: float | None
    tau_evidence: NotRequired[TauEvidence | None]
    rows: Count
    acceptable: Count
    prompts: Count
    target_tokens: NotRequired[Count]
    response_tokens: NotRequired[Count]
    yields: NotRequired[dict[str, Any]]
    controls: NotRequired[Count]
    controls_kept: NotRequired[Count]
    shards: list[LabelShard]
    files: dict[FileName, Sha256]


class LabelRow(TypedDict):
    prompt_id: str
    source: str
    position: Count
    target_token: Count
    draft_token: Count
    score: float
    label: Literal[0, 1]
    control: NotRequired[Literal[0, 1] | None]
    margin: NotRequired[float]


class LabelPrompt(TypedDict):
    """A row of `work/prompts.jsonl`."""

    prompt_id: str
    source: str
    prompt_ids: list[Count]


class Response(LabelPrompt):
    """A row of `responses.jsonl`."""

    response_ids: list[Count]
    finish: NotRequired[str]


class EvaluationSummary(TypedDict):
    """`summary.json` of one run on one task. Reports show optional keys where they are present."""

    task: TaskLabel
    rule: str
    gamma: GammaLength
    n: Count
    score: Score | None
    pair: NotRequired[str]
    judge: NotRequired[str | None]
    judge_id: NotRequired[Sha256 | None]
    measure: NotRequired[str | None]
    score_ci: NotRequired[tuple[Difference, Difference] | None]
    scores: NotRequired[dict[str, Score]]
    delta_score: NotRequired[Difference | None]
    delta_ci: NotRequired[tuple[Difference, Difference] | None]
    delta_scores: NotRequired[dict[str, Difference]]
    delta_scores_ci: NotRequired[dict[str, tuple[Difference, Difference]]]
    agreement: NotRequired[Share | None]
    agreement_ci: NotRequired[tuple[Share, Share] | None]
    lost: NotRequired[Count | None]
    gained: NotRequired[Count | None]
    lost_ci: NotRequired[tuple[Share, Share] | None]
    gained_ci: NotRequired[tuple[Share, Share] | None]
    mean_accepted_length: NotRequired[Amount | None]
    delta_m: NotRequired[float | None]
    delta_m_ci: NotRequired[tuple[float, float] | None]
    m_ratio: NotRequired[Amount | None]
    m_ratio_ci: NotRequired[tuple[float, float] | None]
    drafts_accepted: NotRequired[Amount | None]
    judged_share: NotRequired[Share | None]
    tokens_per_second: NotRequired[Amount | None]
    busy: NotRequired[str]
    extraction_failures: NotRequired[Share | None]
    cut_off: NotRequired[Share | None]
    threshold: NotRequired[Share | None]
    label_method: NotRequired[str | None]
    features: NotRequired[str | None]
    suffix_length: NotRequired[Count | None]
    label_prompts: NotRequired[Count | None]
    batch: NotRequired[Count | None]
    max_new_tokens: NotRequired[Count | None]
    seconds: NotRequired[dict[str, Amount] | None]
    substitutions: NotRequired[list[tuple[str, str, Count]] | None]
    dtype: NotRequired[str | None]
    machine: NotRequired[dict[str, Any] | None]
    versions: NotRequired[dict[str, Any] | None]
    date: NotRequired[str | None]
    commit: NotRequired[str | None]


class FinishedSummary(EvaluationSummary):
    """`summary.json`, as an evaluation reads it that is resumed."""

    run_sha256: str
    compared_with: str | None


class ScoredSample(TypedDict):
    """A row of `samples.jsonl.gz`."""

    id: str
    tokens: Count
    cycles: Count
    agrees: NotRequired[Share | None]
    answer: str | None
    score: Score | None
    scores: dict[str, Score]
    finish: Literal["eos", "length", "stop"]
    emitted: Count
    drafts_accepted: Count
    judged: Count
    text: NotRequired[str]


class PartSample(ScoredSample):
    """A row of a part of a run, before the parts are joined."""

    text: str  # type: ignore[misc]
    token_ids: list[Count]
    origins: Annotated[str, Pattern("[djt]*", "letters of origins")]


class PartSeal(Seal):
    seconds: dict[str, Amount]
    load: NotRequired[tuple[float, float, float]]


class ExampleToken(TypedDict):
    origin: Literal["draft", "judge", "target"]
    text: NotRequired[str | None]
    choice: NotRequired[str | None]
    p: NotRequired[Share | None]
    p_choice: NotRequired[Share | None]
    judge: NotRequired[Share | None]
    cycle: NotRequired[Count | None]


class AnswerExample(TypedDict):
    """A row of `examples.jsonl`."""

    id: str
    prompt: NotRequired[Any]
    score: NotRequired[Score | None]
    tokens: list[ExampleToken]


class TrainingPrompts(TypedDict):
    """`prompts.json` of a judge: the first digits of the keys of the prompts it was trained on."""

    prompts: list[Annotated[str, Pattern("[0-9a-f]{16}", "16 digits of a sha256")]]


class TunedSpeed(TypedDict):
    """Tokens per second of a rule and γ, measured or estimated before the tests of `tune`."""

    rule: str
    gamma: GammaLength
    tokens_per_second: Amount
    estimated: NotRequired[bool]


class SpeedSeal(Seal):
    speeds: list[TunedSpeed]
    busy: NotRequired[str]


class AttemptSeal(Seal):
    id: str
    earlier: NotRequired[list[str]]


class LedgerRow(TypedDict):
    """A line of `attempts.jsonl` in the cache folder: prompts that rules of a target were tested on."""

    id: str
    date: str
    target: str
    prompts: list[Annotated[str, Pattern("[0-9a-f]{16}", "16 digits of a sha256")]]


class CertificateCandidate(TypedDict):
    """A rule that `tune` tried."""

    rule: str
    family: str
    gamma: PositiveGamma
    n_used: Count
    refuted: bool
    why: str
    differences: Packed
    mean_difference: Difference | None
    lost: Count
    gained: Count
    mean_accepted_length: Amount | None
    tokens_per_second: Amount | None
    speed_ratio: Amount | None
    speed_ci: tuple[Amount, Amount] | None
    needed_prompts: Count | None


class ExactScore(TypedDict):
    """Score of `exact` on the prompts that were tried."""

    n: Count
    score: Score | None
    without_answer: Count | None
    cut_off: NotRequired[Count | None]
    """Outputs without an answer that ended at the length limit."""


class OverlapBound(TypedDict):
    """Share of the words of `exact` that a rule lost on the calibration prompts."""

    losses: Packed
    mean: Share
    bound: Share


class BetEvidence(TypedDict):
    """The course of the bet that certified a rule."""

    delta: Share
    refuted_at: Count
    p_value: Share
    goal: Amount
    log_capital: list[tuple[Count, float]]
    lost_bound: Share


class Certificate(TypedDict):
    """`certificate.json`: what was claimed of a rule, and the evidence."""

    format_version: Literal[2]
    pair: str
    task: str
    measure: Literal["score", "same_answer", "overlap"]
    rule: str
    resolved: str
    gamma: PositiveGamma
    n: Count
    epsilon: Share
    delta: Share
    certified: bool
    mean_difference: Difference | None
    mean_difference_ci: tuple[Difference, Difference] | None
    lost: Count
    gained: Count
    exact: NotRequired[ExactScore]
    groups: Packed
    similar: Share
    attempt: Annotated[int, Range(1, 1 << 20)]
    earlier_attempts: list[str]
    evidence: BetEvidence | None
    overlap: OverlapBound | None
    speed_measure: Literal["tokens_per_second", "mean_accepted_length"]
    speed_ratio: Amount | None
    speed_ci: tuple[Amount, Amount] | None
    exact_over_plain: Amount | None
    unreliable: NotRequired[str]
    families: list[str]
    candidates: list[CertificateCandidate]
    target_sha256: str
    draft_sha256: str
    tokenizer_sha256: Sha256
    prompts_sha256: Sha256
    engine: str
    dtype: str
    draft_dtype: Literal["int8"] | None
    versions: dict[str, Any]
    date: str
    stopped: bool


class RecipeFlags(TypedDict):
    selfjudge: str
    vllm: str | None


class RecipeFile(TypedDict):
    """`recipe.json`: the rule that `tune` chose, and for what it is."""

    format_version: Literal[2]
    pair: str
    target: str
    draft: str
    target_sha256: str
    draft_sha256: str
    tokenizer_sha256: Sha256
    prompts_sha256: Sha256
    rule: str
    resolved: str
    gamma: PositiveGamma
    judge: FileName | None
    engine: str
    dtype: str
    draft_dtype: Literal["int8"] | None
    flags: RecipeFlags
    files: dict[InnerPath, Sha256]
    digest: Sha256


class RecipeSignature(TypedDict):
    """`signature.json`: an Ed25519 signature of a recipe's digest."""

    public_key: str
    signature: str


class RunRecord(TypedDict, total=False):
    """`run.json`: the command that made a folder, when and on what."""

    argv: list[str]
    commit: str | None
    time: str
    versions: dict[str, Any]
    machine: dict[str, Any]
    seconds: dict[str, Amount] | Amount
    rows_per_hour: Amount
    tasks: list[str] | None
    runs: list[str] | None
    earlier: list[Any]
    target: str


class TaskRecord(TypedDict, total=False):
    """`task.json` of an evaluation."""

    nli: str


class ReportRecord(TypedDict):
    """`report.json` beside a page."""

    figures: NotRequired[list[str]]


class PullManifest(TypedDict):
    """`manifest.json` of an embedded model in the cache."""

    sha256: Sha256
    draft_sha256: Sha256 | None
    files: dict[InnerPath, Sha256]


class ShippedTau(TypedDict):
    tau: float


class TensorIndex(TypedDict):
    """`model.safetensors.index.json` of a checkpoint: the file of each tensor."""

    weight_map: dict[str, FileName]


class TauFile(TypedDict):
    """`tau.json` of a draft that ships."""

    draft_sha256: str
    tau: dict[str, ShippedTau]


class DistillPrompt(TypedDict):
    """A row of `work/prompts.jsonl` of a distillation."""

    source: str
    ids: list[Count]
    answers: Count
    held_out: bool


class Message(TypedDict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str


class PromptRow(TypedDict, total=False):
    """A line of a file of prompts: `prompt` or `messages`."""

    prompt: str | None
    messages: list[Message] | None


class TaskRow(PromptRow, total=False):
    """A line of a user's file: a prompt, and `answer` or a `check` in Python where it can be scored; prompts of one
    `group` depend on one another, and count once in a certificate.

    Other columns may be null, as tools write them; an answer that is null is none, and is left out.
    """

    id: str | int | None
    answer: str | float
    check: str | None
    group: str | int | None
    split: Literal["train", "test"] | None
