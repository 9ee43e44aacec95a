"""What the pure-torch backends share: gates, direction, packing and readout around a core that scans left to right."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

from naju.scan.dispatch import ScanInputs, state_dtype

# A core maps f, v (b, l, d), B, C (b, l, n), the initial state and the packed boundaries (None: the whole length)
# to the reading m_t = x_t C_t (b, l, d) and the final state. All tensors have the precision of the state.
Core = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, list[int] | None], tuple[Tensor, Tensor]]


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """The products of a scan are never done in half precision; the meta device knows no autocast at all."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def gate(logit: Tensor) -> Tensor:
    """sigmoid(logit) whose derivative keeps its digits near 1, where torch's (1 - f) has only rounding errors left."""
    return torch.where(logit > 0, 1 - torch.sigmoid(-logit), torch.sigmoid(logit))


def after_token(state: Tensor, f_logit: Tensor, write: Tensor) -> Tensor:
    """`f * state + write`, (b, d, n), for f_logit (b, d). From f = 1/2 up as `state + (write - (1 - f) * state)`: a
    gate rounded near 1, and a product rounded before the write is added, would drift over a hundred thousand tokens."""
    keeps = f_logit > 0
    lost = torch.where(keeps, torch.sigmoid(-f_logit), -torch.sigmoid(f_logit)).unsqueeze(-1)
    return torch.addcmul(torch.addcmul(write, lost, state, value=-1), keeps.to(state.dtype).unsqueeze(-1), state)


def readout(m: Tensor, h: Tensor, alpha: float, D: Tensor | None, z: Tensor | None) -> Tensor:
    """`alpha * m + D * h`, times silu(z) where given, in the precision of h."""
    y = alpha * m
    if D is not None:
        y = y + D.to(m.dtype) * h.to(m.dtype)
    if z is not None:
        y = y * F.silu(z.to(m.dtype))
    return y.to(h.dtype)


def run_core(core: Core, inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """A whole scan by a core that knows neither direction nor readout."""
    dtype = state_dtype(inputs.h.dtype)
    f = gate(inputs.f_logit.to(dtype))
    v = gate(inputs.i_logit.to(dtype)) * inputs.h.to(dtype)
    drive = (f, v, inputs.B.to(dtype), inputs.C.to(dtype))
    state = inputs.initial_state
    boundaries = None if inputs.cu_seqlens is None else inputs.cu_seqlens.tolist()
    if not inputs.reverse:
        m, state = core(*drive, state, boundaries)
    else:  # the mirrored sequence from left to right; packed sequences come in the opposite order
        f, v, B, C = (tensor.flip(1) for tensor in drive)
        if boundaries is None:
            m, state = core(f, v, B, C, state, None)
        else:
            m, state = core(f, v, B, C, state.flip(0), [boundaries[-1] - end for end in reversed(boundaries)])
            state = state.flip(0)
        m = m.flip(1)
    return readout(m, inputs.h, inputs.alpha, inputs.D, inputs.z), state


def one_by_one(core: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Core:
    """Packing for a core that knows a single sequence: scan each on its own, so that nothing can cross a boundary."""

    def packed(
        f: Tensor, v: Tensor, B: Tensor, C: Tensor, state: Tensor, boundaries: list[int] | None
    ) -> tuple[Tensor, Tensor]:
        if boundaries is None:
            return core(f, v, B, C, state)
        readings, states = [], []
        for row, (left, right) in enumerate(itertools.pairwise(boundaries)):
            x = state[row : row + 1]
            if left < right:
                m, x = core(f[:, left:right], v[:, left:right], B[:, left:right], C[:, left:right], x)
                readings.append(m)
            states.append(x)
        return torch.cat(readings, dim=1), torch.cat(states)

    return packed
