"""The memory of a layer on an input: how much of each write is left later, and how much of it is read.

For one channel, with `R[n, m] = f_{m+1} … f_n`, what is left at token n of a write at token m,

    K[n, m] = alpha R[n, m] i_m C_n·B_m                                 for m <= n, else 0
    y_n     = alpha f_1 … f_n C_n·x_0 + sum_m K[n, m] h_m + D h_n       before silu(z)

Everything here is in float64 and R grows by products, one token at a time: no logarithm, no difference of sums, so
gates of exactly 0 or 1 are as exact as any others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from naju.analysis.checks import double
from naju.analysis.observe import ScanRun

LARGEST_BYTES = 2**31


class Decomposition(NamedTuple):
    """The three parts of a layer's output before silu(z), (c, l) each."""

    initial: Tensor  # what is still read of the initial state
    memory: Tensor  # K h: what is read of the tokens' writes, the current token's own included
    feedthrough: Tensor  # D h

    @property
    def total(self) -> Tensor:
        return self.initial + self.memory + self.feedthrough


class EffectiveMemory(NamedTuple):
    """How far back a channel looks, by the share of |K| at each lag n - m, summed over all n."""

    lag: Tensor  # (c,), int64: the smallest lag k such that lags 0 … k hold the asked share of the mass
    mean_lag: Tensor  # (c,): the mean of the lag, weighted by mass
    mass: Tensor  # (c, l): the mass at each lag


def retention_products(f: Tensor) -> Tensor:
    """R (..., l, l) of forget gates f (..., l) in [0, 1]: 1 on the diagonal, 0 above it."""
    f = double("f", f, 0.0, 1.0)
    if f.dim() == 0 or f.shape[-1] == 0:
        raise ValueError(f"f must have shape (..., length) with a length of at least 1, but has {tuple(f.shape)}")
    length = f.shape[-1]
    size = 8 * f.numel() * length
    if size > LARGEST_BYTES:
        raise ValueError(
            f"f has shape {tuple(f.shape)}, and its {length} x {length} products would take {size / 2**30:.1f} GiB; "
            "choose fewer channels or a shorter input"
        )
    return torch.stack([F.pad(row, (0, length - row.shape[-1])) for row in _retention_rows(f)], dim=-2)


def memory_kernel(run: ScanRun) -> Tensor:
    """K (c, l, l): row n is what the output at token n takes from each token's drive."""
    return run.alpha * retention_products(run.f) * run.i.unsqueeze(-2) * (run.C @ run.B.T)


def decompose(run: ScanRun) -> Decomposition:
    """The output before silu(z) as initial-state term, kernel times drive, and feedthrough."""
    initial = run.alpha * run.f.cumprod(1) * (run.x0 @ run.C.T)
    memory = (memory_kernel(run) @ run.h.unsqueeze(-1)).squeeze(-1)
    return Decomposition(initial, memory, run.D.unsqueeze(-1) * run.h)


def retention_to_end(run: ScanRun) -> Tensor:
    """(c, l): what is left of each token's write after the last token, the last row of R."""
    later = F.pad(run.f[:, 1:], (0, 1), value=1.0)
    return later.flip(1).cumprod(1).flip(1)


def lag_mass(run: ScanRun) -> Tensor:
    """(c, l): sum over n of |K[n, n - k]| at every lag k, in memory linear in length."""
    mass = torch.zeros_like(run.h)
    for n, left in enumerate(_retention_rows(run.f)):
        row = run.alpha * left * run.i[:, : n + 1] * (run.B[: n + 1] @ run.C[n])
        mass[:, : n + 1] += row.abs().flip(1)
    return mass


def effective_memory(run: ScanRun, share: float = 0.9) -> EffectiveMemory:
    """How far back each channel looks on this input.

    Neither number can pass length - 1, and long lags have fewer pairs (n, m) than short ones: compare inputs of one
    length. A channel whose kernel is zero everywhere looks nowhere, and both its numbers are 0.
    """
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share must lie in (0, 1], but is {share!r}")
    mass = lag_mass(run)
    within = mass.cumsum(1)
    total = within[:, -1]
    lag = (within < share * total.unsqueeze(1)).sum(1)
    weighted = mass @ torch.arange(run.length, dtype=torch.float64, device=mass.device)
    return EffectiveMemory(lag, torch.where(total > 0, weighted / total, 0.0), mass)


def tau_e(f: Tensor | float) -> Tensor:
    """Tokens after which a write has decayed to 1/e under a constant gate, 1/(-log f): 0 for f = 0, inf for f = 1."""
    return 1.0 / double("f", f, 0.0, 1.0).log().abs()


def tau_e_from_logit(f_logit: Tensor | float) -> Tensor:
    """`tau_e(sigmoid(f_logit))` where the sigmoid itself would round: at logit 40 it is 1, and tau is e^40."""
    return 1.0 / F.logsigmoid(double("f_logit", f_logit)).abs()


def _retention_rows(f: Tensor) -> Iterator[Tensor]:
    """Row n of R up to its diagonal, (..., n + 1), for n = 0, 1, …"""
    one = torch.ones_like(f[..., :1])
    left = one[..., :0]
    for n in range(f.shape[-1]):
        left = torch.cat([f[..., n : n + 1] * left, one], dim=-1)
        yield left
