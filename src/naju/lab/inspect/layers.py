"""What one layer does along an example: its gates, what it has kept of each write, how far back it looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from naju.analysis import ScanRun, effective_memory, layer_input, observe_layer, retention_to_end, tau_e_from_logit
from naju.lab.inspect.events import ANSWER, STALE, Event
from naju.lab.pages import Bars, Chart, Line, Point, heat_image, linear
from naju.mixers.naju import NajuMixer

GATE_TICKS = (0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
CHANNELS_SHOWN = 32
BINS = 24
STYLES = {ANSWER: 1, STALE: 33}  # of the colours that these writes have below a strip, with markers that a line shows


@dataclass(frozen=True)
class LayerView:
    number: int
    channels: tuple[int, ...]  # the rows of the images, from the one that keeps least to the one that keeps most
    forget: str
    write: str
    retained: str
    time_constant: float  # the median gate's
    kept: Chart
    memory: Chart


def gated_layers(model: nn.Module, chosen: Sequence[int]) -> dict[int, NajuMixer]:
    """The chosen layers (none named: all) by number; a sentence where there are no gates to show."""
    mixers = [block.mixer for block in model.backbone.blocks]  # type: ignore[union-attr]
    gated = {number: mixer for number, mixer in enumerate(mixers) if isinstance(mixer, NajuMixer)}
    if not gated:
        name = type(mixers[0]).__name__
        raise ValueError(f"run must be of a model with forget and write gates, but its layers are of {name}")
    strangers = [number for number in chosen if number not in gated]
    if strangers:
        raise ValueError(f"layers must name some of {', '.join(map(str, gated))}, but holds {strangers[0]}")
    return {number: mixer for number, mixer in gated.items() if number in (chosen or gated)}


def view_layer(
    model: nn.Module, number: int, mixer: NajuMixer, tokens: Tensor, events: Sequence[Event], channels: Sequence[int]
) -> LayerView:
    run = observe_layer(mixer, layer_input(model, mixer, tokens.unsqueeze(0)))
    shown = _sorted_by_retention(run.select(channels) if channels else _spread_out(run))
    return LayerView(
        number,
        shown.channels,
        _gate_image(shown.f_logit),
        _gate_image(shown.i_logit),
        heat_image(retention_to_end(shown), 0.0, 1.0),
        tau_e_from_logit(run.f_logit).median().item(),
        _kept_chart(number, run, events),
        _memory_chart(number, run),
    )


def gate_scale() -> tuple[str, list[tuple[float, str]]]:
    """The gates' colours from left to right, and where (in percent) each of GATE_TICKS lies."""
    ticks = torch.tensor(GATE_TICKS, dtype=torch.float64).logit()
    low, high = ticks[0].item(), ticks[-1].item()
    colours = heat_image(torch.linspace(low, high, 256, dtype=torch.float64).unsqueeze(0), low, high)
    places = (100 * (ticks - low) / (high - low)).tolist()
    return colours, [(round(place, 1), f"{tick:g}") for place, tick in zip(places, GATE_TICKS, strict=True)]


def _gate_image(logit: Tensor) -> str:
    """On the logit scale, which tells 0.99 from 0.999 as it tells 0.5 from 0.9."""
    ticks = torch.tensor(GATE_TICKS, dtype=torch.float64).logit()
    return heat_image(logit, ticks[0].item(), ticks[-1].item())


def _kept_point(event: Event, kept: float) -> Point:
    title = f"{' '.join(event.words)}: {kept:.3f}"
    return Point(title=title, label=event.value, style=STYLES[event.role], x=event.last, y=kept)


def _kept_chart(number: int, run: ScanRun, events: Sequence[Event]) -> Chart:
    """What is left of each write at the end: the median over all channels, and the middle half of them."""
    left = retention_to_end(run)[:, [event.last for event in events]]  # (c, e)
    low, middle, high = torch.quantile(left, torch.tensor([0.25, 0.5, 0.75], dtype=left.dtype), dim=0).tolist()
    places = [event.last for event in events]
    asked = [_kept_point(event, kept) for event, kept in zip(events, middle, strict=True) if event.role in STYLES]
    line = Line(
        title="median over all channels",
        style=0,
        points=list(zip(places, middle, strict=True)),
        band=list(zip(places, low, high, strict=True)),
    )
    return Chart(
        title=f"Layer {number}: what is left of each write at the end",
        x_label="token of the write",
        y_label="retention",
        x=linear(0.0, run.length),
        y=linear(-0.03, 1.06, parts=6),
        lines=[line],
        points=asked,
        width=560,
    )


def _memory_chart(number: int, run: ScanRun) -> Chart:
    lags = effective_memory(run).lag.double()
    counts = torch.histc(lags, bins=BINS, min=0.0, max=float(run.length))
    edges = torch.linspace(0.0, run.length, BINS + 1).tolist()
    return Chart(
        title=f"Layer {number}: how far back its {len(lags)} channels look",
        x_label=f"tokens that hold 90 % of |K|; median {lags.median():.0f}",
        y_label="channels",
        x=linear(0.0, run.length),
        y=linear(0.0, counts.max().item()),
        bars=Bars(edges, counts.tolist()),
        width=560,
    )


def _spread_out(run: ScanRun) -> ScanRun:
    """Channels at even steps from the one that keeps least to the one that keeps most."""
    order = _mean_log_retention(run).argsort()
    steps = torch.linspace(0, len(order) - 1, min(CHANNELS_SHOWN, len(order))).round().long()
    return run.select([run.channels[place] for place in order[steps].tolist()])


def _sorted_by_retention(run: ScanRun) -> ScanRun:
    return run.select([run.channels[place] for place in _mean_log_retention(run).argsort().tolist()])


def _mean_log_retention(run: ScanRun) -> Tensor:
    return F.logsigmoid(run.f_logit).mean(1)
