"""The picture of `naju bench forward`: time a token against length, both on logarithmic axes.

A token's time, for a batch's grows a hundredfold along the axis, so that lines 10 % apart would be one.

matplotlib is imported when the picture is drawn and writes straight to a file: no display, no global figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

# The first seven are Okabe and Ito's, which the colour-blind tell apart; no two models share a marker.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#000000", "#CC79A7", "#56B4E9", "#E69F00", "#999999", "#882255")
MARKERS = "os^vDP*Xd<>phH8"
DASHES = ("-", "--", ":")


def draw_times(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """A panel for each mode, a line for each model; `rows` without a time are left out."""
    from matplotlib.figure import Figure

    timed = [row for row in rows if "median_s" in row]
    modes = list(dict.fromkeys(row["mode"] for row in timed))
    if not modes:
        raise ValueError(f"nothing was timed, so there is no picture to draw into {path}")
    figure = Figure(figsize=(2 + 5 * len(modes), 5), layout="constrained")
    figure.suptitle(title, fontsize=10)
    all_axes = figure.subplots(1, len(modes), squeeze=False, sharey=True)[0]
    lines: dict[str, Any] = {}
    for axes, mode in zip(all_axes, modes, strict=True):
        lines |= _draw_mode(axes, [row for row in timed if row["mode"] == mode], _styles(timed))
        axes.set_title(mode, fontsize=10)
    all_axes[0].set_ylabel("nanoseconds a token")
    slowest_first = sorted(lines.values(), key=lambda line: -line.get_ydata()[-1])
    figure.legend(
        handles=slowest_first,
        loc="outside right center",
        fontsize=9,
        title="N: numbers kept\na channel",
        title_fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _styles(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """How the line of each model looks, in every panel: variants of one share its colour."""
    markers = dict(zip(dict.fromkeys(row["model"] for row in rows), cycle(MARKERS), strict=False))
    families: dict[str, list[str]] = {}
    for model in markers:
        families.setdefault(model.partition("-")[0], []).append(model)
    return {
        model: {"color": colour, "linestyle": dashes, "marker": markers[model], "linewidth": 1.4}
        for variants, colour in zip(families.values(), cycle(COLOURS), strict=False)
        for model, dashes in zip(variants, cycle(DASHES), strict=False)
    }


def _draw_mode(axes: Any, rows: Sequence[Mapping[str, Any]], styles: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The line of each model that was timed in this mode."""
    from matplotlib.ticker import LogLocator

    lines = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        own = sorted((row for row in rows if row["model"] == model), key=lambda row: row["length"])
        nanoseconds = [row["median_s"] * 1e9 / row["batch"] / row["length"] for row in own]
        d_state = own[0]["d_state"]
        label = model if d_state is None else f"{model} (N {d_state})"
        (lines[model],) = axes.plot([row["length"] for row in own], nanoseconds, label=label, **styles[model])
    lengths = sorted({row["length"] for row in rows})
    axes.set(xscale="log", yscale="log", xlabel="length of a sequence")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], minor=False)
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(visible=True, which="both", alpha=0.25)
    return lines
