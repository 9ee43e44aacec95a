"""Rotary position embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rotate(x: Tensor, position: Tensor, base: float = 10_000.0) -> Tensor:
    """Turn pairs of channels of x (b, heads, l, c) by angles that grow with `position` (b, l).

    Float32 would have lost a thousandth of a turn at position 10,000: angles are float64, where the device has it.
    """
    half = x.shape[-1] // 2
    exact = torch.float32 if x.device.type == "mps" else torch.float64
    frequency = base ** (-torch.arange(half, device=x.device, dtype=exact) / half)
    angle = (position.unsqueeze(-1).to(exact) * frequency % (2 * math.pi)).unsqueeze(1)  # (b, 1, l, c/2)
    if x.dtype != torch.float64:
        angle = angle.float()
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
