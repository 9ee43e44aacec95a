"""Which pairs (retention, write) a recurrence `x_n = r_n x_{n-1} + w_n v_n` can choose at one token.

ZOH            r = exp(Δ A)      w = (exp(Δ A) - 1) B / A       one Δ for both: w = (1 - r) B / |A|
complementary  r = λ (1 - g)     w = g                          |r| + w <= 1 for |λ| <= 1
RG-LRU         r = a             w = sqrt(1 - a²) i             r² + w² <= 1
Naju           r = f             w = i                          the whole unit square
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from naju.analysis.checks import double, double_finite, positive_integer
from naju.scan import naju_scan


class Pair(NamedTuple):
    """What is kept of the state and how strongly the new value enters it."""

    retention: Tensor
    write: Tensor


def complementary_pair(g: Tensor | float, lam: Tensor | float = 1.0) -> Pair:
    """One gate for both: `x_n = (1 - g) λ x_{n-1} + g v_n`."""
    g = double("g", g, 0.0, 1.0)
    return Pair((1.0 - g) * double_finite("lam", lam), g)


def complementary_excess(retention: Tensor | float, write: Tensor | float) -> Tensor:
    """|r| + w - 1: never positive for a complementary gate over a transition |λ| <= 1, up to 1 for Naju."""
    return double("retention", retention).abs() + double("write", write) - 1.0


def zoh_pair(delta: Tensor | float, A: Tensor | float = -1.0, B: Tensor | float = 1.0) -> Pair:
    """The zero-order hold of `dx/dτ = A x + B u` over a step Δ >= 0: one number moves retention and write together."""
    delta, A, B = double("delta", delta, 0.0), double_finite("A", A), double_finite("B", B)
    flat = A == 0
    write = torch.where(flat, delta, torch.expm1(delta * A) / torch.where(flat, 1.0, A))
    return Pair(torch.exp(delta * A), write * B)


def zoh_small_step(delta: Tensor | float, A: Tensor | float = -1.0, B: Tensor | float = 1.0) -> Pair:
    """`zoh_pair` to first order in Δ, (1 + Δ A, Δ B): as the transition nears identity the write vanishes with it."""
    delta = double("delta", delta, 0.0)
    return Pair(1.0 + delta * double_finite("A", A), delta * double_finite("B", B))


def gated_rnn_limit(logit: Tensor | float) -> Pair:
    """`zoh_pair` with A = -1, B = 1 and Δ = softplus(logit); it equals (1 - sigmoid(logit), sigmoid(logit))."""
    logit = double("logit", logit)
    return zoh_pair(torch.logaddexp(logit, torch.zeros_like(logit)))


def rg_lru_pair(a: Tensor | float, gate: Tensor | float = 1.0) -> Pair:
    """Griffin's RG-LRU: the input gate acts inside an envelope, sqrt(1 - a²), that the retention sets."""
    a = double("a", a, 0.0, 1.0)
    return Pair(a, torch.sqrt((1.0 - a) * (1.0 + a)) * double("gate", gate, 0.0, 1.0))


def naju_pair(f_logit: Tensor | float, i_logit: Tensor | float) -> Pair:
    """Two logits, two gates."""
    return Pair(torch.sigmoid(double("f_logit", f_logit)), torch.sigmoid(double("i_logit", i_logit)))


def naju_logits(retention: Tensor | float, write: Tensor | float) -> tuple[Tensor, Tensor]:
    """The logits at which Naju has any wanted pair in [0, 1]²; on the square's edge they are infinite."""
    return double("retention", retention, 0.0, 1.0).logit(), double("write", write, 0.0, 1.0).logit()


@dataclass(frozen=True)
class Family:
    """A kind of recurrence: its largest write at a retention in [0, 1], and whether smaller writes are open to it."""

    label: str
    largest_write: Callable[[Tensor], Tensor]
    smaller_writes: bool


# ZOH with A = -1 and B = 1; another A or B only turns its line about the point (1, 0).
FAMILIES: Mapping[str, Family] = {
    "zoh": Family("ZOH SSM", lambda r: 1.0 - r, smaller_writes=False),
    "complementary": Family("complementary gate", lambda r: 1.0 - r, smaller_writes=True),
    "rg_lru": Family("RG-LRU", lambda r: rg_lru_pair(r).write, smaller_writes=True),
    "naju": Family("Naju", torch.ones_like, smaller_writes=True),
}


def largest_write(family: str, retention: Tensor | float) -> Tensor:
    """How strongly a family can write while it keeps `retention` of its state."""
    return _family(family).largest_write(double("retention", retention, 0.0, 1.0))


def reachable(family: str, retention: Tensor | float, write: Tensor | float, tolerance: float = 1e-12) -> Tensor:
    """Whether pairs belong to a family's closed set; `tolerance` is how far off rounding may have put them."""
    write = double("write", write, 0.0, 1.0)
    room = largest_write(family, retention) - write
    return room >= -tolerance if _family(family).smaller_writes else room.abs() <= tolerance


class ReadoutGrowth(NamedTuple):
    """RMS of the readout of a random memory at several state sizes, with alpha = 1 and with alpha = 1/sqrt(d_state)."""

    d_states: tuple[int, ...]
    unnormalised: Tensor
    normalised: Tensor

    @property
    def exponents(self) -> tuple[float, float]:
        """p in RMS ~ d_state^p, fitted to each: about 1/2 and about 0."""
        return _exponent(self.d_states, self.unnormalised), _exponent(self.d_states, self.normalised)


def readout_growth(
    d_states: Sequence[int] = (8, 16, 32, 64, 128, 256),
    *,
    generator: torch.Generator,
    batch: int = 16,
    length: int = 64,
    d_inner: int = 16,
) -> ReadoutGrowth:
    """Scan random drives with gates near the layer's initial biases and independent standard normal B and C."""
    if len(d_states) < 2:
        raise ValueError(f"d_states must hold at least two sizes to compare, but is {list(d_states)}")
    sizes = {"batch": batch, "length": length, "d_inner": d_inner}
    for name, size in [*sizes.items(), *(("d_states", n) for n in d_states)]:
        positive_integer(name, size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)

    rms: dict[float | None, list[Tensor]] = {1.0: [], None: []}
    for d_state in d_states:
        h, f_noise, i_noise = normal(3, batch, length, d_inner)
        B, C = normal(2, batch, length, d_state)
        for alpha, measured in rms.items():
            y, _ = naju_scan(h, 5.0 + f_noise, -2.0 + i_noise, B, C, alpha=alpha)
            measured.append(y.square().mean().sqrt())
    return ReadoutGrowth(tuple(d_states), torch.stack(rms[1.0]), torch.stack(rms[None]))


def _exponent(sizes: Sequence[int], rms: Tensor) -> float:
    """Least-squares slope of log RMS over log size."""
    x = torch.tensor([math.log(size) for size in sizes], dtype=torch.float64, device=rms.device)
    x = x - x.mean()
    return float((x @ rms.log()) / (x @ x))


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise ValueError(f"unknown family {name!r}; expected one of {', '.join(FAMILIES)}")
    return FAMILIES[name]
