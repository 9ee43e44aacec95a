"""The norm of each head's channels that follows a matrix memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from naju.scan.dispatch import state_dtype


class HeadNorm(nn.Module):
    """RMS norm over the last axis, or layer norm with `center`; computed and returned in float32 or better.

    The weight has `shape`: (c,) for one that all heads share, (heads, c) for one a head.
    """

    def __init__(self, *shape: int, center: bool = False, bias: bool = False, eps: float = 1e-5) -> None:
        super().__init__()
        self.center, self.eps = center, eps
        self.weight = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(shape)) if bias else None

    def forward(self, o: Tensor) -> Tensor:
        o = o.to(state_dtype(o.dtype))
        if self.center:
            o = o - o.mean(-1, keepdim=True)
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return o if self.bias is None else o + self.bias
