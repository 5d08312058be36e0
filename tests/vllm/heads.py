"""A head that is made without training: it has learnt a few answers by heart, and all its parts have a say."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from selfjudge.models.eagle import EagleConfig, EagleHead, captured_states
from selfjudge.models.pair import Pair

SIZE = (
    0.25  # of the state that makes the head propose a token: attention and feed-forward layer add three times as much
)
RIDGE = 1e-3


@torch.no_grad()
def memorised(pair: Pair, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> EagleHead:
    """A head whose first proposal after each token of these answers is mostly right.

    Its first matrix is fitted by ridge regression to give, of the target's states at t, the output row of the token at
    t+2; its layer is random. So it is right only where it is given the states that it was fitted to, and what it
    proposes then depends on its norms, rotary positions and maps.
    """
    target = pair.target
    output = target.get_output_embeddings().weight.detach()
    ids = sorted({*range(0, len(output), 5), *(token for answer in answers for token in answer)})
    config = EagleConfig.for_target(target, len(ids), 128)
    head = EagleHead(config, torch.tensor(ids)).requires_grad_(False)
    random = torch.Generator().manual_seed(0)
    spread = 0.96 * config.hidden_size**-0.5  # so that the layer adds as much at any width
    for p in head.parameters():
        p.copy_(torch.randn(p.shape, generator=random) * (spread if p.dim() == 2 else 0.1) + (p.dim() == 1))
    seen, wanted = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        text = [*prompt, *answer]
        with captured_states(target, config.aux_layers) as states:
            target.base_model(torch.tensor([text]))
        seen.append(torch.cat(states, -1)[0, len(prompt) - 1 : -2])
        wanted.append(output[text[len(prompt) + 1 :]])
    x, y = torch.cat(seen).double(), torch.cat(wanted).double()
    scale = x.square().mean(0).sqrt()
    x, y = x / scale, SIZE * y / y.square().mean(-1, keepdim=True).sqrt()
    products = x @ x.T
    products.diagonal().mul_(1 + RIDGE)
    head.fc.weight.copy_(torch.linalg.solve(products, y).T @ x / scale)
    return head.bind(target, pair.target_sha256, pair.target_id)
