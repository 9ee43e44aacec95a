"""The scan as one Triton loop over time that keeps every state for its backward: simple, exact, and large in memory.

This module chooses the blocks and lays tensors out for the kernels. With TRITON_INTERPRET=1 set before the first
import it runs on CPU tensors, for tests.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from naju.scan.dispatch import Backend, ScanInputs, constant_when_traced, only_reverse_mode
from naju.scan.operator import define_operator

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
LARGEST_STATE = 256
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


def _forward(keep: bool) -> Callable[..., tuple[Tensor, Tensor, list[Tensor]]]:
    def forward(
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
        from naju.scan.triton_sequential.kernels import forward_kernel

        y, state = h.new_empty(h.shape), initial_state.new_empty(initial_state.shape)
        kept = _kept(h, f_logit, i_logit, B) if keep else []
        h, f_logit, i_logit, B, C = map(_rows, (h, f_logit, i_logit, B, C))
        z = None if z is None else _rows(z)
        blocks = blocks_for(h.shape[2], B.shape[2])
        with torch.cuda.device_of(h):
            forward_kernel[_grid(initial_state, blocks)](
                h,
                f_logit,
                i_logit,
                B,
                C,
                None if D is None else D.contiguous(),
                z,
                initial_state.contiguous(),
                _boundaries(cu_seqlens, h),
                y,
                state,
                kept[0] if keep else None,
                **_strides(h=h, f_logit=f_logit, i_logit=i_logit, B=B, C=C, z=z),
                length=h.shape[1],
                alpha=alpha,
                REVERSE=reverse,
                **blocks,
            )
        return y, state, kept

    return forward


def _kept(h: Tensor, f_logit: Tensor, i_logit: Tensor, B: Tensor, *rest: Any) -> list[Tensor]:
    """The state that each token meets, (b, l, d, n)."""
    return [h.new_empty((*h.shape, B.shape[2]), dtype=torch.float32)]


def _grid(initial_state: Tensor, blocks: dict[str, Any]) -> tuple[int]:
    return (len(initial_state) * -(-blocks["D_INNER"] // blocks["BLOCK_D"]),)


def _boundaries(cu_seqlens: Tensor | None, h: Tensor) -> Tensor | None:
    return None if cu_seqlens is None else cu_seqlens.to(h.device).contiguous()


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
    from naju.scan.triton_sequential.kernels import backward_kernel

    dh, df_logit, di_logit = (matrix.new_empty(matrix.shape) for matrix in (h, f_logit, i_logit))
    dz = None if z is None else z.new_empty(z.shape)
    blocks = blocks_for(h.shape[2], B.shape[2])
    programs = _grid(initial_state, blocks)
    partial = (programs[0] // len(initial_state), *B.shape)
    dB, dC = (initial_state.new_empty(partial) for _ in range(2))  # float32, summed over channel blocks below
    dD = None if D is None else initial_state.new_empty(initial_state.shape[:2])
    dinitial_state = initial_state.new_empty(initial_state.shape)
    dy, h, f_logit, i_logit, B_rows, C_rows = map(_rows, (dy, h, f_logit, i_logit, B, C))
    z_rows = None if z is None else _rows(z)
    with torch.cuda.device_of(h):
        backward_kernel[programs](
            dy,
            dstate.contiguous(),
            kept[0],
            h,
            f_logit,
            i_logit,
            B_rows,
            C_rows,
            None if D is None else D.contiguous(),
            z_rows,
            _boundaries(cu_seqlens, h),
            dh,
            df_logit,
            di_logit,
            dB,
            dC,
            dD,
            dz,
            dinitial_state,
            **_strides(dy=dy, h=h, f_logit=f_logit, i_logit=i_logit, B=B_rows, C=C_rows, z=z_rows),
            length=h.shape[1],
            tokens=h.shape[0] * h.shape[1],
            alpha=alpha,
            REVERSE=reverse,
            **blocks,
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


DEVICES = ("cuda", "cpu") if INTERPRETED else ("cuda",)
_training_scan = define_operator("triton_sequential", DEVICES, _forward(keep=True), _backward, _kept)
_inference_scan = define_operator("triton_sequential_inference", DEVICES, _forward(keep=False), _backward)


def _run(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """Where nothing asks for a gradient no state is kept: together they are d_state times as large as h."""
    training = inputs.needs_gradient()
    return (_training_scan if training else _inference_scan)(inputs)


@constant_when_traced
def _missing_here() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if INTERPRETED:
        return None
    if torch.version.hip is not None:
        return "torch is built for AMD GPUs and it runs on NVIDIA GPUs only"
    return None if torch.cuda.is_available() else "no NVIDIA GPU is available to torch"


def _refuses(inputs: ScanInputs) -> str | None:
    if inputs.h.device.type not in DEVICES:
        return f"h is on {inputs.h.device} and it runs on NVIDIA GPUs only"
    if inputs.h.dtype == torch.float64:
        return "h is float64 and it computes in float32"
    if inputs.B.shape[2] > LARGEST_STATE:
        return f"d_state is {inputs.B.shape[2]} and it goes up to {LARGEST_STATE}"
    return only_reverse_mode(inputs)


TRITON_SEQUENTIAL = Backend(name="triton_sequential", run=_run, missing_here=_missing_here, refuses=_refuses)
