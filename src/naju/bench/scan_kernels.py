"""The scan's kernels alone: time forward and backward, beside the speed at which the same memory is copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from naju.bench.compare import SHORTEST_TIMED, Failed, Trial, attempt, first_try
from naju.bench.measure import Run, Timing, captured, time_in_turn
from naju.bench.rows import print_table, timing_row
from naju.bench.scan_inputs import scan_inputs
from naju.scan import naju_scan

COPIED_BYTES = 1 << 30
COPY = "copy"
# A backward cannot be captured without its forward: its time is that of both less that of a forward that keeps for it.
FORWARD, KEEPING, BOTH = WAYS = ("forward", "forward that keeps", "forward and backward")
NUMBERS = ["median_s", "share_of_copy", "backward_over_forward", "first_call_s", "peak_bytes"]
COLUMNS = ["backend", "pass", *NUMBERS, "reason"]


def kernel_rows(
    names: Sequence[str],
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    *,
    rounds: int,
    device: str,
    copied_bytes: int = COPIED_BYTES,
) -> list[dict[str, Any]]:
    """Rows of each backend's two passes; `shape` is batch, length, d_inner, d_state. On a GPU all are CUDA graphs."""
    inputs = scan_inputs(*shape, dtype=dtype, device=device)
    tried = {(name, way): attempt(partial(_try, name, way, inputs, device)) for name in names for way in WAYS}
    source, target = (torch.zeros(copied_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    runs = {f"{name} {way}": trial.run for (name, way), trial in tried.items() if isinstance(trial, Trial)}
    timings = time_in_turn({COPY: lambda: target.copy_(source), **runs}, rounds, SHORTEST_TIMED)
    about: dict[str, Any] = dict(zip(("batch", "length", "d_inner", "d_state"), shape, strict=True))
    about |= {"dtype": str(dtype).removeprefix("torch."), "compulsory_bytes": compulsory_bytes(inputs)}
    about["copy_bytes_per_s"] = 2 * copied_bytes / timings[COPY].median  # read and written
    rows = [
        {"bench": "scan kernels", "backend": name, "pass": way, **about, **_result(trial, timings, name, way, about)}
        for (name, way), trial in tried.items()
    ]
    print(f"scan kernels, {about}")
    print_table(rows, COLUMNS)
    return rows


def _try(name: str, way: str, inputs: dict[str, Tensor], device: str) -> Trial:
    run = {FORWARD: forward, KEEPING: _keeping, BOTH: forward_and_backward}[way](name, inputs)
    trial = first_try(run, device)
    return replace(trial, run=captured(run)) if torch.device(device).type == "cuda" else trial


def forward(name: str, inputs: dict[str, Tensor]) -> Run:
    return lambda: naju_scan(**inputs, backend=name)  # type: ignore[arg-type]


def _keeping(name: str, inputs: dict[str, Tensor]) -> Run:
    return forward(name, {argument: tensor.detach().requires_grad_() for argument, tensor in inputs.items()})


def forward_and_backward(name: str, inputs: dict[str, Tensor]) -> Run:
    leaves = {argument: tensor.detach().requires_grad_() for argument, tensor in inputs.items()}
    dy = torch.randn_like(inputs["h"])

    def run() -> object:
        y, _ = naju_scan(**leaves, backend=name)  # type: ignore[arg-type]
        return torch.autograd.grad(y, list(leaves.values()), dy)

    return run


def _result(
    trial: Trial | Failed, timings: Mapping[str, Timing], name: str, way: str, about: Mapping[str, Any]
) -> dict[str, Any]:
    if isinstance(trial, Failed):
        return {"reason": trial.reason}
    timing = timings[f"{name} {way}"]
    row = timing_row(timing) | {"first_call_s": trial.first_call_s, "peak_bytes": trial.peak_bytes}
    if way == FORWARD:
        speed = about["compulsory_bytes"] / timing.median
        return row | {"bytes_per_s": speed, "share_of_copy": speed / about["copy_bytes_per_s"]}
    forward, keeping = (timings.get(f"{name} {earlier}") for earlier in (FORWARD, KEEPING))
    if way == KEEPING or forward is None or keeping is None:
        return row
    return row | {"backward_over_forward": (timing.median - keeping.median) / forward.median}


def compulsory_bytes(inputs: dict[str, Tensor]) -> int:
    """What any forward has to read and write: its sequences in, and y, which is as large as h, out."""
    sequences = [tensor for tensor in inputs.values() if tensor.dim() == 3]
    return sum(tensor.nbytes for tensor in [*sequences, inputs["h"]])
