"""Pairs that vLLM starts and runs in seconds: a tiny one, and one that reads and writes text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.models.pull import checkpoint_folder

VOCAB = 61


LONGEST = ("tiny", "kernels", "embedded", "your_model", "shadow", "head", "label", "answers", "server")
"""Files of minutes, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that no worker has one left when the other has done its own."""
    order = {f"test_{name}.py": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a random pair whose heads can be split in two, and two judges for it."""
    root = tmp_path_factory.mktemp("tiny")
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(VOCAB - 4))]
    for name, seed, layers in (("target", 1, 2), ("draft", 2, 1)):
        torch.manual_seed(seed)
        config = hf.LlamaConfig(
            vocab_size=VOCAB, hidden_size=128, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=96, initializer_range=0.3, tie_word_embeddings=False,
            bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(root / name)
        inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        hf.PreTrainedTokenizerFast(
            tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        ).save_pretrained(root / name)
    torch.manual_seed(0)
    for features, extra in (("hidden", 0), ("hidden+margin+previous", 129)):
        settings = JudgeConfig(
            128,
            str(root / "target"),
            features=features,
            thresholds={"R": 0.5},
            quality_curve=((0.5, 0.25), (1.0, 0.75)),
        )
        weight = torch.cat([torch.randn(128), torch.linspace(0.1, 0.3, extra)])
        Judge(settings, weight).save_pretrained(root / features)
    return root


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that have the tokenizer and the chat template of the embedded pair: a random target, a draft that is
    nearly the target and agrees with it on half of the tokens, and a judge that accepts half of the others."""
    root = tmp_path_factory.mktemp("small")
    tokenizer = hf.AutoTokenizer.from_pretrained(checkpoint_folder("smollm2-135m"))
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.3, tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name in ("target", "draft"):
        model.half().save_pretrained(root / name)  # float32 is served in bfloat16, which some CPUs cannot multiply
        tokenizer.save_pretrained(root / name)
        for parameter in model.float().model.layers.parameters():
            if parameter.dim() == 2:
                parameter.data += 0.003 * torch.randn(parameter.shape)
    settings = JudgeConfig(
        128, str(root / "target"), thresholds={"R": 0.5}, quality_curve=((0.3, 0.25), (0.5, 0.5), (0.7, 0.75))
    )
    Judge(settings, torch.randn(128) / 30).save_pretrained(root / "judge")
    return root


@pytest.fixture(scope="session")
def tiny_pair(tiny: Path) -> Pair:
    return Pair.load(str(tiny / "target"), str(tiny / "draft"), device="cpu", dtype="float32")
