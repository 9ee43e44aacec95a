"""The fused C++ scan as a torch operator: float32 on a CPU, with an analytic backward and no saved states.

This module lays tensors out for the C side and nothing else. Half-precision inputs are computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from naju.scan.cpu_compiled.native import ScanProblem, call, loaded, missing_here, sequences_of
from naju.scan.dispatch import Backend, ScanInputs, only_reverse_mode
from naju.scan.operator import define_operator


def _pad_state(tensor: Tensor, tile: int) -> Tensor:
    missing = -tensor.shape[-1] % tile
    return F.pad(tensor, (0, missing)) if missing else tensor


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
    tile, d_state = loaded().naju_tile(), B.shape[-1]
    start = _pad_state(initial_state, tile).contiguous()
    y, state = h.new_empty(h.shape), torch.empty_like(start)
    sequences = sequences_of(cu_seqlens, h.shape[0], h.shape[1])
    call(
        "naju_forward",
        ScanProblem(
            n_sequences=len(sequences), d_inner=h.shape[2], d_state=start.shape[2], alpha=alpha, reverse=reverse
        ),
        {"h": h, "f_logit": f_logit, "i_logit": i_logit, "B": _pad_state(B, tile), "C": _pad_state(C, tile)}
        | {"D": D, "z": z, "initial_state": start, "y": y, "state": state, "sequences": sequences},
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
    tile, d_state = loaded().naju_tile(), B.shape[-1]
    batch, length, d_inner = h.shape
    start = _pad_state(initial_state, tile).contiguous()
    groups = -(-d_inner // loaded().naju_group())
    slots = max(1, min(groups, -(-torch.get_num_threads() // len(start))))  # threads to a sequence, each with its dB
    dh, df_logit, di_logit = (h.new_empty(h.shape) for _ in range(3))
    dz = None if z is None else h.new_empty(h.shape)
    dB, dC = (h.new_empty(slots, batch, length, start.shape[-1]) for _ in range(2))
    dinitial_state, dD = torch.empty_like(start), h.new_empty(len(start), d_inner)
    sequences = sequences_of(cu_seqlens, batch, length)
    call(
        "naju_backward",
        ScanProblem(
            n_sequences=len(sequences),
            d_inner=d_inner,
            d_state=start.shape[2],
            slots=slots,
            slot_stride=dB.stride(0),
            alpha=alpha,
            reverse=reverse,
        ),
        {"h": h, "f_logit": f_logit, "i_logit": i_logit, "B": _pad_state(B, tile), "C": _pad_state(C, tile)}
        | {"D": D, "z": z, "initial_state": start, "dy": dy, "dstate": _pad_state(dstate, tile)}
        | {"dh": dh, "df_logit": df_logit, "di_logit": di_logit, "dB": dB, "dC": dC, "dD": dD, "dz": dz}
        | {"dinitial_state": dinitial_state, "sequences": sequences},
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


def _refuses(inputs: ScanInputs) -> str | None:
    if inputs.h.device.type != "cpu":
        return f"h is on {inputs.h.device} and it runs on the CPU only"
    if inputs.h.dtype == torch.float64:
        return "h is float64 and it computes in float32"
    return only_reverse_mode(inputs)


def _run(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    y, state = _scan(inputs.map(Tensor.float))
    return y.to(inputs.h.dtype), state


CPU_COMPILED = Backend(name="cpu_compiled", run=_run, missing_here=missing_here, refuses=_refuses)
