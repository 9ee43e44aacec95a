"""A device by the name that a person gives it."""

from __future__ import annotations

import torch


def usable_device(name: str) -> torch.device:
    """The device, after making sure that something can be put there; "auto" is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be a name such as cpu, cuda or cuda:1, but is {name!r}") from error
    if device.type == "meta":
        raise ValueError("device must be one that computes, but is 'meta', which only knows shapes")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # each backend has its own way to say it
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device {name!r} cannot be used here: {reason}") from error
    return device
