"""The scan's kernels alone: time forward and backward, beside the speed at which the same memory is copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from naju.bench.compare import Failed, Measured, Trial, attempt, first_try, measure_in_turn
from naju.bench.measure import Run, captured
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
    copy = Trial(lambda: target.copy_(source), None, None)
    results = measure_in_turn({(COPY, COPY): copy, **tried}, rounds)
    about: dict[str, Any] = dict(zip(("batch", "length", "d_inner", "d_state"), shape, strict=True))
    about |= {"dtype": str(dtype).removeprefix("torch."), "compulsory_bytes": compulsory_bytes(inputs)}
    copied = results[COPY, COPY]
    assert isinstance(copied, Measured)  # it allocates nothing that it could lack
    about["copy_bytes_per_s"] = 2 * copied_bytes / copied.timing.median  # read and written
    rows = [
        {"bench": "scan kernels", "backend": name, "pass": way, **about, **_result(results, name, way, about)}
        for name, way in tried
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
    results: Mapping[tuple[str, str], Measured | Failed], name: str, way: str, about: Mapping[str, Any]
) -> dict[str, Any]:
    result = results[name, way]
    if isinstance(result, Failed):
        return {"reason": result.reason}
    row = timing_row(result.timing) | {"first_call_s": result.first_call_s, "peak_bytes": result.peak_bytes}
    if way == FORWARD:
        speed = about["compulsory_bytes"] / result.timing.median
        return row | {"bytes_per_s": speed, "share_of_copy": speed / about["copy_bytes_per_s"]}
    forward, keeping = results[name, FORWARD], results[name, KEEPING]
    if way == KEEPING or isinstance(forward, Failed) or isinstance(keeping, Failed):
        return row
    backward_s = result.timing.median - keeping.timing.median
    return row | {"backward_over_forward": backward_s / forward.timing.median}


def compulsory_bytes(inputs: dict[str, Tensor]) -> int:
    """What any forward has to read and write: its sequences in, and y, which is as large as h, out."""
    sequences = [tensor for tensor in inputs.values() if tensor.dim() == 3]
    return sum(tensor.nbytes for tensor in [*sequences, inputs["h"]])
