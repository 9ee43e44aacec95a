"""The fused chunk-parallel scan in Triton: exact in float32, tensor cores in half precision, an analytic backward.

Triton is imported when a scan first runs. With TRITON_INTERPRET=1 the kernels run on CPU tensors.
"""

from __future__ import annotations

from torch import Tensor

from naju.scan.dispatch import Backend, ScanInputs
from naju.scan.on_gpu import gpu_refuses, triton_missing_here
from naju.scan.operator import Gradients, define_operator
from naju.scan.triton_chunked import launch


def _forward(scan: ScanInputs, keep: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    h, d_state = scan.h, scan.B.shape[2]
    with launch.on_device(h.device):
        log_f, log_i = launch.gates(scan.f_logit, scan.i_logit, h)
        states = launch.kept_states(h, d_state, scan.cu_seqlens) if keep else None
        y = h.new_empty(h.shape)
        plan = launch.plan(h, d_state, scan.cu_seqlens, keep=keep)
        state = launch.forward(plan, _drive(scan, log_f, log_i), scan.initial_state, states, y)
    return y, state, [] if states is None else [log_f, log_i, states]


def _backward(dy: Tensor, dstate: Tensor, kept: list[Tensor], scan: ScanInputs) -> Gradients:
    log_f, log_i, states = kept
    taken = (scan.h, scan.f_logit, scan.i_logit, scan.B, scan.C, scan.initial_state)
    dh, df, di, dB, dC, dinitial = (tensor.new_empty(tensor.shape) for tensor in taken)
    dz = None if scan.z is None else scan.z.new_empty(scan.z.shape)
    gradients = launch.DriveGradients(h=dh, f_logit=df, i_logit=di, B=dB, C=dC, z=dz)
    with launch.on_device(scan.h.device):
        plan = launch.plan(scan.h, scan.B.shape[2], scan.cu_seqlens, backward=True)
        dD = launch.backward(plan, _drive(scan, log_f, log_i), states, dy, dstate, gradients, dinitial)
    return dh, df, di, dB, dC, None if scan.D is None else dD.to(scan.D.dtype), dz, dinitial


def _drive(scan: ScanInputs, log_f: Tensor, log_i: Tensor) -> launch.Drive:
    return launch.Drive(
        h=scan.h,
        log_f=log_f,
        log_i=log_i,
        B=scan.B,
        C=scan.C,
        D=scan.D,
        z=scan.z,
        alpha=scan.alpha,
        reverse=scan.reverse,
    )


def _kept(scan: ScanInputs) -> list[Tensor]:
    h = scan.h
    logs = [h.new_empty(h.shape, dtype=launch.gate_dtype(h.dtype)) for _ in range(2)]
    return [*logs, launch.kept_states(h, scan.B.shape[2], scan.cu_seqlens)]


def _refuses(inputs: ScanInputs) -> str | None:
    return gpu_refuses(inputs.h, inputs.B.shape[2])


_scan = define_operator("triton_chunked", ("cuda", "cpu"), _forward, _backward, _kept)
TRITON_CHUNKED = Backend(name="triton_chunked", run=_scan, missing_here=triton_missing_here, refuses=_refuses)
