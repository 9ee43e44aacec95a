"""The scan as one fused CUDA kernel: the state in registers, a state kept at every 32 tokens for the backward.

This module lays tensors out for scan.cu and nothing else. Every tensor may have its own precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from naju.scan.cuda_sequential.load import SEGMENT, Problem, call, missing_here, shape_for
from naju.scan.dispatch import Backend, ScanInputs
from naju.scan.on_gpu import gpu_refuses
from naju.scan.operator import define_operator


def _problem(h: Tensor, initial_state: Tensor, alpha: float, reverse: bool, partial_stride: int = 0) -> Problem:
    return Problem(
        n_sequences=len(initial_state),
        length=h.shape[1],
        d_inner=h.shape[2],
        d_state=initial_state.shape[2],
        partial_stride=partial_stride,
        reverse=reverse,
        alpha=alpha,
    )


def _boundaries(cu_seqlens: Tensor | None, h: Tensor) -> Tensor | None:
    return None if cu_seqlens is None else cu_seqlens.to(h.device, torch.int64)


def _kept(
    h: Tensor,
    f_logit: Tensor,
    i_logit: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    *numbers: Any,
) -> list[Tensor]:
    """The states at every SEGMENT tokens of every sequence: of packed ones, whose lengths only the device knows, as
    many as there can be."""
    batch, length, _ = h.shape
    rows, *cells = initial_state.shape
    segments = batch * -(-length // SEGMENT) if cu_seqlens is None else length // SEGMENT + rows
    return [initial_state.new_empty((segments, *cells))]


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
    y, state = h.new_empty(h.shape), initial_state.new_empty(initial_state.shape)
    kept = _kept(h, f_logit, i_logit, B, C, D, z, initial_state, cu_seqlens) if keep else []
    call(
        "naju_forward",
        _problem(h, initial_state, alpha, reverse),
        {"h": h, "f_logit": f_logit, "i_logit": i_logit, "B": B, "C": C, "z": z, "y": y}
        | {"D": None if D is None else D.float(), "initial_state": initial_state, "state": state}
        | {"checkpoints": kept[0] if keep else None, "boundaries": _boundaries(cu_seqlens, h)},
    )
    return y, state, kept


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
    dh, df_logit, di_logit = (matrix.new_empty(matrix.shape) for matrix in (h, f_logit, i_logit))
    dz = None if z is None else z.new_empty(z.shape)
    blocks = -(-h.shape[2] // shape_for(B.shape[2]).width)
    dB, dC = (initial_state.new_empty((blocks, *B.shape)) for _ in range(2))  # float32, summed over blocks below
    dD = None if D is None else initial_state.new_empty(initial_state.shape[:2])
    dinitial_state = initial_state.new_empty(initial_state.shape)
    call(
        "naju_backward",
        _problem(h, initial_state, alpha, reverse, partial_stride=dB.stride(0)),
        {"h": h, "f_logit": f_logit, "i_logit": i_logit, "B": B, "C": C, "z": z, "dy": dy}
        | {"dh": dh, "df_logit": df_logit, "di_logit": di_logit, "dz": dz, "dB": dB, "dC": dC, "dD": dD}
        | {"D": None if D is None else D.float(), "dstate": dstate, "dinitial_state": dinitial_state}
        | {"checkpoints": kept[0], "boundaries": _boundaries(cu_seqlens, h)},
    )
    return (
        dh,
        df_logit,
        di_logit,
        dB.sum(0).to(B.dtype),
        dC.sum(0).to(C.dtype),
        h.new_empty(0) if D is None or dD is None else dD.sum(0).to(D.dtype),
        h.new_empty(0) if dz is None else dz,
        dinitial_state,
    )


def _refuses(inputs: ScanInputs) -> str | None:
    return gpu_refuses(inputs.h, inputs.B.shape[2], inputs.tensors().values(), in_triton=False)


_scan = define_operator("cuda_sequential", "cuda", _forward, _backward, _kept)
CUDA_SEQUENTIAL = Backend(name="cuda_sequential", run=_scan, missing_here=missing_here, refuses=_refuses)
