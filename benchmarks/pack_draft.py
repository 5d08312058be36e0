"""Pack what `distill` made as the package ships it: `python benchmarks/pack_draft.py --run DIR --out FOLDER`.

Of a small model the layers and projections, from the checkpoint of its training (`work/train.safetensors`): matrices as
int8 rows with a float32 scale each, the rest in float16. Of a head the matrices as int8 with a float16 scale for each 32
weights, norms in float16, without the rows of the target's output matrix.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from selfjudge.models.catalogue import is_head
from selfjudge.models.checkpoint import quantise
from selfjudge.models.eagle import COMPACT
from selfjudge.store import write_json


def pack_student(tensors: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path) -> int:
    """Write a small model as `models.convert.read_compact_draft` reads it; the bytes of its tensors."""
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            rows = tensor.detach().float().cpu()
            scale = (rows.abs().amax(1, keepdim=True) / 127).clamp_min(1e-30)
            packed[name] = (rows / scale).round().clamp(-127, 127).to(torch.int8)
            packed[f"{name}.scale"] = scale.squeeze(1).contiguous()
        else:
            packed[name] = tensor.detach().half().cpu().contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(packed, folder / "draft.safetensors")
    write_json(folder / "config.json", dict(config))
    return (folder / "draft.safetensors").stat().st_size


def pack_head(source: Path, folder: Path) -> int:
    """Write the head of a folder as `models.eagle` reads compact ones; the bytes of its tensors."""
    tensors = load_file(source / "model.safetensors")
    packed: dict[str, Tensor] = {}
    for name in sorted(tensors.keys() - {"lm_head.weight", "d2t", "t2d"}):
        packed[name] = tensors[name].half()
        if tensors[name].dim() == 2:
            packed[name], packed[f"{name}.scale"] = quantise(tensors[name])
    config = json.loads((source / "config.json").read_text())
    ids = torch.arange(config["draft_vocab_size"])
    packed["draft_ids"] = (ids + tensors.get("d2t", 0)).int()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(packed, folder / COMPACT)
    write_json(folder / "config.json", config)
    return (folder / COMPACT).stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path, required=True, help="the folder of a distillation")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    o = parser.parse_args()
    if is_head(o.run):
        size = pack_head(o.run, o.out)
    else:
        arrays = load_file(o.run / "work" / "train.safetensors")
        best = {name.removeprefix("best."): array for name, array in arrays.items() if name.startswith("best.")}
        size = pack_student(best, json.loads((o.run / "config.json").read_text()), o.out)
    print(f"{size / 1e6:.1f} MB: {o.out}")


if __name__ == "__main__":
    main()
