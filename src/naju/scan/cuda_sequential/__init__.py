"""The scan as one fused CUDA kernel: the state in registers, a state kept at every 32 tokens for the backward.

This module lays tensors out for scan.cu and nothing else. Every tensor may have its own precision.
"""

from __future__ import annotations

from torch import Tensor

from naju.scan.cuda_sequential.load import SEGMENT, Problem, call, missing_here, not_built, shape_for
from naju.scan.dispatch import Backend, ScanInputs, boundaries_on
from naju.scan.on_gpu import gpu_refuses
from naju.scan.operator import Gradients, define_operator


def _problem(scan: ScanInputs, partial_stride: int = 0) -> Problem:
    rows, d_inner, d_state = scan.initial_state.shape
    return Problem(
        n_sequences=rows,
        length=scan.h.shape[1],
        d_inner=d_inner,
        d_state=d_state,
        partial_stride=partial_stride,
        reverse=scan.reverse,
        alpha=scan.alpha,
    )


def _inputs(scan: ScanInputs) -> dict[str, Tensor | None]:
    cu_seqlens = scan.cu_seqlens
    drive = {"h": scan.h, "f_logit": scan.f_logit, "i_logit": scan.i_logit, "B": scan.B, "C": scan.C, "z": scan.z}
    boundaries = None if cu_seqlens is None else boundaries_on(scan.h.device, cu_seqlens.long())
    return {**drive, "D": None if scan.D is None else scan.D.float(), "boundaries": boundaries}


def _kept(scan: ScanInputs) -> list[Tensor]:
    """The states at every SEGMENT tokens of every sequence: of packed ones, whose lengths only the device knows, as
    many as there can be."""
    batch, length, _ = scan.h.shape
    rows, *cells = scan.initial_state.shape
    segments = batch * -(-length // SEGMENT) if scan.cu_seqlens is None else length // SEGMENT + rows
    return [scan.initial_state.new_empty((segments, *cells))]


def _forward(scan: ScanInputs, keep: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    start = scan.initial_state
    y, state = scan.h.new_empty(scan.h.shape), start.new_empty(start.shape)
    kept = _kept(scan) if keep else []
    outputs = {"y": y, "state": state, "checkpoints": kept[0] if keep else None}
    call("naju_forward", _problem(scan), _inputs(scan) | outputs | {"initial_state": start})
    return y, state, kept


def _backward(dy: Tensor, dstate: Tensor, kept: list[Tensor], scan: ScanInputs) -> Gradients:
    h, B, C, D, z, start = scan.h, scan.B, scan.C, scan.D, scan.z, scan.initial_state
    dh, df_logit, di_logit = (matrix.new_empty(matrix.shape) for matrix in (h, scan.f_logit, scan.i_logit))
    dz = None if z is None else z.new_empty(z.shape)
    blocks = -(-h.shape[2] // shape_for(B.shape[2]).width)
    dB, dC = (start.new_empty((blocks, *B.shape)) for _ in range(2))  # float32, summed over blocks below
    dD = None if D is None else start.new_empty(start.shape[:2])
    dinitial_state = start.new_empty(start.shape)
    call(
        "naju_backward",
        _problem(scan, partial_stride=dB.stride(0)),
        _inputs(scan)
        | {"dy": dy, "dstate": dstate, "checkpoints": kept[0], "dh": dh, "df_logit": df_logit, "di_logit": di_logit}
        | {"dz": dz, "dB": dB, "dC": dC, "dD": dD, "dinitial_state": dinitial_state},
    )
    dB, dC = dB.sum(0).to(B.dtype), dC.sum(0).to(C.dtype)
    dD = None if D is None or dD is None else dD.sum(0).to(D.dtype)
    return dh, df_logit, di_logit, dB, dC, dD, dz, dinitial_state


def _refuses(inputs: ScanInputs) -> str | None:
    d_state = inputs.B.shape[2]
    return gpu_refuses(inputs.h, d_state, in_triton=False) or not_built(shape_for(d_state))


_scan = define_operator("cuda_sequential", "cuda", _forward, _backward, _kept)
CUDA_SEQUENTIAL = Backend(name="cuda_sequential", run=_scan, missing_here=missing_here, refuses=_refuses)
