"""`naju bench scan`: the operator's backends against the plain loop, and cost per token; on a GPU, its kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from naju.bench.measure import Run, default_device, time_in_turn
from naju.bench.rows import RATES, RESULTS, print_table, rows_by_length, save_rows, timing_row, told, with_spread
from naju.bench.scan_inputs import scan_inputs
from naju.bench.scan_kernels import forward, forward_and_backward, kernel_rows
from naju.bench.work import rates, work_of_scan
from naju.scan import backends


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
    inputs, work = scan_inputs(*shape.values()), work_of_scan(**shape, itemsize=torch.float32.itemsize, backward=True)
    contenders = {name: forward_and_backward(name, inputs) for name in names if name != "associative"}
    timings = time_in_turn(contenders, bench.rounds)
    reference = timings["reference"].median
    rows = [
        {"bench": "scan forward+backward", "backend": name, **shape, "dtype": "float32", **work}
        | timing_row(timing)
        | {"times_faster_than_reference": reference / timing.median}
        for name, timing in timings.items()
    ]
    rows = [row | rates(row) for row in rows]
    print(f"forward + backward, float32, {told(shape)}")
    print_table(with_spread(rows, "median_s"), ["backend", "median_s", "times_faster_than_reference", *RATES])
    return rows


def _growing(bench: ScanBench) -> list[dict[str, Any]]:
    def at(length: int) -> Run:
        return forward("auto", scan_inputs(1, length, bench.d_inner, bench.d_state))

    about = {"bench": "scan forward by length", "backend": "auto"}
    sizes = {"d_inner": bench.d_inner, "d_state": bench.d_state, "dtype": "float32"}
    return rows_by_length(at, bench.lengths, bench.rounds, about, sizes)
