"""Two pictures: which (retention, write) pairs each kind of recurrence can choose, and what a layer keeps of an input.

matplotlib is imported when a picture is drawn and writes straight to a file: no display, no global figure.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from naju.analysis.gates import FAMILIES, Family, largest_write
from naju.analysis.memory_kernel import effective_memory, memory_kernel, retention_to_end, tau_e_from_logit
from naju.analysis.observe import ScanRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PathLike = str | os.PathLike[str]
HOLDING = 0.999
# Corners of the square: retention, write, what they mean, and where the word goes (points away, alignment).
CORNERS = (
    (1, 0, "hold", (8, -3), "left"),
    (0, 1, "overwrite", (0, 7), "left"),
    (1, 1, "hold and write", (0, 7), "right"),
)
GATE_TICKS = (0.01, 0.1, 0.5, 0.9, 0.99, 0.999)


def draw_reachable(path: PathLike) -> Path:
    """The (retention, write) pairs open to a ZOH SSM, a complementary gate, the RG-LRU and Naju, side by side."""
    path = _in_a_folder(path)
    figure = _figure(width=13.0, height=4.3)
    all_axes = figure.subplots(1, len(FAMILIES), sharex=True, sharey=True)
    for axes, (name, family) in zip(all_axes, FAMILIES.items(), strict=True):
        _draw_family(axes, name, family)
    all_axes[0].set_ylabel("write")
    figure.suptitle("What one token can choose: how much of the state to keep, how strongly to write")
    figure.savefig(path)
    return path


def draw_memory(run: ScanRun, path: PathLike, *, channel: int | None = None) -> Path:
    """A run's gates, one channel's kernel, and what is left of each token's write at the end.

    Channels are sorted by how much they keep on average, most at the bottom. `channel` is the one whose kernel is
    drawn; None takes the one that keeps most.
    """
    path = _in_a_folder(path)
    order = [run.channels[row] for row in _mean_log_retention(run).argsort().tolist()]
    run = run.select(order)
    channel = order[-1] if channel is None else channel
    figure = _figure(width=11.5, height=7.6)
    (forget, write), (kernel, left) = figure.subplots(2, 2)
    tau = tau_e_from_logit(run.f_logit).median().item()
    _draw_gate(forget, run.f_logit, f"Forget gate f (median time constant {tau:.3g} tokens)")
    _draw_gate(write, run.i_logit, "Write gate i")
    _draw_kernel(kernel, run.select([channel]), channel)
    _draw_retention(left, run)
    figure.savefig(path)
    return path


def _draw_family(axes: Axes, name: str, family: Family) -> None:
    retention = torch.linspace(0.0, 1.0, 401, dtype=torch.float64, device="cpu")
    limit = largest_write(name, retention)
    axes.plot(retention.numpy(), limit.numpy(), color="C0", linewidth=2.5, clip_on=False)
    if family.smaller_writes:
        axes.fill_between(retention.numpy(), limit.numpy(), color="C0", alpha=0.3, linewidth=0)
    else:
        _draw_other_rates(axes)
    for retained, written, word, away, side in CORNERS:
        axes.plot(retained, written, "o", color="black", markersize=6, clip_on=False, zorder=5)
        axes.annotate(word, (retained, written), away, textcoords="offset points", ha=side, fontsize=9)
    relation = "≤" if family.smaller_writes else "="
    room = largest_write(name, HOLDING).item()
    axes.set_title(family.label, pad=24, fontweight="bold")
    axes.set_xlabel(f"retention\n(at {HOLDING:g}: write {relation} {room:.2g})")
    axes.set(xlim=(0, 1), ylim=(0, 1), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1), aspect="equal")


def _draw_other_rates(axes: Axes) -> None:
    """ZOH lines for other A than -1, at B = 1: each starts at Δ = 0 in (1, 0), where nothing is written."""
    for rate in (2, 4):
        axes.plot((1.0, 0.0), (0.0, 1.0 / rate), color="C0", linewidth=1)
    for rate in (1, 2, 4):
        place = (0.3, 0.7 / rate)
        axes.annotate(f"A = −{rate}", place, (3, 3), textcoords="offset points", fontsize=8, color="C0")


def _draw_gate(axes: Axes, logit: Tensor, title: str) -> None:
    """Gates coloured on the logit scale, which tells 0.99 from 0.999 as it tells 0.5 from 0.9."""
    ticks = torch.tensor(GATE_TICKS, dtype=torch.float64, device="cpu").logit().tolist()
    low, high = ticks[0], ticks[-1]
    shown = logit.clamp(low, high).numpy()
    image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap="viridis", vmin=low, vmax=high)
    bar = axes.figure.colorbar(image, ax=axes, ticks=ticks, extend="both")
    bar.ax.set_yticklabels([f"{value:g}" for value in GATE_TICKS])
    axes.set(title=title, xlabel="token", ylabel="channel, sorted by retention", yticks=())


def _draw_kernel(axes: Axes, run: ScanRun, channel: int) -> None:
    kernel = memory_kernel(run)[0].numpy()
    # A few large entries would leave the rest white; the colours end where the largest hundredth begins.
    sizes = np.abs(kernel[kernel != 0])
    most = np.quantile(sizes, 0.99) if sizes.size else 1.0
    image = axes.imshow(kernel, interpolation="nearest", cmap="RdBu_r", vmin=-most, vmax=most)
    axes.figure.colorbar(image, ax=axes, extend="both")
    lag = effective_memory(run).lag.item()
    axes.set(title=f"Kernel K[n, m] of channel {channel}\n90 % of |K| within {lag} tokens")
    axes.set(xlabel="written at token m", ylabel="read at token n")


def _draw_retention(axes: Axes, run: ScanRun) -> None:
    left = retention_to_end(run).sort(dim=0).values.numpy()
    rows = left.shape[0]
    tokens = range(run.length)
    for outside, opacity, label in ((0, 0.2, "all channels"), (rows // 4, 0.4, "middle half")):
        low, high = left[outside], left[rows - 1 - outside]
        axes.fill_between(tokens, low, high, color="C0", alpha=opacity, linewidth=0, label=label)
    axes.plot(tokens, left[rows // 2], color="C0", label="median channel")
    axes.set(title="What is left of each write after the last token")
    axes.set(xlabel="written at token", ylabel="retention", xlim=(0, max(run.length - 1, 1)), ylim=(0, 1.02))
    axes.legend(loc="upper left")


def _mean_log_retention(run: ScanRun) -> Tensor:
    return F.logsigmoid(run.f_logit).mean(1)


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib; install it with: pip install 'naju[report]'") from error
    return Figure(figsize=(width, height), layout="constrained", dpi=130)


def _in_a_folder(path: PathLike) -> Path:
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"path must lie in a folder that exists, but {path.parent} does not")
    return path
