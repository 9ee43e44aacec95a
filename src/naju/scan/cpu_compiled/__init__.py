"""The fused C++ scan as a torch operator: float32 on a CPU, with an analytic backward and no saved states.

`naju::cpu_scan` and its backward are opaque to torch.compile and export; this module lays tensors out for the C side
and nothing else. Half-precision inputs are computed in float32.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from naju.scan.cpu_compiled.build import library
from naju.scan.dispatch import Backend, ScanInputs, check_boundaries, only_reverse_mode

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


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _pad_state(tensor: Tensor, tile: int) -> Tensor:
    missing = -tensor.shape[-1] % tile
    return F.pad(tensor, (0, missing)) if missing else tensor


def _call(function: str, tensors: dict[str, Tensor | None], **numbers: Any) -> None:
    problem = _Problem(openmp_parallel=_openmp_parallel(), **numbers)
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if name in POINTERS:
            setattr(problem, name, tensor.data_ptr())
        else:
            setattr(problem, name, _Matrix(tensor.data_ptr(), tensor.stride(-3), tensor.stride(-2)))
    if getattr(_loaded(), function)(ctypes.byref(problem)) != 0:
        raise MemoryError("the compiled CPU scan ran out of memory for its working space")


def _sequences(cu_seqlens: Tensor | None, batch: int, length: int) -> Tensor:
    """Rows of (batch index, first token, end token)."""
    if cu_seqlens is None:
        return torch.tensor([(row, 0, length) for row in range(batch)])
    boundaries = cu_seqlens.tolist()
    check_boundaries(boundaries, length)  # under torch.compile nobody has looked at the values before
    return torch.tensor([(0, left, right) for left, right in zip(boundaries[:-1], boundaries[1:], strict=True)])


@torch.library.custom_op("naju::cpu_scan", mutates_args=(), device_types="cpu")
def cpu_scan(
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
) -> tuple[Tensor, Tensor]:
    tile = _loaded().naju_tile()
    batch, length, d_inner = h.shape
    d_state = B.shape[-1]
    inputs = {"h": h, "f_logit": f_logit, "i_logit": i_logit, "z": z}
    inputs |= {"B": _pad_state(B, tile), "C": _pad_state(C, tile)}
    start = _pad_state(initial_state, tile).contiguous()
    sequences = _sequences(cu_seqlens, batch, length)
    outputs = {"y": h.new_empty(h.shape), "state": torch.empty_like(start)}
    _call(
        "naju_forward",
        {name: None if tensor is None else _rows(tensor) for name, tensor in inputs.items()}
        | outputs
        | {"D": None if D is None else D.contiguous(), "initial_state": start, "sequences": sequences},
        n_sequences=len(sequences),
        d_inner=d_inner,
        d_state=start.shape[-1],
        slots=1,
        threads=torch.get_num_threads(),
        reverse=reverse,
        alpha=alpha,
    )
    return outputs["y"], outputs["state"][..., :d_state].contiguous()


@cpu_scan.register_fake
def _(h, f_logit, i_logit, B, C, D, z, initial_state, cu_seqlens, alpha, reverse):  # type: ignore[no-untyped-def]
    return h.new_empty(h.shape), initial_state.new_empty(initial_state.shape)


@torch.library.custom_op("naju::cpu_scan_backward", mutates_args=(), device_types="cpu")
def cpu_scan_backward(
    dy: Tensor,
    dstate: Tensor,
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
    """Gradients of h, f_logit, i_logit, B, C, D, z and initial_state; those of an absent D or z are empty."""
    tile, group, threads = _loaded().naju_tile(), _loaded().naju_group(), torch.get_num_threads()
    batch, length, d_inner = h.shape
    d_state = B.shape[-1]
    sequences = _sequences(cu_seqlens, batch, length)
    start = _pad_state(initial_state, tile).contiguous()
    groups = -(-d_inner // group)
    slots = max(1, min(groups, -(-threads // len(sequences))))  # threads that share a sequence, each with its own dB
    inputs = {"h": h, "f_logit": f_logit, "i_logit": i_logit, "z": z, "dy": dy}
    inputs |= {"B": _pad_state(B, tile), "C": _pad_state(C, tile)}
    outputs = {name: h.new_empty(h.shape) for name in ("dh", "df_logit", "di_logit")}
    outputs["dz"] = h.new_empty(0 if z is None else h.shape)
    outputs |= {name: h.new_empty(slots, batch, length, start.shape[-1]) for name in ("dB", "dC")}
    outputs |= {"dinitial_state": torch.empty_like(start), "dD": h.new_zeros(len(sequences), d_inner)}
    _call(
        "naju_backward",
        {name: None if tensor is None else _rows(tensor) for name, tensor in inputs.items()}
        | {name: tensor for name, tensor in outputs.items() if name != "dz" or z is not None}
        | {"D": None if D is None else D.contiguous(), "initial_state": start, "sequences": sequences}
        | {"dstate": _pad_state(dstate, tile).contiguous()},
        n_sequences=len(sequences),
        d_inner=d_inner,
        d_state=start.shape[-1],
        slots=slots,
        slot_stride=outputs["dB"].stride(0),
        threads=threads,
        reverse=reverse,
        alpha=alpha,
    )
    return (
        outputs["dh"],
        outputs["df_logit"],
        outputs["di_logit"],
        outputs["dB"].sum(0)[..., :d_state].contiguous(),
        outputs["dC"].sum(0)[..., :d_state].contiguous(),
        h.new_empty(0) if D is None else outputs["dD"].sum(0),
        outputs["dz"],
        outputs["dinitial_state"][..., :d_state].contiguous(),
    )


@cpu_scan_backward.register_fake
def _(dy, dstate, h, f_logit, i_logit, B, C, D, z, initial_state, cu_seqlens, alpha, reverse):  # type: ignore[no-untyped-def]
    like_h = [h.new_empty(h.shape) for _ in range(3)]
    dD, dz = (h.new_empty(0 if given is None else given.shape) for given in (D, z))
    return *like_h, B.new_empty(B.shape), C.new_empty(C.shape), dD, dz, initial_state.new_empty(initial_state.shape)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.alpha, ctx.reverse = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    dh, df_logit, di_logit, dB, dC, dD, dz, dinitial_state = cpu_scan_backward(
        dy, dstate, *saved, ctx.alpha, ctx.reverse
    )
    D, z = saved[5], saved[6]
    optional = (None if D is None else dD, None if z is None else dz)
    return dh, df_logit, di_logit, dB, dC, *optional, dinitial_state, None, None, None


cpu_scan.register_autograd(_backward, setup_context=_save_inputs)


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
    h, f_logit, i_logit, B, C = (t.float() for t in (inputs.h, inputs.f_logit, inputs.i_logit, inputs.B, inputs.C))
    D, z = (None if t is None else t.float() for t in (inputs.D, inputs.z))
    y, state = cpu_scan(
        h, f_logit, i_logit, B, C, D, z, inputs.initial_state, inputs.cu_seqlens, inputs.alpha, inputs.reverse
    )
    return y.to(inputs.h.dtype), state


CPU_COMPILED = Backend(name="cpu_compiled", run=_run, missing_here=_missing_here, refuses=_refuses)
