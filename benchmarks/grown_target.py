"""A target that costs what a larger one costs, with the function of a small one. `python benchmarks/grown_target.py --layers 40 --out FOLDER`.

No 8B weights are needed to learn what decoding at that size costs: acceptance, accuracy and certificates of the small target
hold for the grown one up to rounding. Every matrix is twice as wide: outputs are copied, inputs are copied and count half, so
every hidden vector is [x; x], and norms see the same mean square. Heads are doubled in the same order, so their groups stay.
The last norm is halved, because both halves meet the output matrix. Further layers have output projections of zero and add
nothing. An EAGLE-3 head grows likewise, and reads the same states where they stand now. FOLDER gets an ordinary checkpoint
in shards, and the head beside it, in `FOLDER/head`.
`gamma_auto.py --grown 40` grows on the device and times decoding; `whole_line.py` runs everything else on FOLDER.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from selfjudge.models.eagle import EagleHead, write_head
from selfjudge.models.load import Draft, Target
from selfjudge.models.pair import Pair

DOUBLED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
FAMILIES = ("llama", "qwen2")


def places(small: int, large: int) -> list[int]:
    """Where each of `small` layers stands among `large` ones."""
    return [round((i + 1) * large / small) - 1 for i in range(small)]


def widen(weight: Tensor, parts: int = 1) -> Tensor:
    """Twice as wide, with the same function of [x; x]; of concatenated inputs each of the `parts` is doubled."""
    if weight.dim() == 1:
        return torch.cat([weight, weight])
    columns = torch.cat([torch.cat([part, part], 1) * 0.5 for part in weight.chunk(parts, 1)], 1)
    return torch.cat([columns, columns])


@torch.no_grad()
def grow_target(small: PreTrainedModel, layers: int) -> PreTrainedModel:
    """The same function, twice as wide and with so many layers, on the same device."""
    config = small.config
    if config.model_type not in FAMILIES:
        raise SystemExit(f"models of type {config.model_type} cannot be grown, only {' and '.join(FAMILIES)}")
    if layers < config.num_hidden_layers:
        raise SystemExit(f"--layers must be at least {config.num_hidden_layers}, what the target has")
    grown = copy.deepcopy(config)
    grown.num_hidden_layers = layers
    grown.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in DOUBLED:
        setattr(grown, name, 2 * getattr(config, name))
    if getattr(grown, "layer_types", None):
        grown.layer_types = [grown.layer_types[0]] * layers
    with torch.device(small.device):
        large = (
            AutoModelForCausalLM.from_config(grown, dtype=small.dtype, trust_remote_code=False)
            .eval()
            .requires_grad_(False)
        )
    old, new, where = small.base_model, large.base_model, places(config.num_hidden_layers, layers)
    new.embed_tokens.weight.copy_(torch.cat([old.embed_tokens.weight] * 2, 1))
    new.norm.weight.copy_(widen(old.norm.weight) * 0.5)
    if not grown.tie_word_embeddings:
        large.lm_head.weight.copy_(torch.cat([small.lm_head.weight] * 2, 1))
    for j, layer in enumerate(new.layers):
        i = next(i for i, place in enumerate(where) if place >= j)
        for name, weight in old.layers[i].named_parameters():
            layer.get_parameter(name).copy_(widen(weight))
        if where[i] != j:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight.zero_()
                if projection.bias is not None:
                    projection.bias.zero_()
    return large


@torch.no_grad()
def grow_head(head: EagleHead, target: PreTrainedModel, where: Sequence[int]) -> EagleHead:
    """The head for the grown target, whose old layers stand at `where`."""
    config = head.config
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    layer = LlamaConfig(**config.layer.to_dict() | {name: 2 * getattr(config.layer, name) for name in names})
    grown = EagleHead(
        replace(config, layer=layer, aux_layers=tuple(where[i] for i in config.aux_layers)), head.draft_ids.cpu()
    )
    state = {}
    for name, weight in head.state_dict().items():
        parts = (
            3 if name == "fc.weight" else 2 if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) else 1
        )
        state[name] = (widen(weight, parts) * (0.5 if name == "norm.weight" else 1)).cpu()
    grown.load_state_dict(state)
    return grown.eval().requires_grad_(False).bind(target)


def grow(pair: Pair, layers: int) -> Pair:
    """The pair with a grown target; a head grows with it, another draft stays."""
    large = grow_target(pair.target, layers)
    draft = pair.draft_model
    if isinstance(pair.draft, EagleHead):
        draft = Draft(grow_head(pair.draft, large, places(pair.target.config.num_hidden_layers, layers)))
    return replace(pair, name=f"{pair.name}, grown", target_model=Target(large), draft_model=draft)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pair", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", default=None, help="of the pair; the one that ships if none is given")
    parser.add_argument("--layers", type=int, required=True, help="40 make 8.4 B parameters of the 1.5 B")
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shard", default="5GB", help="most of one file")
    parser.add_argument("--out", type=Path, required=True)
    o = parser.parse_args()
    pair = grow(Pair.load(o.pair, o.draft, device=o.device, dtype=o.dtype), o.layers)
    pair.target.save_pretrained(o.out, max_shard_size=o.shard)
    pair.tokenizer.save_pretrained(o.out)
    if isinstance(pair.draft, EagleHead):
        (o.out / "head").mkdir(exist_ok=True)
        write_head(pair.draft, o.out / "head", verifier=str(o.out.resolve()))
    print(f"{sum(p.numel() for p in pair.target.parameters()) / 1e9:.2f} B parameters: {o.out}")


if __name__ == "__main__":
    main()
