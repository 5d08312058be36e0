"""Where models run: the device of a name, or the best there is. Of what is heavy this loads torch alone."""

from __future__ import annotations

import torch

from selfjudge.errors import SelfJudgeError, first_line


def choose_device(name: str | None) -> torch.device:
    """The device of that name, or the best there is."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # kernels are launched on the current device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise SelfJudgeError(f"`device` {name!r} cannot be used: {first_line(error)}") from None
    return device
