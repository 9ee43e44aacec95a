"""`naju bench scan`: the operator's backends against the plain loop, and cost per token; on a GPU, its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from naju.bench.measure import default_device, peak_bytes, time_in_turn
from naju.bench.rows import RESULTS, print_table, save_rows, timing_row, told
from naju.bench.scan_inputs import scan_inputs
from naju.bench.scan_kernels import kernel_rows
from naju.scan import backends, naju_scan


@dataclass(frozen=True, kw_only=True)
class ScanBench:
    """Time every scan backend that can run here, forward and backward, against `reference`; then grow the length.

    On a GPU instead: each kernel's forward and backward, and what share of the memory's speed they reach.
    """

    batch: int = 2
    length: int = 2048
    d_inner: int = 256
    d_state: int = 64
    rounds: int = 7
    """timed rounds; every timed run follows an untimed one"""
    lengths: tuple[int, ...] = field(default=(1024, 4096, 16384, 65536))
    """lengths at which time and memory per token are measured (batch 1, forward, no gradient)"""
    device: str = field(default_factory=default_device)
    kernels: tuple[str, ...] = ("triton_chunked", "cuda_sequential", "triton_sequential")
    """backends that are timed on a GPU"""
    kernel_shape: tuple[int, int, int, int] = (8, 8192, 512, 64)
    """batch, length, d_inner and d_state on a GPU"""
    kernel_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    out: Path = RESULTS
    """folder for the rows"""


def run_scan_bench(bench: ScanBench) -> None:
    if torch.device(bench.device).type == "cuda":
        dtype = getattr(torch, bench.kernel_dtype)
        rows = kernel_rows(bench.kernels, bench.kernel_shape, dtype, rounds=bench.rounds, device=bench.device)
    else:
        names = [name for name, missing in backends().items() if missing is None]
        rows = _against_reference(bench, names) + _growing(bench)
    print(f"rows appended to {save_rows('scan', rows, bench.out)}")


def _against_reference(bench: ScanBench, names: list[str]) -> list[dict[str, Any]]:
    shape = {"batch": bench.batch, "length": bench.length, "d_inner": bench.d_inner, "d_state": bench.d_state}
    # `associative` holds every state at once and is there to be read, not to be fast.
    inputs = scan_inputs(bench.batch, bench.length, bench.d_inner, bench.d_state, grad=True)
    contenders = {name: _training_step(inputs, name) for name in names if name != "associative"}
    timings = time_in_turn(contenders, bench.rounds)
    reference = timings["reference"].median
    rows = [
        {"bench": "scan forward+backward", "backend": name, **shape, "dtype": "float32"}
        | timing_row(timing)
        | {"times_faster_than_reference": reference / timing.median}
        for name, timing in timings.items()
    ]
    print(f"forward + backward, float32, {told(shape)}")
    print_table(rows, ["backend", "median_s", "times_faster_than_reference"])
    return rows


def _growing(bench: ScanBench) -> list[dict[str, Any]]:
    rows = []
    for length in bench.lengths:
        inputs = scan_inputs(1, length, bench.d_inner, bench.d_state)

        def run(inputs: dict[str, Tensor] = inputs) -> object:
            return naju_scan(**inputs)  # type: ignore[arg-type]

        timing = time_in_turn({"auto": run}, bench.rounds)["auto"]
        peak = peak_bytes(run)
        shape = {"batch": 1, "length": length, "d_inner": bench.d_inner, "d_state": bench.d_state}
        row = {"bench": "scan forward by length", "backend": "auto", **shape, "dtype": "float32"} | timing_row(timing)
        row["microseconds_per_token"] = timing.median / length * 1e6
        row["peak_bytes_per_token"] = None if peak is None else peak / length
        rows.append(row)
    print("\nforward, no gradient, batch 1")
    print_table(rows, ["length", "microseconds_per_token", "peak_bytes_per_token"])
    return rows


def _training_step(inputs: dict[str, Tensor], backend: str) -> Callable[[], object]:
    cotangent = torch.randn(inputs["h"].shape, generator=torch.Generator().manual_seed(1))

    def step() -> object:
        y, _ = naju_scan(**inputs, backend=backend)  # type: ignore[arg-type]
        return torch.autograd.grad(y, list(inputs.values()), cotangent)

    return step
