"""The tensors that scans are measured on: a layer's at its start, or one whose gates hold and seldom overwrite."""

from __future__ import annotations

import torch
from torch import Tensor

OVERWRITES = 0.05


def scan_inputs(
    batch: int,
    length: int,
    d_inner: int,
    d_state: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    overwrite_logit: float | None = None,
) -> dict[str, Tensor]:
    """Arguments of `naju_scan`. With `overwrite_logit` one forget logit in twenty has that value, as after training."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, mean: float = 0.0) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device) + mean

    wide, narrow = (batch, length, d_inner), (batch, length, d_state)
    f_logit, i_logit = draw(*wide, mean=5.0), draw(*wide, mean=-2.0)
    if overwrite_logit is not None:
        chosen = torch.rand(wide, generator=generator, device=device) < OVERWRITES
        f_logit = torch.where(chosen, overwrite_logit, f_logit)
    inputs = {"h": draw(*wide), "f_logit": f_logit, "i_logit": i_logit, "B": draw(*narrow), "C": draw(*narrow)}
    inputs |= {"D": draw(d_inner), "z": draw(*wide)}
    return {name: tensor.to(dtype) for name, tensor in inputs.items()}
