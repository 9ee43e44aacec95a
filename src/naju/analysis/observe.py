"""One sequence of a scan, held still for analysis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from naju.analysis.checks import double, double_finite
from naju.mixers.naju import NajuMixer, NajuState
from naju.models.backbone import unbroken
from naju.scan.dispatch import check_inputs


@dataclass(frozen=True, kw_only=True)
class ScanRun:
    """What one sequence drove a scan with, in float64 on the CPU, for some channels; time is the last axis of each."""

    h: Tensor  # (c, l)
    f_logit: Tensor  # (c, l)
    i_logit: Tensor  # (c, l)
    B: Tensor  # (l, n), shared by all channels
    C: Tensor  # (l, n)
    D: Tensor  # (c,)
    x0: Tensor  # (c, n), the state before the first token
    alpha: float
    channels: tuple[int, ...]  # which channels of the layer these are

    @property
    def f(self) -> Tensor:
        return torch.sigmoid(self.f_logit)

    @property
    def i(self) -> Tensor:
        return torch.sigmoid(self.i_logit)

    @property
    def length(self) -> int:
        return self.h.shape[1]

    def select(self, channels: Sequence[int]) -> ScanRun:
        """The same run for fewer channels, named by their numbers in the layer."""
        missing = [channel for channel in channels if channel not in self.channels]
        if missing or len(channels) == 0:
            raise ValueError(f"channels must name some of {_shown(self.channels)}, but is {list(channels)}")
        rows = torch.tensor([self.channels.index(channel) for channel in channels], device="cpu")
        return ScanRun(
            h=self.h[rows],
            f_logit=self.f_logit[rows],
            i_logit=self.i_logit[rows],
            B=self.B,
            C=self.C,
            D=self.D[rows],
            x0=self.x0[rows],
            alpha=self.alpha,
            channels=tuple(channels),
        )


def observe_scan(
    h: Tensor,
    f_logit: Tensor,
    i_logit: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    alpha: float | None = None,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    row: int = 0,
    channels: Sequence[int] | None = None,
) -> ScanRun:
    """Batch row `row` of `naju_scan` with these arguments; `channels=None` means all of them."""
    inputs = check_inputs(
        h,
        f_logit,
        i_logit,
        B,
        C,
        alpha=alpha,
        D=D,
        z=None,
        initial_state=initial_state,
        cu_seqlens=None,
        reverse=False,
    )
    batch, _, d_inner = h.shape
    if not 0 <= row < batch:
        raise ValueError(f"row must be one of the batch's {batch} rows, 0 to {batch - 1}, but is {row}")
    run = ScanRun(
        h=double_finite("h", h[row].T),
        f_logit=double("f_logit", f_logit[row].T),
        i_logit=double("i_logit", i_logit[row].T),
        B=double_finite("B", B[row]),
        C=double_finite("C", C[row]),
        D=torch.zeros(d_inner, dtype=torch.float64, device="cpu") if D is None else double_finite("D", D),
        x0=double_finite("initial_state", inputs.initial_state[row]),
        alpha=inputs.alpha,
        channels=tuple(range(d_inner)),
    )
    return run if channels is None else run.select(channels)


@torch.no_grad()
def observe_layer(
    mixer: NajuMixer,
    u: Tensor,
    *,
    state: NajuState | None = None,
    row: int = 0,
    channels: Sequence[int] | None = None,
) -> ScanRun:
    """What a Naju (or coupled) mixer scans for batch row `row` of its input u (b, l, m), started from `state`."""
    if not isinstance(mixer, NajuMixer):
        raise TypeError(f"mixer must be a NajuMixer or a CoupledMixer, but is {type(mixer).__name__}")
    *drive, _ = mixer.scan_arguments(u, state)
    x0 = None if state is None else state.x
    return observe_scan(*drive, alpha=mixer.alpha, D=mixer.D, initial_state=x0, row=row, channels=channels)


@torch.no_grad()
def layer_input(model: nn.Module, layer: nn.Module, *inputs: Any) -> Tensor:
    """What `layer`, somewhere inside `model`, receives as its first argument when the model runs on `inputs`."""
    seen: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    try:
        with unbroken():
            model(*inputs)
    finally:
        hook.remove()
    if not seen:
        raise ValueError(f"layer must take part in the model's forward pass, but this {type(layer).__name__} did not")
    return seen[0]


def _shown(channels: Sequence[int]) -> str:
    if len(channels) > 8:
        return f"the {len(channels)} channels {channels[0]} … {channels[-1]}"
    return f"the channels {list(channels)}"
