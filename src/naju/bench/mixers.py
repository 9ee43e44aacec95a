"""`naju bench mixers`: how the time and the memory of every mixer grow with the length of a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from naju.bench.measure import Timing, default_device, peak_bytes, time_in_turn
from naju.bench.rows import RESULTS, print_table, save_rows, timing_row, told
from naju.mixers import MIXERS, Mixer, build_mixer


@dataclass(frozen=True, kw_only=True)
class MixersBench:
    """Time a token of one layer of each mixer, forward without gradients, as sequences grow. What takes linear time
    takes the same for a token at every length."""

    mixers: tuple[str, ...] = tuple(MIXERS)
    """names from naju.mixers, with their default options and as many learned positions as the longest sequence has"""
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    batch: int = 1
    d_model: int = 128
    dtype: Literal["bfloat16", "float32"] = "float32"
    rounds: int = 5
    """timed rounds; every timed run follows an untimed one"""
    device: str = field(default_factory=default_device)
    out: Path = RESULTS
    """folder for the rows"""


def run_mixers_bench(bench: MixersBench) -> None:
    unknown = [name for name in bench.mixers if name not in MIXERS]
    if unknown or not bench.mixers or not bench.lengths:
        raise ValueError(f"mixers and lengths must be some, mixers of {', '.join(MIXERS)}, but there is {unknown}")
    torch.manual_seed(0)
    dtype = getattr(torch, bench.dtype)
    mixers = {name: _built(name, bench).to(bench.device, dtype).eval() for name in bench.mixers}
    rows = [row for length in sorted(bench.lengths) for row in _at_length(bench, mixers, length, dtype)]
    _print(rows)
    print(f"rows appended to {save_rows('mixers', rows, bench.out)}")


def _built(name: str, bench: MixersBench) -> Mixer:
    positions = {"max_length": max(bench.lengths)} if name == "transformer" else {}
    return build_mixer(name, bench.d_model, **positions)


def _at_length(
    bench: MixersBench, mixers: Mapping[str, Mixer], length: int, dtype: torch.dtype
) -> list[dict[str, Any]]:
    u = torch.randn(bench.batch, length, bench.d_model, device=bench.device, dtype=dtype)
    runs = {name: partial(_read, mixer, u) for name, mixer in mixers.items()}
    timings = time_in_turn(runs, bench.rounds)
    shape = {"batch": bench.batch, "length": length, "d_model": bench.d_model, "dtype": bench.dtype}
    return [
        {"bench": "mixers", "mixer": name, **shape, "state_size": mixers[name].state_size}
        | timing_row(timing)
        | {"microseconds_per_token": _of_a_token(timing, bench, length)}
        | {"peak_bytes": peak_bytes(runs[name], bench.device)}
        for name, timing in timings.items()
    ]


@torch.no_grad()
def _read(mixer: Mixer, u: Tensor) -> Tensor:
    out: Tensor = mixer(u)[0]
    return out


def _of_a_token(timing: Timing, bench: MixersBench, length: int) -> float:
    return 1e6 * timing.median / (bench.batch * length)


def _print(rows: list[dict[str, Any]]) -> None:
    """A line for each mixer: a token's time at every length, and that at the longest over that at the shortest."""
    first, lines = rows[0], dict[str, dict[str, Any]]()
    for row in rows:
        line = lines.setdefault(row["mixer"], {"mixer": row["mixer"]})
        line[f"us at {row['length']}"] = time = row["microseconds_per_token"]
        line["growth"] = time / line[f"us at {first['length']}"]
        if row["peak_bytes"] is not None:
            line["kB a token"] = row["peak_bytes"] / (row["batch"] * row["length"]) / 1e3
    shape = {name: first[name] for name in ("batch", "d_model", "dtype")}
    print(f"one layer, forward, no gradient, {told(shape)}; memory at the longest")
    columns = dict.fromkeys(f"us at {row['length']}" for row in rows)
    print_table(list(lines.values()), ["mixer", *columns, "growth", "kB a token"])
