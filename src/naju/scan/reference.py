"""The plain loop over time: the definition. In float64 it is the truth that every other backend is measured against."""

from __future__ import annotations

import torch
from torch import Tensor

from naju.scan.dispatch import Backend
from naju.scan.frame import one_by_one, run_core


def _loop(f: Tensor, v: Tensor, B: Tensor, C: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    readings = []
    for f_t, v_t, B_t, C_t in zip(f.unbind(1), v.unbind(1), B.unbind(1), C.unbind(1), strict=True):
        x = f_t.unsqueeze(-1) * x + v_t.unsqueeze(-1) * B_t.unsqueeze(-2)  # (b, d, n)
        readings.append((x @ C_t.unsqueeze(-1)).squeeze(-1))  # (b, d)
    return torch.stack(readings, dim=1), x


_core = one_by_one(_loop)
REFERENCE = Backend(name="reference", run=lambda inputs: run_core(_core, inputs))
