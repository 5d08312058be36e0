"""What else a judge might read: `python benchmarks/judge_features.py --labels DIR --pair P --out FILE`.

From a folder of labels: the state after the draft token is what a judge reads. Beside it stand, one at a time and all together,
the state before it (which predicts it), the embeddings of both tokens, states of the layers that EAGLE-3 heads read, the state of a small model that drafts, the target's
entropy, log-probability and rank. ROC-AUC on the mismatches of the holdout's prompts, as `benchmarks/study.py` measures it; labels stay as they are.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import say
from numpy.typing import NDArray
from study import SOME_C
from torch import Tensor
from transformers import PreTrainedModel

from selfjudge.engine.teacher_forced import choose_width, sdpa_without_cudnn
from selfjudge.judge.config import JudgeConfig
from selfjudge.label.folder import read_shards
from selfjudge.models.eagle import auxiliary_layers
from selfjudge.models.pair import Pair
from selfjudge.store import measured_on, read_rows, write_json
from selfjudge.train.dataset import LabelledRows
from selfjudge.train.holdout import roc_auc
from selfjudge.train.pipeline import fit_linear, predict

TOKENS = {"cuda": 131072}  # of a pass


@dataclass(frozen=True)
class Place:
    """A draft token, the target's own there, and the text before them."""

    before: tuple[int, ...]
    token: int
    own: int


@dataclass(eq=False)
class Wider(LabelledRows):
    """Rows whose features are followed by other columns."""

    extra: Tensor = field(default_factory=lambda: torch.empty(0, 0))

    def read_also(self, columns: Sequence[Tensor]) -> None:
        self.extra = torch.cat([torch.empty(len(self), 0), *(c.float().reshape(len(self), -1) for c in columns)], 1)
        self.hidden_size = int(self.manifests[0]["hidden_size"]) + self.extra.shape[1]

    def _feature(self, number: int, name: str, device: torch.device | None) -> Tensor:
        hidden = super()._feature(number, name, device)
        if name != "hidden_draft":
            return hidden
        return torch.cat([hidden.float(), self.extra[self.shards[number].rows].to(hidden.device)], 1)


def places(folder: Path) -> tuple[list[Place], dict[str, NDArray[Any]]]:
    """Every row's place, and the small columns that are stored."""
    texts = {
        row["prompt_id"]: (*row["prompt_ids"], *row["response_ids"]) for row in read_rows(folder / "responses.jsonl")
    }
    all_places: list[Place] = []
    small: dict[str, list[NDArray[Any]]] = {"entropy": [], "rank": [], "log_p": []}
    for rows, arrays in read_shards(folder):
        all_places += [
            Place(texts[row["prompt_id"]][: row["position"]], row["draft_token"], row["target_token"]) for row in rows
        ]
        for name, parts in small.items():
            parts.append(arrays[name])
    return all_places, {name: np.concatenate(parts) for name, parts in small.items()}


@torch.no_grad()
def states(model: Any, wanted: Sequence[Place], layers: Sequence[int] = ()) -> dict[str, Tensor]:
    """`before` and `after` the token [n, H] after the final norm, and after it the inputs of some layers, by number."""
    device = model.device
    order = sorted(range(len(wanted)), key=lambda i: -len(wanted[i].before))
    names = ("before", "after", *map(str, layers))
    rows_of = {name: torch.zeros(len(wanted), model.config.hidden_size) for name in names}
    most = TOKENS.get(device.type, 4096)
    while order:
        wide = choose_width(len(wanted[order[0]].before) + 1, device)
        part, order = order[: max(1, most // wide)], order[max(1, most // wide) :]
        ids = torch.zeros(len(part), wide, dtype=torch.long)
        for row, i in enumerate(part):
            ids[row, : len(wanted[i].before) + 1] = torch.tensor([*wanted[i].before, wanted[i].token])
        with sdpa_without_cudnn():
            seen = model.base_model(input_ids=ids.to(device), use_cache=False, output_hidden_states=bool(layers))
        rows = torch.arange(len(part), device=device)
        last = torch.tensor([len(wanted[i].before) for i in part], device=device)
        rows_of["before"][part] = seen.last_hidden_state[rows, last - 1].float().cpu()
        rows_of["after"][part] = seen.last_hidden_state[rows, last].float().cpu()
        for layer in layers:
            rows_of[str(layer)][part] = seen.hidden_states[layer][rows, last].float().cpu()
    return rows_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--labels", type=Path, required=True)
    parser.add_argument("--pair", default="smollm2-135m")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--margin-limit", type=float, default=None, help="as of `selfjudge train`")
    parser.add_argument("--device", default=None)
    o = parser.parse_args()
    begun = time.monotonic()
    pair = Pair.load(o.pair, device=o.device, full_precision=True)
    rows = Wider.load([o.labels])
    rows = rows if o.margin_limit is None else rows.limit_margin(o.margin_limit)
    wanted, small = places(o.labels)
    low, middle, high = layers = auxiliary_layers(pair.target.config.num_hidden_layers)
    target = states(pair.target, wanted, layers)
    draft = states(pair.draft, wanted)["after"] if isinstance(pair.draft, PreTrainedModel) else None
    log_p = torch.from_numpy(small["log_p"]).float()
    numbers = torch.stack(
        [torch.from_numpy(small["entropy"]).float(), torch.from_numpy(small["rank"]).float().log1p(), log_p[:, 1]], 1
    )
    table = pair.target.get_input_embeddings().weight.detach()
    tokens = [
        table[torch.tensor(ids, device=table.device)].float().cpu()
        for ids in zip(*((p.token, p.own) for p in wanted), strict=True)
    ]
    groups: dict[str, list[Tensor]] = {
        "": [],
        "entropy, rank, log-probability": [numbers],
        "preceding state": [target["before"]],
        "embeddings of both tokens": tokens,
        "middle layer": [target[str(middle)]],
        "high layer": [target[str(high)]],
        "three layers": [target[str(layer)] for layer in layers],
    }
    groups |= {} if draft is None else {"draft's state": [draft]}
    everything = [numbers, target["before"], *tokens, target[str(low)], target[str(middle)], target[str(high)]]
    groups["all of these"] = everything if draft is None else [*everything, draft]
    say(f"states of {len(rows)} rows")
    device = pair.target.device if pair.target.device.type == "cuda" else None
    result: dict[str, Any] = {
        "pair": pair.name, "labels": int(rows.used.sum()), "holdout": int(rows.of("holdout").sum()),
        "acceptable": float(rows.labels[rows.used].mean()), **measured_on(),
        "dtype": pair.dtype, "margin_limit": o.margin_limit, "C_grid": list(SOME_C), "runs": [],
    }  # fmt: skip
    for name, columns in groups.items():
        rows.read_also(columns)
        config = JudgeConfig(rows.hidden_size, features="hidden+margin")
        fitted = fit_linear(rows, config, device=device, grid=SOME_C)
        auc = roc_auc(*predict(rows, fitted.judge, rows.of("holdout"), device=device))
        row: dict[str, Any] = {"beside": name, "columns": rows.hidden_size + 1, "linear": auc}
        result["runs"].append(row)
        say(row)
        write_json(o.out, {**result, "seconds": round(time.monotonic() - begun, 1)})


if __name__ == "__main__":
    main()
