"""The demo's picture: what both models can do, and how they learned it.

matplotlib is imported when the picture is drawn and writes straight to a file: no display, no global figure.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"naju": "#1b6ca8", "coupled": "#d9822b"}
SMOOTHING = 0.95


def why_not() -> str | None:
    """Why no picture can be drawn here, or None."""
    found = importlib.util.find_spec("matplotlib")
    return None if found else "matplotlib is not installed; pip install 'naju[report]' brings it"


def draw(
    path: Path,
    accuracy: Mapping[tuple[str, str, int], float],
    losses: Mapping[str, Sequence[float]],
    *,
    chance: float,
) -> None:
    """`accuracy[mixer, task, length]` as bars beside the chance level, `losses[mixer]` as smoothed curves."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    bars, curves = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_bars(bars, accuracy, chance)
    _draw_curves(curves, losses)
    figure.savefig(path, dpi=150)


def _draw_bars(axes: Axes, accuracy: Mapping[tuple[str, str, int], float], chance: float) -> None:
    columns = list(dict.fromkeys((task, length) for _, task, length in accuracy))
    width = 0.8 / len(COLOURS)
    for offset, (name, colour) in enumerate(COLOURS.items()):
        places = [place + offset * width for place in range(len(columns))]
        drawn = axes.bar(places, [accuracy[name, *column] for column in columns], width, color=colour, label=name)
        axes.bar_label(drawn, fmt="%.2f", fontsize=8)
    axes.axhline(chance, color="grey", linestyle="--", linewidth=1, label="chance")
    centres = [place + width / 2 for place in range(len(columns))]
    axes.set_xticks(centres, [f"{task}\nlength {length}" for task, length in columns])
    axes.set(ylabel="accuracy", ylim=(0, 1.2), title="Holding and overwriting at once")
    axes.legend(loc="upper center", ncols=len(COLOURS) + 1)


def _draw_curves(axes: Axes, losses: Mapping[str, Sequence[float]]) -> None:
    for name, colour in COLOURS.items():
        smooth = accumulate(losses[name], lambda kept, loss: SMOOTHING * kept + (1 - SMOOTHING) * loss)
        axes.plot(range(1, len(losses[name]) + 1), list(smooth), color=colour, label=name)
    axes.set(xlabel="training step", ylabel="training loss, smoothed", title="Same sequences, same budget")
    axes.legend()
