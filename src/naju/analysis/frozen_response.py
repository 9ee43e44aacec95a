"""A layer around one token as a filter: with every gate held, each channel is a first-order one with one pole, f.

    x[n] = f x[n-1] + i B h[n]        H(z) = D + alpha i C·B / (1 - f z^-1) = ((D + gain) z - D f) / (z - f)
    y[n] = alpha C·x[n] + D h[n]      with gain = alpha i C·B

All coordinates of a channel's state share its gates, so the filter of a whole channel has one pole however large the
state is. Here z is the transform's variable, not the modulation of the layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from naju.analysis.checks import double, double_finite, positive_integer
from naju.analysis.observe import ScanRun


@dataclass(frozen=True)
class FrozenResponse:
    """The filters of c channels; f, gain and D have shape (c,)."""

    f: Tensor
    gain: Tensor  # alpha i C·B
    D: Tensor

    def __post_init__(self) -> None:
        double("f", self.f, 0.0, 1.0)
        for name in ("f", "gain", "D"):
            value = double_finite(name, getattr(self, name))
            if value.dim() != 1 or value.shape != self.f.shape:
                raise ValueError(f"f, gain and D must have one shape (channels,), but {name} has {tuple(value.shape)}")
            object.__setattr__(self, name, value)

    @property
    def pole(self) -> Tensor:
        return self.f

    @property
    def zero(self) -> Tensor:
        """D f / (D + gain): 0 without D, f (it cancels the pole) without gain, infinite where D = -gain, and NaN where
        the channel's response is 0 everywhere."""
        return self.D * self.f / (self.D + self.gain)

    def transfer(self, z: Tensor) -> Tensor:
        """H (c, k) at complex points z (k,)."""
        z = torch.as_tensor(z, dtype=torch.complex128, device="cpu")
        if z.dim() != 1:
            raise ValueError(f"z must have shape (points,), but has {tuple(z.shape)}")
        f, gain, D = (value.unsqueeze(1) for value in (self.f, self.gain, self.D))
        if (z == f).any():
            raise ValueError("z must not be a pole, but holds the forget gate of one of the channels")
        return ((D + gain) * z - D * f) / (z - f)

    def frequency_response(self, omega: Tensor) -> Tensor:
        """H (c, k) on the unit circle, at angles omega (k,) in radians a token; 0 is the response to a constant."""
        omega = double_finite("omega", omega)
        return self.transfer(torch.polar(torch.ones_like(omega), omega))

    def impulse_response(self, length: int) -> Tensor:
        """y (c, length) for h = 1, 0, 0, …: D + gain first, then gain f^k."""
        steps = torch.arange(positive_integer("length", length), dtype=torch.float64, device="cpu")
        response = self.gain.unsqueeze(1) * self.f.unsqueeze(1) ** steps
        response[:, 0] += self.D
        return response


def freeze(run: ScanRun, token: int) -> FrozenResponse:
    """The filters that a run's channels are while gates and directions stay as they are at `token`."""
    if not 0 <= token < run.length:
        raise ValueError(f"token must lie between 0 and {run.length - 1}, but is {token}")
    gain = run.alpha * run.i[:, token] * (run.C[token] @ run.B[token])
    return FrozenResponse(run.f[:, token], gain, run.D)


def horizon_pole(rho: float, length: int) -> float:
    """The smallest forget gate that leaves a share rho of a write after `length` tokens: rho^(1/length)."""
    return math.exp(_log_pole(rho, length))


def horizon_logit(rho: float, length: int) -> float:
    """The logit of `horizon_pole`, to be used as a forget bias; exact where the gate itself would round to 1."""
    log_f = _log_pole(rho, length)
    return log_f - math.log(-math.expm1(log_f))


def _log_pole(rho: float, length: int) -> float:
    if not 0.0 < rho < 1.0:
        raise ValueError(f"rho must lie strictly between 0 and 1, but is {rho!r}")
    return math.log(rho) / positive_integer("length", length)
