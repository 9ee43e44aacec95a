"""The fused C++ scan as a torch operator: float32 on a CPU, with an analytic backward and no saved states.

This module lays tensors out for the C side and nothing else. Half-precision inputs are computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from naju.scan.cpu_compiled.native import ScanProblem, call, loaded, missing_here, sequences_of
from naju.scan.dispatch import Backend, ScanInputs, other_transform
from naju.scan.operator import Gradients, define_operator


def _pad_state(tensor: Tensor) -> Tensor:
    missing = -tensor.shape[-1] % loaded().naju_tile()
    return F.pad(tensor, (0, missing)) if missing else tensor


def _forward(scan: ScanInputs, keep: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    start = _pad_state(scan.initial_state).contiguous()
    y, state = scan.h.new_empty(scan.h.shape), torch.empty_like(start)
    call("naju_forward", _problem(scan, start), _inputs(scan, start) | {"y": y, "state": state})
    return y, state[..., : scan.B.shape[2]].contiguous(), []


def _backward(dy: Tensor, dstate: Tensor, kept: list[Tensor], scan: ScanInputs) -> Gradients:
    h, d_state = scan.h, scan.B.shape[2]
    batch, length, d_inner = h.shape
    start = _pad_state(scan.initial_state).contiguous()
    groups = -(-d_inner // loaded().naju_group())
    slots = max(1, min(groups, -(-torch.get_num_threads() // len(start))))  # threads to a sequence, each with its dB
    dh, df_logit, di_logit = (h.new_empty(h.shape) for _ in range(3))
    dz = None if scan.z is None else h.new_empty(h.shape)
    dB, dC = (h.new_empty(slots, batch, length, start.shape[-1]) for _ in range(2))
    dinitial_state, dD = torch.empty_like(start), h.new_empty(len(start), d_inner)
    call(
        "naju_backward",
        _problem(scan, start, slots=slots, slot_stride=dB.stride(0)),
        _inputs(scan, start)
        | {"dy": dy, "dstate": _pad_state(dstate), "dh": dh, "df_logit": df_logit, "di_logit": di_logit}
        | {"dB": dB, "dC": dC, "dD": dD, "dz": dz, "dinitial_state": dinitial_state},
    )
    dB, dC = (parts.sum(0)[..., :d_state].contiguous() for parts in (dB, dC))
    dinitial_state = dinitial_state[..., :d_state].contiguous()
    return dh, df_logit, di_logit, dB, dC, None if scan.D is None else dD.sum(0), dz, dinitial_state


def _problem(scan: ScanInputs, start: Tensor, **numbers: int) -> ScanProblem:
    rows, d_inner, d_state = start.shape
    sizes = {"n_sequences": rows, "d_inner": d_inner, "d_state": d_state}
    return ScanProblem(**sizes, alpha=scan.alpha, reverse=scan.reverse, **numbers)


def _inputs(scan: ScanInputs, start: Tensor) -> dict[str, Tensor | list[Tensor] | None]:
    sequences = sequences_of(scan.cu_seqlens, *scan.h.shape[:2])
    drive = {"h": scan.h, "f_logit": scan.f_logit, "i_logit": scan.i_logit, "D": scan.D, "z": scan.z}
    keys = {"B": _pad_state(scan.B), "C": _pad_state(scan.C)}
    return {**drive, **keys, "initial_state": start, "sequences": sequences}


_scan = define_operator("cpu_scan", "cpu", _forward, _backward)


def _refuses(inputs: ScanInputs) -> str | None:
    if inputs.h.device.type != "cpu":
        return f"h is on {inputs.h.device} and it runs on the CPU only"
    if inputs.h.dtype == torch.float64:
        return "h is float64 and it computes in float32"
    return other_transform()


def _run(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    y, state = _scan(inputs.map(Tensor.float))
    return y.to(inputs.h.dtype), state


CPU_COMPILED = Backend(name="cpu_compiled", run=_run, missing_here=missing_here, refuses=_refuses)
