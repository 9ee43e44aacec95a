"""The fused chunk-parallel scan in Triton: exact in float32, tensor cores in half precision, an analytic backward.

Triton is imported when a scan first runs. With TRITON_INTERPRET=1 the kernels run on CPU tensors.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from naju.scan.dispatch import Backend, ScanInputs
from naju.scan.on_gpu import gpu_refuses, triton_missing_here
from naju.scan.operator import Gradients, define_operator
from naju.scan.triton_chunked import launch


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
    keep: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    with launch.on_device(h.device):
        log_f, log_i = launch.gates(f_logit, i_logit, h)
        drive = launch.Drive(h=h, log_f=log_f, log_i=log_i, B=B, C=C, D=D, z=z, alpha=alpha, reverse=reverse)
        states = launch.kept_states(h, B.shape[2], cu_seqlens) if keep else None
        y = h.new_empty(h.shape)
        plan = launch.plan(h, B.shape[2], cu_seqlens, keep=keep)
        state = launch.forward(plan, drive, initial_state, states, y)
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


def _refuses(inputs: ScanInputs) -> str | None:
    return gpu_refuses(inputs.h, inputs.B.shape[2], inputs.tensors().values())


_scan = define_operator("triton_chunked", ("cuda", "cpu"), _forward, _backward, _kept)
TRITON_CHUNKED = Backend(name="triton_chunked", run=_scan, missing_here=triton_missing_here, refuses=_refuses)
