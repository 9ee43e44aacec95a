"""The scan's kernels alone: time forward and backward, beside the speed at which the same memory is copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from naju.bench.compare import Failed, Measured, Trial, attempt, first_try, measure_in_turn, measured_row
from naju.bench.measure import Run, captured
from naju.bench.rows import RATES, give_or_take, print_table, told, told_rates
from naju.bench.scan_inputs import scan_inputs
from naju.bench.work import rates, work_of_scan
from naju.scan import naju_scan

COPIED_BYTES = 1 << 30
COPY = "copy"
# A backward cannot be captured without its forward: its time is that of both less that of a forward that keeps for it.
FORWARD, KEEPING, BOTH = WAYS = ("forward", "forward that keeps", "forward and backward")
COLUMNS = ["backend", "pass", "ms", "of copy", "backward", "training", *RATES, "first s", "MB", "reason"]


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
    copy = Trial(lambda: target.copy_(source), None, None)
    results = measure_in_turn({(COPY, COPY): copy, **tried}, rounds)
    copied = results[COPY, COPY]
    assert isinstance(copied, Measured)  # it allocates nothing that it could lack
    copy_bytes_per_s = 2 * copied_bytes / copied.timing.median  # read and written
    sizes = dict(zip(("batch", "length", "d_inner", "d_state"), shape, strict=True))
    about = {"dtype": str(dtype).removeprefix("torch."), "copy_bytes_per_s": copy_bytes_per_s}
    rows = []
    for name, way in tried:
        work = work_of_scan(**sizes, itemsize=dtype.itemsize, backward=way == BOTH)
        row = {"bench": "scan kernels", "backend": name, "pass": way, **sizes, **about, **work}
        rows.append(row | _result(results, name, way, row))
    print(f"scan kernels, {told(sizes)}, {about['dtype']}; a copy moves {copy_bytes_per_s / 1e9:,.0f} GB/s")
    print("± is half the distance between the quartiles; backward and training (both passes) are over the forward")
    print_table([_line(row) for row in rows], COLUMNS)
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
    results: Mapping[tuple[str, str], Measured | Failed], name: str, way: str, about: Mapping[str, Any]
) -> dict[str, Any]:
    result = results[name, way]
    if isinstance(result, Failed):
        return {"reason": result.reason}
    row = measured_row(result)
    row |= rates({**about, **row})
    if way == FORWARD:
        return row | {"share_of_copy": row["bytes_per_s"] / about["copy_bytes_per_s"]}
    forward, keeping = results[name, FORWARD], results[name, KEEPING]
    if way == KEEPING or isinstance(forward, Failed) or isinstance(keeping, Failed):
        return row
    forward_s, both_s = forward.timing.median, result.timing.median
    backward_s = both_s - keeping.timing.median
    # What a forward does for the backward counts in the second alone.
    return row | {"backward_over_forward": backward_s / forward_s, "training_over_forward": both_s / forward_s}


def _line(row: Mapping[str, Any]) -> dict[str, Any]:
    line = {"backend": row["backend"], "pass": row["pass"], "reason": row.get("reason"), **told_rates(row)}
    if "median_s" in row:
        line |= {"ms": give_or_take(row, "median_s", 1e3), "first s": row["first_call_s"]}
        line["MB"] = None if row["peak_bytes"] is None else row["peak_bytes"] / 1e6
    told_as = {"of copy": "share_of_copy", "backward": "backward_over_forward", "training": "training_over_forward"}
    return line | {heading: row.get(key) for heading, key in told_as.items()}
