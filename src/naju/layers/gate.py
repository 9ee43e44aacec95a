"""A gate's logit, `W h + DWConv(h) + bias`: what the forget and the write gate of a mixer are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from numbers import Real

import torch
from torch import Tensor, nn

from naju.layers.causal_conv import DepthwiseConv, convolve, weighted_sum
from naju.layers.layout import Layout

Bias = float | list[float] | tuple[float, float]


def check_bias(name: str, bias: Bias) -> None:
    """A number, which may be infinite (a gate that stays open or closed), or a pair of finite ones."""
    if isinstance(bias, (list, tuple)):
        if len(bias) != 2 or not all(isinstance(end, Real) and math.isfinite(end) for end in bias):
            raise ValueError(f"{name} must be a number or a pair of finite ones, but is {bias!r}")
    elif math.isnan(bias):
        raise ValueError(f"{name} must be a number, but is nan")


def starting_bias(bias: Bias, channels: int) -> Tensor:
    """The same for all channels, or, of a pair, from its first for the first channel evenly to its second."""
    if isinstance(bias, (list, tuple)):
        first, last = bias
        return torch.linspace(first, last, channels)
    return torch.full((channels,), float(bias))


class GateLogit(nn.Module):
    """The logit in float32 or better (a bfloat16 sum would round sigmoid(7) to 1).

    `rank` factors W into two thin matrices. `reparam` divides the logit by `sqrt(channels)` and starts every parameter
    that enters it linearly that much larger, so the function does not change at initialisation; the matching optimizer
    settings come from `naju.training.parameter_groups`.
    """

    def __init__(self, channels: int, width: int, *, bias: Bias, rank: int | None, reparam: bool) -> None:
        super().__init__()
        if rank is not None and rank < 1:
            raise ValueError(f"gate_rank must be a positive integer or None, but is {rank!r}")
        self.scale = channels**0.5 if reparam else 1.0
        self.reduce: nn.Module = nn.Identity() if rank is None else nn.Linear(channels, rank, bias=False)
        self.weight = nn.Linear(channels if rank is None else rank, channels, bias=False)
        self.conv = DepthwiseConv(channels, width, bias=False)
        self.bias = nn.Parameter(starting_bias(bias, channels))
        with torch.no_grad():
            for parameter in self.scaled_parameters():
                parameter.mul_(self.scale)

    def scaled_parameters(self) -> Iterator[Tensor]:
        """The parameters that are `scale` times those of the plain gate."""
        yield from (self.weight.weight, self.conv.weight, self.bias)

    def project(self, h: Tensor) -> Tensor:
        """W h"""
        return self.weight(self.reduce(h))  # type: ignore[no-any-return]

    def matrix(self) -> Tensor:
        """W, multiplied out, as it enters the logit."""
        weight = self.weight.weight
        return self.scaled(weight @ self.reduce.weight if isinstance(self.reduce, nn.Linear) else weight)

    def scaled(self, part: Tensor) -> Tensor:
        """A part of the sum as it enters the logit."""
        return part if self.scale == 1 else part / self.scale

    def step(self, h: Tensor, past: Sequence[Tensor]) -> Tensor:
        """The logit of one token, (b, d), from h and its recent past, oldest first and h last."""
        return self.scaled(self.project(h) + weighted_sum(past, self.conv.weight, self.bias))


def gate_logits(
    gates: Sequence[GateLogit], h: Tensor, tail: Tensor, layout: Layout, *, plain: bool = False
) -> list[Tensor]:
    """The logits of several gates on one h (b, l, d); `plain` is `convolve`'s."""
    weights, biases = [gate.conv.weight for gate in gates], [gate.bias for gate in gates]
    logits = convolve(h, tail, layout, weights, biases, [gate.project(h) for gate in gates], plain=plain)
    return [gate.scaled(logit) for gate, logit in zip(gates, logits, strict=True)]
