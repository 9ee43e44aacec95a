"""Depthwise causal convolution over a handful of tokens, given those tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from naju.scan.dispatch import state_dtype


class DepthwiseConv(nn.Module):
    """`sum_j weight[:, j] * past[j] (+ bias)`, summed in float32 or better; `past` comes oldest first."""

    def __init__(self, channels: int, width: int, *, bias: bool) -> None:
        super().__init__()
        bound = width**-0.5  # torch's own rule for a convolution that sees `width` inputs
        self.weight = nn.Parameter(torch.empty(channels, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound)) if bias else None

    def forward(self, past: Sequence[Tensor]) -> Tensor:
        dtype = state_dtype(past[0].dtype)
        taps = self.weight.to(dtype).unbind(-1)
        total = past[0].to(dtype) * taps[0] if self.bias is None else self.bias.to(dtype)
        for tap, u in list(zip(taps, past, strict=True))[self.bias is None :]:
            total = torch.addcmul(total, u.to(dtype), tap)
        return total
