"""The C side of the compiled kernels: its structs, how tensors are laid out for it, and how it is called."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from naju.scan.cpu_compiled.build import library
from naju.scan.dispatch import check_boundaries, constant_when_traced


class Matrix(ctypes.Structure):
    """`struct Matrix`: a (batch, length, channels) tensor whose channels are contiguous."""

    _fields_ = (("data", ctypes.c_void_p), ("batch_stride", ctypes.c_long), ("token_stride", ctypes.c_long))


MOST_OUTPUTS = 2


class ScanProblem(ctypes.Structure):
    """`struct Problem` of scan.cpp."""

    _fields_ = (
        *((name, Matrix) for name in ("h", "f_logit", "i_logit", "B", "C", "z", "dy")),
        *((name, Matrix) for name in ("y", "dh", "df_logit", "di_logit", "dz", "dB", "dC")),
        *((name, ctypes.c_void_p) for name in ("D", "initial_state", "dstate", "state", "dinitial_state", "dD")),
        *((name, ctypes.c_void_p) for name in ("sequences", "openmp_parallel")),
        *((name, ctypes.c_long) for name in ("n_sequences", "d_inner", "d_state", "slots", "slot_stride")),
        *((name, ctypes.c_long) for name in ("threads", "reverse")),
        ("alpha", ctypes.c_float),
    )


class ConvProblem(ctypes.Structure):
    """`struct ConvProblem` of conv.h."""

    _fields_ = (
        ("u", Matrix),
        *((name, Matrix * MOST_OUTPUTS) for name in ("add", "out", "dout")),
        ("du", Matrix),
        *((name, ctypes.c_void_p) for name in ("tail", "weight", "bias", "dtail", "dweight", "dbias")),
        *((name, ctypes.c_void_p) for name in ("sequences", "openmp_parallel")),
        *((name, ctypes.c_long) for name in ("n_sequences", "channels", "width", "outputs", "silu", "threads")),
    )


class StepProblem(ctypes.Structure):
    """`struct StepProblem` of step.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("uz", "x", "u_tail", "h_tail", "conv_taps", "conv_bias")),
        *((name, ctypes.c_void_p) for name in ("W_f", "f_taps", "f_bias", "W_i", "i_taps", "i_bias", "W_BC", "D")),
        *((name, ctypes.c_void_p) for name in ("h", "products", "y", "next_x", "next_u_tail", "next_h_tail")),
        ("openmp_parallel", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("batch", "d_inner", "d_state", "width", "threads")),
        *((name, ctypes.c_float) for name in ("alpha", "gate_scale")),
    )


@constant_when_traced
def missing_here() -> str | None:
    """Why the compiled kernels cannot run on this machine; compiles them if that has not been tried yet."""
    found = library()
    return found if isinstance(found, str) else None


def loaded() -> ctypes.CDLL:
    found = library()
    if isinstance(found, str):
        raise RuntimeError(f"the compiled CPU kernels are not available: {found}")
    return found


def call(function: str, problem: ctypes.Structure, tensors: Mapping[str, Tensor | list[Tensor] | None]) -> None:
    """Fill the named tensors into the problem and run it; rows of channels are made contiguous where they are not."""
    problem.openmp_parallel = _openmp_parallel()
    problem.threads = torch.get_num_threads()
    matrices = _matrices(type(problem))
    alive: list[Tensor] = []  # copies live until the call returns

    def rows(tensor: Tensor) -> Matrix:
        alive.append(tensor if tensor.stride(-1) == 1 else tensor.contiguous())
        return Matrix(alive[-1].data_ptr(), alive[-1].stride(-3), alive[-1].stride(-2))

    for name, value in tensors.items():
        if isinstance(value, list):
            setattr(problem, name, (Matrix * MOST_OUTPUTS)(*map(rows, value)))
        elif value is not None and name in matrices:
            setattr(problem, name, rows(value))
        elif value is not None:
            alive.append(value.contiguous())
            setattr(problem, name, alive[-1].data_ptr())
    if getattr(loaded(), function)(ctypes.byref(problem)) != 0:
        raise MemoryError("the compiled CPU kernels ran out of memory for their working space")


@functools.cache
def _matrices(kind: type[ctypes.Structure]) -> frozenset[str]:
    """The fields that are not plain addresses."""
    return frozenset(field[0] for field in kind._fields_ if field[1] is not ctypes.c_void_p)


def sequences_of(cu_seqlens: Tensor | None, batch: int, length: int) -> Tensor:
    """Rows of (batch index, first token, end token)."""
    if cu_seqlens is None:
        return torch.tensor([(row, 0, length) for row in range(batch)])
    boundaries = cu_seqlens.tolist()
    check_boundaries(boundaries, length)  # under torch.compile nobody has looked at the values before
    return torch.tensor([(0, left, right) for left, right in itertools.pairwise(boundaries)])


@functools.cache
def _openmp_parallel() -> int | None:
    """Where torch's OpenMP runtime starts its team, if that runtime has GNU's entry point and is visible to all."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError):
        return None
