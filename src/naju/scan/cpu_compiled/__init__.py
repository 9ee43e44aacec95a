"""The fused C++ scan as a torch operator: float32 on a CPU, with an analytic backward and no saved states.

This module lays tensors out for the C side and nothing else. Half-precision inputs are computed in float32.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from naju.scan.cpu_compiled.build import library
from naju.scan.dispatch import Backend, ScanInputs, check_boundaries, only_reverse_mode
from naju.scan.operator import define_operator

MATRICES = ["h", "f_logit", "i_logit", "B", "C", "z", "dy", "y", "dh", "df_logit", "di_logit", "dz", "dB", "dC"]
POINTERS = ["D", "initial_state", "dstate", "state", "dinitial_state", "dD", "sequences", "openmp_parallel"]
NUMBERS = ["n_sequences", "d_inner", "d_state", "slots", "slot_stride", "threads", "reverse"]


class _Matrix(ctypes.Structure):
    """`struct Matrix` of scan.cpp: a (batch, length, channels) tensor whose channels are contiguous."""

    _fields_ = (("data", ctypes.c_void_p), ("batch_stride", ctypes.c_long), ("token_stride", ctypes.c_long))


class _Problem(ctypes.Structure):
    """`struct Problem` of scan.cpp."""

    _fields_ = (
        *((name, _Matrix) for name in MATRICES),
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_long) for name in NUMBERS),
        ("alpha", ctypes.c_float),
    )


def _loaded() -> ctypes.CDLL:
    found = library()
    if isinstance(found, str):
        raise RuntimeError(f"the compiled CPU scan is not available: {found}")
    return found


@functools.cache
def _openmp_parallel() -> int | None:
    """Where torch's OpenMP runtime starts its team, if that runtime has GNU's entry point and is visible to all."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError):
        return None


def _pad_state(tensor: Tensor, tile: int) -> Tensor:
    missing = -tensor.shape[-1] % tile
    return F.pad(tensor, (0, missing)) if missing else tensor


def _call(function: str, tensors: dict[str, Tensor | None], cu_seqlens: Tensor | None, **numbers: Any) -> None:
    """Fill in the C side's problem. Outputs are new and contiguous, so laying out their rows copies nothing."""
    h, start = tensors["h"], tensors["initial_state"]
    assert h is not None
    assert start is not None
    sequences = _sequences(cu_seqlens, h.shape[0], h.shape[1])
    problem = _Problem(
        openmp_parallel=_openmp_parallel(),
        sequences=sequences.data_ptr(),
        n_sequences=len(sequences),
        d_inner=h.shape[2],
        d_state=start.shape[2],
        threads=torch.get_num_threads(),
        **numbers,
    )
    laid_out = {name: _rows(name, tensor) for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in laid_out.items():
        pointer = tensor.data_ptr()
        is_matrix = name in MATRICES
        setattr(problem, name, _Matrix(pointer, tensor.stride(-3), tensor.stride(-2)) if is_matrix else pointer)
    if getattr(_loaded(), function)(ctypes.byref(problem)) != 0:
        raise MemoryError("the compiled CPU scan ran out of memory for its working space")


def _rows(name: str, tensor: Tensor) -> Tensor:
    return tensor if name in MATRICES and tensor.stride(-1) == 1 else tensor.contiguous()


def _sequences(cu_seqlens: Tensor | None, batch: int, length: int) -> Tensor:
    """Rows of (batch index, first token, end token)."""
    if cu_seqlens is None:
        return torch.tensor([(row, 0, length) for row in range(batch)])
    boundaries = cu_seqlens.tolist()
    check_boundaries(boundaries, length)  # under torch.compile nobody has looked at the values before
    return torch.tensor([(0, left, right) for left, right in itertools.pairwise(boundaries)])


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
    tile, d_state = _loaded().naju_tile(), B.shape[-1]
    start = _pad_state(initial_state, tile).contiguous()
    y, state = h.new_empty(h.shape), torch.empty_like(start)
    _call(
        "naju_forward",
        {"D": D, "z": z}
        | {"h": h, "f_logit": f_logit, "i_logit": i_logit, "B": _pad_state(B, tile), "C": _pad_state(C, tile)}
        | {"initial_state": start, "y": y, "state": state},
        cu_seqlens,
        alpha=alpha,
        reverse=reverse,
    )
    return y, state[..., :d_state].contiguous(), []


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
    tile, d_state = _loaded().naju_tile(), B.shape[-1]
    batch, length, d_inner = h.shape
    start = _pad_state(initial_state, tile).contiguous()
    groups = -(-d_inner // _loaded().naju_group())
    slots = max(1, min(groups, -(-torch.get_num_threads() // len(start))))  # threads to a sequence, each with its dB
    dh, df_logit, di_logit = (h.new_empty(h.shape) for _ in range(3))
    dz = None if z is None else h.new_empty(h.shape)
    dB, dC = (h.new_empty(slots, batch, length, start.shape[-1]) for _ in range(2))
    dinitial_state, dD = torch.empty_like(start), h.new_empty(len(start), d_inner)
    _call(
        "naju_backward",
        {"h": h, "f_logit": f_logit, "i_logit": i_logit, "B": _pad_state(B, tile), "C": _pad_state(C, tile)}
        | {"D": D, "z": z, "initial_state": start, "dy": dy, "dstate": _pad_state(dstate, tile)}
        | {"dh": dh, "df_logit": df_logit, "di_logit": di_logit, "dB": dB, "dC": dC, "dD": dD, "dz": dz}
        | {"dinitial_state": dinitial_state},
        cu_seqlens,
        alpha=alpha,
        reverse=reverse,
        slots=slots,
        slot_stride=dB.stride(0),
    )
    return (
        dh,
        df_logit,
        di_logit,
        dB.sum(0)[..., :d_state].contiguous(),
        dC.sum(0)[..., :d_state].contiguous(),
        h.new_empty(0) if D is None else dD.sum(0),
        h.new_empty(0) if dz is None else dz,
        dinitial_state[..., :d_state].contiguous(),
    )


_scan = define_operator("cpu_scan", "cpu", _forward, _backward)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _missing_here() -> str | None:
    found = library()
    return found if isinstance(found, str) else None


def _refuses(inputs: ScanInputs) -> str | None:
    if inputs.h.device.type != "cpu":
        return f"h is on {inputs.h.device} and it runs on the CPU only"
    if inputs.h.dtype == torch.float64:
        return "h is float64 and it computes in float32"
    return only_reverse_mode(inputs)


def _run(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    y, state = _scan(inputs.map(Tensor.float))
    return y.to(inputs.h.dtype), state


CPU_COMPILED = Backend(name="cpu_compiled", run=_run, missing_here=_missing_here, refuses=_refuses)
