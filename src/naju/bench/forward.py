"""`naju bench forward`: time and memory of a stack of layers against its peers, as sequences grow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from naju.bench.compare import (
    COMPILE_MODE,
    Failed,
    Mode,
    build_all,
    compare,
    default_modes,
    given_or_default,
    print_comparison,
    result_rows,
    sizes_of,
)
from naju.bench.forward_plot import draw_times
from naju.bench.measure import Run, default_device
from naju.bench.peers import USUAL, check_names
from naju.bench.rows import RESULTS, save_rows, told
from naju.bench.shells import build_stack
from naju.bench.work import rates, work_of

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True, kw_only=True)
class ForwardBench:
    """Time the forward pass of a pre-norm residual stack of each mixer, without gradients, at growing lengths."""

    models: tuple[str, ...] = USUAL
    """names from naju.bench.peers; one that cannot run here becomes a row with the reason"""
    lengths: tuple[int, ...] | None = None
    """by default 512 to 32,768 on a GPU"""
    batch: int = 8
    n_layers: int = 4
    d_model: int = 256
    d_state: int = 64
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    modes: tuple[Mode, ...] = field(default_factory=default_modes)
    compile_mode: str = COMPILE_MODE
    """torch.compile's, for the mode "compiled"; max-autotune tunes for minutes at every shape, default is quicker"""
    against: str = "mamba2"
    """the peer that every time is divided by"""
    rounds: int = 20
    """timed rounds, by default the paper's 20 after 5 untimed ones (always a quarter as many); every timed run follows
    an untimed one"""
    device: str = field(default_factory=default_device)
    plot: Path | None = None
    """draw a token's time against length into this file"""
    out: Path = RESULTS
    """folder for the rows"""


def run_forward_bench(bench: ForwardBench) -> None:
    check_names((*bench.models, bench.against))
    lengths = given_or_default("lengths", bench.lengths, LENGTHS, bench.device)
    modules = build_all(bench.models, partial(build_stack, bench))
    rows = []
    for length in lengths:
        measured = _at_length(bench, modules, length)
        path = save_rows("forward", measured, bench.out)
        rows += measured
    print(f"rows appended to {path}")
    if bench.plot is not None:
        shape = {name: getattr(bench, name) for name in ("batch", "n_layers", "d_model", "dtype")}
        draw_times(rows, f"Forward, {told(shape)}", bench.plot)
        print(f"picture in {bench.plot}")


def _at_length(bench: ForwardBench, modules: Mapping[str, nn.Module | Failed], length: int) -> list[dict[str, Any]]:
    shape: dict[str, Any] = {"batch": bench.batch, "length": length, "n_layers": bench.n_layers}
    shape |= {"d_model": bench.d_model, "dtype": bench.dtype}
    u = torch.randn(bench.batch, length, bench.d_model, device=bench.device, dtype=getattr(torch, bench.dtype))

    def make(module: nn.Module) -> Run:
        def run() -> object:
            with torch.no_grad():
                return module(u)

        return run

    results = compare(
        modules, make, bench.modes, rounds=bench.rounds, device=bench.device, compile_mode=bench.compile_mode
    )
    sizes = {"tokens": bench.batch * length, "length": length, "d_model": bench.d_model, "n_layers": bench.n_layers}

    def about(name: str) -> dict[str, Any]:
        return {**shape, **sizes_of(modules[name]), **work_of(modules[name], **sizes, itemsize=u.itemsize)}

    rows = result_rows(results, about, bench.against, bench.compile_mode)
    rows = [{"bench": "forward", **row, **rates(row)} for row in rows]
    print(f"\nforward, no gradient, {told(shape)}")
    print_comparison(rows, bench.against, "median_s", "ms", 1e3)
    return rows
