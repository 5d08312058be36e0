"""Tiny models of several architectures, and the real embedded pair."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here asks the hub; what is missing is missed at once
os.environ["SELFJUDGE_PAIR"] = "smollm2-135m"  # the small pair wherever a test names none

import atexit
import contextlib
import gc
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from selfjudge.store.files import home
from tiers import pytest_collection_modifyitems, pytest_runtest_call, pytest_runtest_protocol, pytest_runtestloop  # noqa: F401

gc.disable()  # until the first test: imports leave little garbage, and looking for it takes a sixth of their time
os.fsync = lambda file: None  # no test cuts the power, and disks are slow
LEDGER = Path(tempfile.gettempdir()) / f"selfjudge-ledger-{os.getpid()}" / "attempts.jsonl"
os.environ["SELFJUDGE_LEDGER"] = str(LEDGER)  # tests tune on the same prompts again and again


def _own_home() -> None:
    """A cache folder of this process: the models, heads and kernels are the user's, what passes cost is not."""
    own = Path(tempfile.mkdtemp(prefix="selfjudge-home-"))
    for name in ("models", "heads", "kernels"):
        (home() / name).mkdir(parents=True, exist_ok=True)
        (own / name).symlink_to((home() / name).resolve())
    os.environ["SELFJUDGE_HOME"] = str(own)
    atexit.register(shutil.rmtree, own, ignore_errors=True)


_own_home()

with contextlib.suppress(ImportError):  # vLLM's environment and GPU machines lack it
    from hypothesis import HealthCheck, settings

    # how long an example takes says how busy the machine is; fixtures that all examples share are meant
    settings.register_profile(
        "selfjudge", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    )
    settings.load_profile("selfjudge")

if TYPE_CHECKING:  # the process that hands out the tests needs no torch
    import transformers as hf

    from browser import Browser
    from selfjudge.integrations.server.operation import Metrics
    from selfjudge.models.eagle import EagleHead
    from selfjudge.models.pair import Pair
    from servers import Server

REFERENCE = pytest.param("reference", marks=[pytest.mark.slow, pytest.mark.versions])
"""The engine of transformers' own layers: quick tests compare it with a fresh forward, slow ones try it on the rest."""

VOCAB = 61
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,  # sharp distributions: greedy decoding without near-ties
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

# of each kind its configuration's class and what differs from the common options
CONFIGS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-mixed-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "mistral-window": ("MistralConfig", {"sliding_window": 6}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6}),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6, "sliding_window_pattern": 2},
    ),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96}),
}
_NOT_GPT2 = {
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "tie_word_embeddings",
}


def tiny_model(kind: str = "llama", seed: int = 0, **options: object) -> hf.PreTrainedModel:
    """A random model of a real architecture."""
    import torch
    import transformers as hf

    name, own = CONFIGS[kind]
    common = {k: v for k, v in _COMMON.items() if kind != "gpt2" or k not in _NOT_GPT2}
    torch.manual_seed(seed)
    config = getattr(hf, name)(**{**common, **own, **options})
    return hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def total(metrics: Metrics, name: str, **labels: str) -> float:
    """The sum of a server's counter over all labels, or over those that have these values."""
    found = metrics.registry.restricted_registry([f"selfjudge_{name}"]).collect()
    samples = [sample for metric in found for sample in metric.samples]
    return float(sum(sample.value for sample in samples if labels.items() <= sample.labels.items()))


def tiny_head(
    target: hf.PreTrainedModel, seed: int = 0, draft_vocab_size: int = 40, *, norm_before_residual: bool = False
) -> EagleHead:
    """A random EAGLE-3 head for a target, over some of its tokens."""
    from dataclasses import replace

    import torch

    from selfjudge.models.eagle import EagleConfig, EagleHead

    config = EagleConfig.for_target(target, draft_vocab_size)
    config = replace(config, norm_before_residual=norm_before_residual)
    random = torch.Generator().manual_seed(seed)
    head = EagleHead(config, torch.randperm(config.vocab_size, generator=random)[:draft_vocab_size].sort().values)
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn(p.shape, generator=random) * 0.3 + (1.0 if p.dim() == 1 else 0.0))
    return head.eval().requires_grad_(False).bind(target)


