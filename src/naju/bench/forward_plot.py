"""The picture of `naju bench forward`: time against length, both on logarithmic axes.

matplotlib is imported when the picture is drawn and writes straight to a file: no display, no global figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_times(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One panel a mode, one line a model; `rows` without a time are left out."""
    from matplotlib.figure import Figure

    timed = [row for row in rows if "median_s" in row]
    modes = list(dict.fromkeys(row["mode"] for row in timed))
    if not modes:
        raise ValueError(f"nothing was timed, so there is no picture to draw into {path}")
    lengths = sorted({row["length"] for row in timed})
    figure = Figure(figsize=(6.5 * len(modes), 5), layout="constrained")
    all_axes = figure.subplots(1, len(modes), squeeze=False, sharey=True)[0]
    for axes, mode in zip(all_axes, modes, strict=True):
        for name, points in _lines(timed, mode).items():
            ours = name.startswith("naju")
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=3 if ours else 1.3, label=name)
        axes.set(xscale="log", yscale="log", xlabel="length", ylabel="ms a batch", title=f"forward, {mode}")
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths], minor=False)
        axes.set_xticks([], minor=True)
        axes.grid(visible=True, which="both", alpha=0.25)
        axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _lines(rows: Sequence[Mapping[str, Any]], mode: str) -> dict[str, list[tuple[int, float]]]:
    """(length, milliseconds) of every model that was timed in this mode."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["mode"] == mode:
            lines.setdefault(row["model"], []).append((row["length"], row["median_s"] * 1e3))
    return lines
