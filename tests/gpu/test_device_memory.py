"""Memory on a real device: what loading takes of host and device, the limit, and requests that do not fit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from conftest import VOCAB, tiny_model
from selfjudge.decoding import prefill
from selfjudge.decoding.admission import AdmissionQueue, Request
from selfjudge.decoding.loop import decode
from selfjudge.decoding.rules import Exact
from selfjudge.engine.cuda.engine import CudaEngine
from selfjudge.engine.draft import BatchEngines
from selfjudge.engine.select import make_draft, make_engine
from selfjudge.models.device import free_memory, limit_memory
from selfjudge.models.memory import measure_need
from selfjudge.models.pair import Pair
from selfjudge.types import Step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")
LOAD = """
import json, re, sys, torch
from pathlib import Path
from transformers import AutoConfig
from selfjudge.engine.cuda.engine import CudaEngine
from selfjudge.models import load

def host(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

torch.zeros(1, device="cuda").add_(1)
torch.cuda.synchronize()
config, before = AutoConfig.from_pretrained(sys.argv[1]), host("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
model, _ = load._load_model(Path(sys.argv[1]), config, torch.bfloat16, torch.device("cuda"), {})
loaded, peak = torch.cuda.memory_allocated(), host("VmHWM") - before
torch.cuda.reset_peak_memory_stats()
CudaEngine(model)
print(json.dumps({"host": peak, "loaded": loaded, "fused": torch.cuda.memory_allocated(),
                  "reserved": torch.cuda.max_memory_reserved(), "count": model.num_parameters()}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 1.4 GB in four shards."""
    folder = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=10, num_attention_heads=16,
        num_key_value_heads=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -0.02, 0.02)
    model.save_pretrained(folder, max_shard_size="400MB")
    return folder


def test_loading_takes_little_of_the_host_and_the_weights_once_of_the_device(large: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", LOAD, str(large)], capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    weights = 2 * found["count"]
    assert weights > 1_200_000_000
    assert found["host"] < weights // 2, found
    assert weights <= found["loaded"] < 1.02 * weights, found
    assert found["fused"] < 1.02 * weights, found
    assert found["reserved"] < 1.3 * weights, found


def test_eight_bits_are_dequantised_on_the_device(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    import shutil

    folder = tmp_path / "fp8"
    shutil.copytree(checkpoints["target"], folder)
    tensors = load_file(folder / "model.safetensors")
    expected = {}
    for name in [name for name in tensors if "_proj." in name]:
        stored, scale = (tensors[name] * 4).to(torch.float8_e4m3fn), torch.tensor(0.25)
        expected[name] = (stored.float() * 0.25).bfloat16()
        tensors |= {name: stored, f"{name}_scale": scale}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))
    target = Pair.load(str(folder), device="cuda", needs_draft=False).target
    weights = dict(target.named_parameters())
    assert all(weights[name].is_cuda and torch.equal(weights[name].cpu(), tensor) for name, tensor in expected.items())


@pytest.fixture
def no_limit() -> Iterator[None]:
    """The whole device again after the test."""
    yield
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("no_limit")
def test_a_limit_is_kept_and_known() -> None:
    torch.cuda.empty_cache()
    limit_memory(CUDA, "3GB")
    free = free_memory(CUDA)
    assert free is not None
    assert 1e9 < free < 3.01e9
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(int(3.2e9), dtype=torch.uint8, device=CUDA)
    kept = torch.empty(10**9, dtype=torch.uint8, device=CUDA)
    assert free_memory(CUDA) == pytest.approx(free - 1e9, abs=1e8)
    del kept


def run(requests: list[Request], length: int, rows: int = 4) -> tuple[list[Step], BatchEngines]:
    models = [tiny_model(seed=n, hidden_size=64, max_position_embeddings=4096).to(CUDA) for n in (1, 2)]
    used = BatchEngines(make_engine(models[0], kind="cuda"), make_draft(models[1], models[0], kind="cuda"))
    queue = AdmissionQueue(rows, length)
    for request in requests[1:]:
        queue.put(request)
    return list(decode(used, requests[:1], Exact(), gamma=3, queue=queue)), used


def tokens_of(steps: list[Step], row: int) -> list[int]:
    return [token for step in steps for e in step.emissions if e.row == row for token in e.tokens]


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


REQUESTS = [Request(prompt_of(n, n), 40) for n in (20, 30, 900, 25, 12)]


def test_caches_that_grow_between_captured_cycles_change_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = run(REQUESTS, 1000)
    monkeypatch.setattr(prefill, "START_TOKENS", 200)
    steps, used = run(REQUESTS, 1000)
    assert used.target.rows_held(940) >= 4
    for row in range(len(REQUESTS)):
        assert tokens_of(steps, row) == tokens_of(whole, row)


def test_out_of_memory_in_a_prompt_gives_one_row_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator itself fails, in the pass of the long prompt."""
    whole, _ = run(REQUESTS, 1000)
    read = CudaEngine.prefill

    def short_of_memory(self: CudaEngine, tokens, counts):
        if tokens.shape[1] > 400:
            torch.empty(1 << 50, dtype=torch.uint8, device=CUDA)
        return read(self, tokens, counts)

    monkeypatch.setattr(CudaEngine, "prefill", short_of_memory)
    steps, _ = run(REQUESTS, 1000)
    assert [row for step in steps for row in step.out_of_memory] == [2]
    for row in (0, 1, 3, 4):
        assert tokens_of(steps, row) == tokens_of(whole, row)


@pytest.mark.usefixtures("no_limit")
def test_rows_wait_under_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, used = run(REQUESTS, 1000)
    row = sum(engine.row_bytes(1003) for engine in used.static_engines)
    monkeypatch.setattr("selfjudge.engine.draft.free_memory", lambda _: int(2.5 * row / 0.8))
    steps, used = run(REQUESTS, 1000)
    assert used.target.cache_bytes <= 2 * used.target.row_bytes(1003)
    for row_number in range(len(REQUESTS)):
        assert tokens_of(steps, row_number) == tokens_of(whole, row_number)


def test_the_estimate_holds_what_was_reserved(large: Path) -> None:
    """Weights and cache of the estimate are those of the device."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = LlamaForCausalLM.from_pretrained(large, dtype=torch.bfloat16, trust_remote_code=False).to(CUDA)
    need = measure_need(model, "bfloat16", "cuda")
    assert torch.cuda.memory_allocated() - before == pytest.approx(need.weights, rel=0.02)
    engine = CudaEngine(model)
    engine.reserve(8, 4000)
    assert engine.cache_bytes == pytest.approx(8 * 4096 * need.token, rel=0.01)
    assert engine.cache_bytes <= 8 * need.row(4000)