@pytest.fixture(autouse=True)
def first_attempt() -> Iterator[None]:
    """Every test is the first to tune on its prompts."""
    LEDGER.unlink(missing_ok=True)
    yield
    shutil.rmtree(LEDGER.parent, ignore_errors=True)


@pytest.fixture(params=sorted(CONFIGS))
def any_model(request: pytest.FixtureRequest) -> hf.PreTrainedModel:
    return tiny_model(request.param)


@pytest.fixture(scope="session")
def embedded() -> Pair:
    """The embedded pair in float32 on the CPU, pulled on first use."""
    from selfjudge.models.pair import Pair

    return Pair.load("smollm2-135m", device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def shipped() -> Pair:
    """The embedded pair as a user of a CPU has it: in four bits, which are loaded and run in less time."""
    from selfjudge.models.pair import Pair

    return Pair.load("smollm2-135m", device="cpu")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoint folders of tiny models with tokenizers: a matching pair, a padded draft, and a stranger."""
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers

    root = tmp_path_factory.mktemp("checkpoints")
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(VOCAB - 4))]

    def save(name: str, vocabulary: list[str], **options: object) -> str:
        inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, unk_token="<unk>"))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = hf.PreTrainedTokenizerFast(
            tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        )
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}w0"
        tiny_model("llama", **options).save_pretrained(root / name)  # type: ignore[arg-type]
        tokenizer.save_pretrained(root / name)
        return str(root / name)

    swapped = [*words[:-2], words[-1], words[-2]]
    return {
        "target": save("target", words, seed=1),
        "draft": save("draft", words, seed=2, num_hidden_layers=1),
        "padded-draft": save("padded-draft", words, seed=2, num_hidden_layers=1, vocab_size=VOCAB + 3),
        "stranger": save("stranger", swapped, seed=3),
    }


@pytest.fixture(scope="session")
def tiny_pair(checkpoints: dict[str, str]) -> Pair:
    from selfjudge.models.pair import Pair

    return Pair.load(checkpoints["target"], checkpoints["draft"], device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def head_folder(checkpoints: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head for the target of `checkpoints`."""
    from selfjudge.models.eagle import write_head
    from selfjudge.models.pair import Pair

    pair, folder = Pair.load(checkpoints["target"], device="cpu", needs_draft=False), tmp_path_factory.mktemp("head")
    head = tiny_head(pair.target)
    head.target, head.target_sha256 = pair.target_id, pair.target_sha256
    write_head(head, folder)
    return folder


@pytest.fixture(scope="session")
def head_pair(checkpoints: dict[str, str], head_folder: Path) -> Pair:
    from selfjudge.models.pair import Pair

    return Pair.load(checkpoints["target"], str(head_folder), device="cpu")


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Server]]:
    """Starts real servers, which end with the tests of a file."""
    from servers import servers

    with servers() as begin:
        yield begin


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    from browser import Browser

    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """Afterwards the page must not have complained, asked another host or been taken over."""
    chromium.complaints.clear()
    chromium.requests.clear()
    chromium.media("", "light")
    yield chromium
    assert chromium.run("window.hacked") is None
    assert chromium.complaints == []
    own = chromium.run("sessionStorage.clear(); location.origin")  # tests share the tab
    assert [url for url in chromium.requests if not url.startswith((own, "data:"))] == []


@pytest.fixture(scope="module")
def endless(checkpoints: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a pair whose answers do not end by themselves, with its judge."""
    from servers import endless_pair

    return endless_pair(checkpoints, tmp_path_factory.mktemp("endless"))


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 rows of 60 prompts that a linear judge can learn, with evidence for τ."""
    from fake_labels import label_folder

    return label_folder(tmp_path_factory.mktemp("labels") / "straight", evidence=400)
