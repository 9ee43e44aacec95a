"""The fused chunk-parallel scan in Triton: exact in float32, tensor cores in half precision, an analytic backward.

Triton is imported when a scan first runs. With TRITON_INTERPRET=1 the kernels run on CPU tensors.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from naju.scan.dispatch import Backend, ScanInputs, constant_when_traced, only_reverse_mode
from naju.scan.operator import define_operator
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
) -> tuple[Tensor, Tensor, list[Tensor]]:
    kept = launch.kept_states(h, B, cu_seqlens, len(initial_state))
    y, state = launch.forward(h, f_logit, i_logit, B, C, D, z, initial_state, cu_seqlens, alpha, reverse, kept)
    return y, state, [kept]


def _forward_only(
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
) -> tuple[Tensor, Tensor, list[Tensor]]:
    y, state = launch.forward(h, f_logit, i_logit, B, C, D, z, initial_state, cu_seqlens, alpha, reverse, None)
    return y, state, []


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    arguments = (h, f_logit, i_logit, B, C, D, z, initial_state, cu_seqlens, alpha, reverse)
    states = kept[0] if kept else _forward(*arguments)[2][0]
    return launch.backward(dy, dstate, states, *arguments)


def _kept(h: Tensor, f_logit: Tensor, i_logit: Tensor, B: Tensor, *rest: Any) -> list[Tensor]:
    initial_state, cu_seqlens = rest[3:5]
    return [launch.kept_states(h, B, cu_seqlens, initial_state.shape[0])]


# Two operators: only a scan that will be differentiated pays for the states that the backward starts from.
_DEVICES = ("cuda", "cpu")
_scan = define_operator("triton_chunked", _DEVICES, _forward, _backward, _kept)
_scan_only = define_operator("triton_chunked_only_forward", _DEVICES, _forward_only, _backward)


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


def _refuses(inputs: ScanInputs) -> str | None:
    device, d_state = inputs.h.device, inputs.B.shape[2]
    if device.type != "cuda" and not (device.type == "cpu" and _interpreted()):
        return f"h is on {device} and it runs on NVIDIA GPUs only"
    if inputs.h.dtype == torch.float64:
        return "h is float64 and it computes in float32"
    if d_state > launch.MOST_D_STATE:
        return f"d_state is {d_state} and it holds at most {launch.MOST_D_STATE}"
    return only_reverse_mode(inputs)


def _run(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    differentiated = inputs.needs_gradient()
    return (_scan if differentiated else _scan_only)(inputs)


TRITON_CHUNKED = Backend(name="triton_chunked", run=_run, missing_here=_missing_here, refuses=_refuses)
