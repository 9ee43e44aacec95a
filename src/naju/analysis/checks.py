"""Numbers in, float64 tensors out, and a sentence where a number cannot mean what it should."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def double(name: str, value: Tensor | float, low: float = -math.inf, high: float = math.inf) -> Tensor:
    """`value` on the CPU in float64, after checking that all of it lies in [low, high]; a NaN lies nowhere."""
    if not isinstance(value, Tensor | float | int) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number or a tensor, but is {type(value).__name__}")
    exact = torch.float64
    tensor = value.detach().cpu() if isinstance(value, Tensor) else torch.tensor(value, dtype=exact, device="cpu")
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise TypeError(f"{name} must be real, but is {str(tensor.dtype).removeprefix('torch.')}")
    tensor = tensor.to(exact)
    outside = ~((tensor >= low) & (tensor <= high))
    if outside.any():
        raise ValueError(f"{name} must lie in [{low:g}, {high:g}], but holds {tensor[outside][0].item():g}")
    return tensor


def double_finite(name: str, value: Tensor | float) -> Tensor:
    """`value` on the CPU in float64, after checking that all of it is finite."""
    largest = torch.finfo(torch.float64).max
    return double(name, value, -largest, largest)


def positive_integer(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, but is {value!r}")
    return value
