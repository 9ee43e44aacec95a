"""`naju bench profile`: where the time of a stack of layers goes, by kernel; on a CPU, by operation."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

from naju.bench.compare import Failed, at_least_one, attempt, build_all, sizes_of
from naju.bench.measure import Run, default_device
from naju.bench.peers import check_names
from naju.bench.rows import RESULTS, print_table, save_rows, told
from naju.bench.shells import build_stack

WARM_UP = 3  # passes that may still compile and tune
SHOWN_NAME = 72  # characters; a row has all of them


@dataclass(frozen=True, kw_only=True)
class ProfileBench:
    """Time every kernel of a forward pass without gradients, or of a forward and a backward, of a pre-norm residual
    stack. The profiler slows a pass down, not its kernels."""

    models: tuple[str, ...] = ("naju", "mamba2")
    """names from naju.bench.peers"""
    lengths: tuple[int, ...] = (8192,)
    batch: int = 8
    n_layers: int = 1
    d_model: int = 256
    d_state: int = 64
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    backward: bool = False
    """a forward that keeps what a backward needs, and the backward"""
    rounds: int = 10
    """passes that the times are means of"""
    most: int = 15
    """the longest kernels are printed; all have rows"""
    device: str = field(default_factory=default_device)
    out: Path = RESULTS
    """folder for the rows"""


def run_profile_bench(bench: ProfileBench) -> None:
    check_names(at_least_one("models", bench.models, "name"))
    lengths = at_least_one("lengths", bench.lengths)
    modules = build_all(bench.models, partial(build_stack, bench))
    for length in lengths:
        for name, module in modules.items():
            path = save_rows("profile", _profile(bench, name, module, length), bench.out)
    print(f"rows appended to {path}")


def _profile(bench: ProfileBench, name: str, module: nn.Module | Failed, length: int) -> list[dict[str, Any]]:
    shape = {"batch": bench.batch, "length": length, "n_layers": bench.n_layers, "d_model": bench.d_model}
    passes = "forward and backward" if bench.backward else "forward"
    about = {"bench": "profile", "model": name, "passes": passes, **shape, "dtype": bench.dtype, **sizes_of(module)}
    print(f"\n{name}, {passes}, {told(shape)}, {bench.dtype}")
    times = module if isinstance(module, Failed) else attempt(lambda: _times(_pass(bench, module, length), bench))
    if isinstance(times, Failed):
        print(times.reason)
        return [about | {"reason": times.reason}]
    total = sum(seconds for seconds, _ in times.values())
    rows = [
        about | {"kernel": kernel, "calls": calls, "mean_s": seconds, "share": seconds / total, "rounds": bench.rounds}
        for kernel, (seconds, calls) in sorted(times.items(), key=lambda item: -item[1][0])
    ]
    lines = [{**row, "kernel": row["kernel"][:SHOWN_NAME], "ms": 1e3 * row["mean_s"]} for row in rows[: bench.most]]
    lines.append({"kernel": f"all {len(rows)}", "ms": 1e3 * total, "share": 1.0})
    print_table(lines, ["ms", "share", "calls", "kernel"])
    return rows


def _pass(bench: ProfileBench, module: nn.Module, length: int) -> Run:
    """A model that learns hands a gradient on to what it read."""
    shape = bench.batch, length, bench.d_model
    u = torch.randn(shape, device=bench.device, dtype=getattr(torch, bench.dtype), requires_grad=bench.backward)
    inputs = (u, *module.parameters())

    def run() -> object:
        with torch.set_grad_enabled(bench.backward):
            out: Tensor = module(u)
        return torch.autograd.grad(out, inputs, torch.ones_like(out)) if bench.backward else out

    return run


def _times(run: Run, bench: ProfileBench) -> dict[str, tuple[float, float]]:
    """Seconds and calls a pass of everything that ran on the device."""
    on_gpu = torch.device(bench.device).type == "cuda"
    for _ in range(WARM_UP):
        run()
    activity, device = (ProfilerActivity.CUDA, "CUDA") if on_gpu else (ProfilerActivity.CPU, "CPU")
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(bench.rounds):
            run()
        if on_gpu:
            torch.cuda.synchronize()
    times = {}
    for event in profiler.key_averages():
        if event.device_type.name == device:
            microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            times[event.key] = (microseconds / 1e6 / bench.rounds, event.count / bench.rounds)
    return times
