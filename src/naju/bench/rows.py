"""Results as rows: what was measured, on what machine, with which versions."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import naju
from naju.bench.measure import Run, Timing, peak_bytes, time_in_turn

RESULTS = Path("benchmarks/results")
PATH_OPTIONS = ("--out", "--rows", "--plot", "--picture")  # of the commands that write rows
RATES = {"TFLOP/s": ("flop_per_s", 1e12), "GB/s": ("bytes_per_s", 1e9)}
# Packages whose kernels a row may have timed.
KERNEL_PACKAGES = ("triton", "mamba_ssm", "causal_conv1d", "fla-core", "mlstm_kernels")


def machine() -> dict[str, Any]:
    """Everything about this machine that a timing depends on; no name and no path."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": package_version("transformers"),
        "naju": naju.__version__,
    } | {name: found for name in KERNEL_PACKAGES if (found := package_version(name)) is not None}


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def timing_row(timing: Timing) -> dict[str, Any]:
    return {"median_s": timing.median, "spread_s": list(timing.spread), "rounds": len(timing.seconds)}


def give_or_take(row: Mapping[str, Any], key: str, scale: float = 1.0) -> str:
    """A number of a timed row with half of the distance between the quartiles, in per cent of their median."""
    first, third = row["spread_s"]
    return f"{_shown(float(row[key] * scale))} ±{50 * (third - first) / row['median_s']:.1f}%"


def with_spread(rows: Iterable[Mapping[str, Any]], key: str) -> list[dict[str, Any]]:
    """Timed rows as they are printed."""
    return [{**row, **told_rates(row), key: give_or_take(row, key)} for row in rows]


def told_rates(row: Mapping[str, Any]) -> dict[str, float]:
    """What a row achieved, by the heading of its column."""
    return {heading: row[key] / unit for heading, (key, unit) in RATES.items() if key in row}


def rows_by_length(
    run_at: Callable[[int], Run],
    lengths: Sequence[int],
    rounds: int,
    about: Mapping[str, Any],
    sizes: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Time and memory a token of a run of each length, printed as well; runs have a batch of 1 and no gradient."""
    rows = []
    for length in lengths:
        run = run_at(length)
        timing, peak = time_in_turn({length: run}, rounds)[length], peak_bytes(run)
        row = {**about, "batch": 1, "length": length, **(sizes or {}), **timing_row(timing)}
        row["microseconds_per_token"] = timing.median / length * 1e6
        row["peak_bytes_per_token"] = None if peak is None else peak / length
        rows.append(row)
    print("\nforward, no gradient, batch 1")
    lines = with_spread(rows, "microseconds_per_token")
    print_table(lines, ["length", "microseconds_per_token", "peak_bytes_per_token"])
    return rows


def save_rows(name: str, rows: Iterable[Mapping[str, Any]], folder: Path) -> Path:
    """Append rows to `folder/name.jsonl`, each with the machine, the time and the command that made it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    about = {"when": datetime.now(UTC).isoformat(timespec="seconds"), "command": _command(), "machine": machine()}
    with path.open("a") as file:
        file.writelines(json.dumps({**row, **about}) + "\n" for row in rows)
    return path


def told(shape: Mapping[str, Any]) -> str:
    """As one says it: batch 2, length 64."""
    return ", ".join(f"{name} {value}" for name, value in shape.items())


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Columns of a handful of rows, empty ones left out; numbers have three digits, or more before the point."""
    columns = [column for column in columns if any(row.get(column) is not None for row in rows)]
    cells = [columns, *([_shown(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e3 <= abs(value) < 1e12 else f"{value:.3g}"
    return str(value)


def _command() -> str:
    """As it was given, but for files and folders, which are somebody's own."""
    kept, given = ["naju"], iter(sys.argv[1:])
    for word in given:
        option, equals, _ = word.partition("=")
        if option not in PATH_OPTIONS:
            kept.append(word)
        elif not equals:
            next(given, None)  # the path is the word after it
    return " ".join(kept)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
