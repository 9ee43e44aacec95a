"""The fused chunk-parallel scan in Triton: exact in float32, tensor cores in half precision, an analytic backward.

Triton is imported when a scan first runs. With TRITON_INTERPRET=1 the kernels run on CPU tensors.
"""

from __future__ import annotations

import importlib.util
import os
from functools import partial
from typing import Any

import torch
from torch import Tensor

from naju.scan.dispatch import Backend, ScanInputs, constant_when_traced, other_transform
from naju.scan.operator import Gradients, define_operator
from naju.scan.triton_chunked import launch


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "on", "true", "yes", "y")


def _forward(
    h: Tensor,
    f_logit: Tensor,
    i_logit: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    alpha: float,
    reverse: bool,
    *,
    keep: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    with launch.on_device(h.device):
        log_f, log_i = launch.gates(f_logit, i_logit, h)
        drive = launch.Drive(h=h, log_f=log_f, log_i=log_i, B=B, C=C, D=D, z=z, alpha=alpha, reverse=reverse)
        states = launch.kept_states(h, B.shape[2], cu_seqlens) if keep else None
        y = h.new_empty(h.shape)
        state = launch.forward(launch.plan(h, B.shape[2], cu_seqlens), drive, initial_state, states, y)
    return y, state, [] if states is None else [log_f, log_i, states]


def _backward(
    dy: Tensor,
    dstate: Tensor,
    kept: list[Tensor],
    h: Tensor,
    f_logit: Tensor,
    i_logit: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    alpha: float,
    reverse: bool,
) -> Gradients:
    if not kept:
        kept = _forward(h, f_logit, i_logit, B, C, D, z, initial_state, cu_seqlens, alpha, reverse, keep=True)[2]
    log_f, log_i, states = kept
    drive = launch.Drive(h=h, log_f=log_f, log_i=log_i, B=B, C=C, D=D, z=z, alpha=alpha, reverse=reverse)
    dh, df, di, dB, dC = (tensor.new_empty(tensor.shape) for tensor in (h, f_logit, i_logit, B, C))
    dz = None if z is None else z.new_empty(z.shape)
    dinitial = initial_state.new_empty(initial_state.shape)
    gradients = launch.DriveGradients(h=dh, f_logit=df, i_logit=di, B=dB, C=dC, z=dz)
    with launch.on_device(h.device):
        plan = launch.plan(h, B.shape[2], cu_seqlens, backward=True)
        dD = launch.backward(plan, drive, states, dy, dstate, gradients, dinitial)
    dD = h.new_empty(0) if D is None else dD.to(D.dtype)
    return dh, df, di, dB, dC, dD, h.new_empty(0) if dz is None else dz, dinitial


def _kept(h: Tensor, f_logit: Tensor, i_logit: Tensor, B: Tensor, *rest: Any) -> list[Tensor]:
    cu_seqlens = rest[4]
    logs = [h.new_empty(h.shape, dtype=launch.gate_dtype(h.dtype)) for _ in range(2)]
    return [*logs, launch.kept_states(h, B.shape[2], cu_seqlens)]


# Two operators: only a scan that will be differentiated pays for the states that the backward starts from.
_DEVICES = ("cuda", "cpu")
_scan = define_operator("triton_chunked", _DEVICES, partial(_forward, keep=True), _backward, _kept)
_scan_only = define_operator("triton_chunked_only_forward", _DEVICES, partial(_forward, keep=False), _backward)


@constant_when_traced
def _missing_here() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if _interpreted():
        return None
    if torch.version.hip is not None:
        return "this torch is built for AMD GPUs and its configurations are for NVIDIA's"
    if not torch.cuda.is_available():
        return "there is no NVIDIA GPU"
    return None


def refuses_tensors(h: Tensor, d_state: int) -> str | None:
    """The reason against these tensors and whatever transform surrounds them."""
    if h.device.type != "cuda" and not (h.device.type == "cpu" and _interpreted()):
        return f"h is on {h.device} and it runs on NVIDIA GPUs only"
    if h.dtype == torch.float64:
        return "h is float64 and it computes in float32"
    if d_state > launch.MOST_D_STATE:
        return f"d_state is {d_state} and it holds at most {launch.MOST_D_STATE}"
    return other_transform([h])


def _refuses(inputs: ScanInputs) -> str | None:
    return refuses_tensors(inputs.h, inputs.B.shape[2])


def _run(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    differentiated = inputs.needs_gradient()
    return (_scan if differentiated else _scan_only)(inputs)


TRITON_CHUNKED = Backend(name="triton_chunked", run=_run, missing_here=_missing_here, refuses=_refuses)
