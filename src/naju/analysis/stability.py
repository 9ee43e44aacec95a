"""The fading-memory and bounded-output theorem, evaluated on a run.

For a channel whose forget logits stay below A_max, with rho = sigmoid(A_max) < 1, ‖i_n h_n B_n‖ <= M_v, ‖C_n‖ <= M_C
and |h_n| <= M_h (2-norms over the state),

    ‖x_n‖ <= rho^n ‖x_0‖ + M_v / (1 - rho)          |y_n| <= |alpha| M_C (the same) + |D| M_h

The constants are the smallest that the run allows, so a bound that fails means a scan that is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from naju.analysis.observe import ScanRun
from naju.scan import naju_step


@dataclass(frozen=True, kw_only=True)
class StabilityReport:
    """Bounds beside what happened, for each channel after each of the tokens 1 … l."""

    rho: Tensor  # (c,)
    state_bound: Tensor  # (c, l)
    state_norm: Tensor  # (c, l)
    output_bound: Tensor  # (c, l), of y before silu(z)
    output_norm: Tensor  # (c, l)

    @property
    def state_slack(self) -> Tensor:
        return self.state_bound - self.state_norm

    @property
    def output_slack(self) -> Tensor:
        return self.output_bound - self.output_norm

    @property
    def holds(self) -> bool:
        """Whether every bound holds, up to a rounding error for each of the l steps and a few for the norms."""
        rounding = 1.0 + (self.state_norm.shape[1] + 8) * torch.finfo(torch.float64).eps
        state = self.state_norm <= self.state_bound * rounding
        output = self.output_norm <= self.output_bound * rounding
        return bool(state.all() and output.all())


def stability_report(run: ScanRun) -> StabilityReport:
    """The theorem's bounds with the constants of this run, and the norms that `naju_step` really produces."""
    highest = run.f_logit.amax(1)  # (c,)
    unbounded = [number for number, logit in zip(run.channels, highest.tolist(), strict=True) if logit == torch.inf]
    if unbounded:
        raise ValueError(f"f_logit must be bounded by a finite number, but is +inf in channel {unbounded[0]}")
    state_bound = _state_bound(run, highest)
    feedthrough = run.D.abs() * run.h.abs().amax(1)
    output_bound = abs(run.alpha) * run.C.norm(dim=1).max() * state_bound + feedthrough.unsqueeze(1)
    state_norm, output_norm = _norms(run)
    return StabilityReport(
        rho=torch.sigmoid(highest),
        state_bound=state_bound,
        state_norm=state_norm,
        output_bound=output_bound,
        output_norm=output_norm,
    )


def _state_bound(run: ScanRun, highest: Tensor) -> Tensor:
    writes = (run.i * run.h).abs() * run.B.norm(dim=1)  # (c, l)
    M_v = writes.amax(1)
    # 1 - rho = sigmoid(-A_max) keeps its digits near 0, and 0/0 (no write, a pole that rounds to 1) is no write.
    limit = torch.where(M_v > 0, M_v / torch.sigmoid(-highest), 0.0)
    steps = torch.arange(1, run.length + 1, dtype=torch.float64, device="cpu")
    fading: Tensor = torch.sigmoid(highest).unsqueeze(1) ** steps * run.x0.norm(dim=1, keepdim=True)
    return fading + limit.unsqueeze(1)


def _norms(run: ScanRun) -> tuple[Tensor, Tensor]:
    """‖x_n‖ and |y_n|, (c, l) each, token by token through the operator itself."""
    x, states, outputs = run.x0.unsqueeze(0), [], []
    for n in range(run.length):
        drive = (run.h[:, n], run.f_logit[:, n], run.i_logit[:, n], run.B[n], run.C[n])
        y, x = naju_step(x, *(part.unsqueeze(0) for part in drive), alpha=run.alpha, D=run.D)
        states.append(x[0].norm(dim=1))
        outputs.append(y[0].abs())
    return torch.stack(states, dim=1), torch.stack(outputs, dim=1)
