"""The scan as one Triton loop over time that keeps every state for its backward: simple, exact, and large in memory.

This module chooses the blocks and lays tensors out for the kernels. With TRITON_INTERPRET=1 set before the first
import it runs on CPU tensors, for tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from naju.scan.dispatch import Backend, ScanInputs, boundaries_on
from naju.scan.on_gpu import gpu_refuses, triton_missing_here
from naju.scan.operator import Gradients, define_operator

TILE = 1024  # entries of the state in a program: enough programs to fill a GPU, few enough partial sums of dB and dC


def blocks_for(d_inner: int, d_state: int) -> dict[str, Any]:
    """Sizes and options that the kernels are compiled for. They must not depend on batch or length."""
    block_n = _power_of_two(d_state)
    block_d = min(max(TILE // block_n, 1), 64, _power_of_two(d_inner))
    warps = min(max(block_d * block_n // 256, 1), 4)
    options = {
        "num_warps": warps,
        "enable_fp_fusion": True,
    }  # said aloud: Triton 3.9 warns that the default will change
    return {"D_INNER": d_inner, "D_STATE": d_state, "BLOCK_D": block_d, "BLOCK_N": block_n, **options}


def _power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()


def _strides(**matrices: Tensor | None) -> dict[str, int]:
    """Strides of the batch and of the token; the channels of a row are contiguous after `_rows`."""
    return {
        f"{name}_{axis}": 0 if matrix is None else matrix.stride(index)
        for name, matrix in matrices.items()
        for index, axis in enumerate(("batch", "token"))
    }


def _rows(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def _forward(scan: ScanInputs, keep: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Where no backward follows no state is kept: together they are d_state times as large as h."""
    from naju.scan.triton_sequential.kernels import forward_kernel

    initial_state = scan.initial_state
    y, state = scan.h.new_empty(scan.h.shape), initial_state.new_empty(initial_state.shape)
    kept = _kept(scan) if keep else []
    h, f_logit, i_logit, B, C = map(_rows, (scan.h, scan.f_logit, scan.i_logit, scan.B, scan.C))
    z = None if scan.z is None else _rows(scan.z)
    blocks = blocks_for(h.shape[2], B.shape[2])
    with torch.cuda.device_of(h):
        forward_kernel[_grid(initial_state, blocks)](
            h,
            f_logit,
            i_logit,
            B,
            C,
            None if scan.D is None else scan.D.contiguous(),
            z,
            initial_state.contiguous(),
            _boundaries(scan),
            y,
            state,
            kept[0] if keep else None,
            **_strides(h=h, f_logit=f_logit, i_logit=i_logit, B=B, C=C, z=z),
            length=h.shape[1],
            alpha=scan.alpha,
            REVERSE=scan.reverse,
            **blocks,
        )
    return y, state, kept


def _kept(scan: ScanInputs) -> list[Tensor]:
    """The state that each token meets, (b, l, d, n)."""
    return [scan.h.new_empty((*scan.h.shape, scan.B.shape[2]), dtype=torch.float32)]


def _grid(initial_state: Tensor, blocks: dict[str, Any]) -> tuple[int]:
    return (len(initial_state) * -(-blocks["D_INNER"] // blocks["BLOCK_D"]),)


def _boundaries(scan: ScanInputs) -> Tensor | None:
    return None if scan.cu_seqlens is None else boundaries_on(scan.h.device, scan.cu_seqlens).contiguous()


def _backward(dy: Tensor, dstate: Tensor, kept: list[Tensor], scan: ScanInputs) -> Gradients:
    from naju.scan.triton_sequential.kernels import backward_kernel

    D, initial_state = scan.D, scan.initial_state
    dh, df_logit, di_logit = (matrix.new_empty(matrix.shape) for matrix in (scan.h, scan.f_logit, scan.i_logit))
    dz = None if scan.z is None else scan.z.new_empty(scan.z.shape)
    blocks = blocks_for(scan.h.shape[2], scan.B.shape[2])
    programs = _grid(initial_state, blocks)
    partial = (programs[0] // len(initial_state), *scan.B.shape)
    dB, dC = (initial_state.new_empty(partial) for _ in range(2))  # float32, summed over channel blocks below
    dD = None if D is None else initial_state.new_empty(initial_state.shape[:2])
    dinitial_state = initial_state.new_empty(initial_state.shape)
    dy, h, f_logit, i_logit, B, C = map(_rows, (dy, scan.h, scan.f_logit, scan.i_logit, scan.B, scan.C))
    z = None if scan.z is None else _rows(scan.z)
    with torch.cuda.device_of(h):
        backward_kernel[programs](
            dy,
            dstate.contiguous(),
            kept[0],
            h,
            f_logit,
            i_logit,
            B,
            C,
            None if D is None else D.contiguous(),
            z,
            _boundaries(scan),
            dh,
            df_logit,
            di_logit,
            dB,
            dC,
            dD,
            dz,
            dinitial_state,
            **_strides(dy=dy, h=h, f_logit=f_logit, i_logit=i_logit, B=B, C=C, z=z),
            length=h.shape[1],
            tokens=h.shape[0] * h.shape[1],
            alpha=scan.alpha,
            REVERSE=scan.reverse,
            **blocks,
        )
    dB, dC = dB.sum(0).to(B.dtype), dC.sum(0).to(C.dtype)
    dD = None if D is None or dD is None else dD.sum(0).to(D.dtype)
    return dh, df_logit, di_logit, dB, dC, dD, dz, dinitial_state


def _refuses(inputs: ScanInputs) -> str | None:
    return gpu_refuses(inputs.h, inputs.B.shape[2])


_scan = define_operator("triton_sequential", ("cuda", "cpu"), _forward, _backward, _kept)
TRITON_SEQUENTIAL = Backend(name="triton_sequential", run=_scan, missing_here=triton_missing_here, refuses=_refuses)
