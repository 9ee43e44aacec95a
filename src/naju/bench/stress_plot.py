"""The picture of `naju bench stress`: error against length, a panel for each dtype and kind of gates.

matplotlib is imported when the picture is drawn and writes straight to a file: no display, no global figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

EXACT = 1e-17  # smaller errors, none among them, are drawn here


def draw_drift(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Outputs as solid lines, states as dashed ones, a colour for each backend; a row of panels shares its scale."""
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.get("y") is not None and row.get("state") is not None]
    if not shown:
        raise ValueError(f"nothing was measured, so there is no picture to draw into {path}")
    dtypes, gates, names = (list(dict.fromkeys(row[key] for row in shown)) for key in ("dtype", "gates", "backend"))
    figure = Figure(figsize=(3.2 * len(gates) + 1.5, 2.4 * len(dtypes) + 0.6), layout="constrained")
    panels = figure.subplots(len(dtypes), len(gates), squeeze=False, sharex=True, sharey="row")
    for row_of_panels, dtype in zip(panels, dtypes, strict=True):
        row_of_panels[0].set_ylabel(f"{dtype}\nrelative error")
        for axes, kind in zip(row_of_panels, gates, strict=True):
            _draw_panel(axes, [row for row in shown if row["dtype"] == dtype and row["gates"] == kind], names)
    for axes, kind in zip(panels[0], gates, strict=True):
        axes.set_title(f"gates {kind}")
    for axes in panels[-1]:
        axes.set_xlabel("tokens")
    figure.legend(handles=_legend(names), loc="outside lower center", ncols=len(names) + 2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_panel(axes: Any, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        own = [row for row in rows if row["backend"] == name]
        for tensor, style in (("y", "-"), ("state", "--")):
            points = [(row["length"], max(row[tensor], EXACT)) for row in own]
            if points:
                axes.plot(*zip(*points, strict=True), style, color=f"C{index}", marker=".", linewidth=1.2)
    axes.set(xscale="log", yscale="log")
    axes.grid(visible=True, which="major", alpha=0.3)


def _legend(names: Sequence[str]) -> list[Any]:
    from matplotlib.lines import Line2D

    colours = [Line2D([], [], color=f"C{index}", label=name) for index, name in enumerate(names)]
    return [*colours, Line2D([], [], color="grey", label="y"), Line2D([], [], color="grey", ls="--", label="state")]
