"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, position: Tensor, base: float = 10_000.0) -> Tensor:
    """Turn pairs of channels of x (b, heads, l, c) by angles that grow with `position` (b, l)."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = (position.unsqueeze(-1).float() * frequency).unsqueeze(1)  # (b, 1, l, c/2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
