"""Charts as geometry: data in, pixels out. `chart.html` draws them; colours live in the style sheet.

A series has a style number: it fixes colour, marker and dash together, so that no reader has to rely on colour.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Place = tuple[float, float]
# Outlines around (0, 0), all of about one area: the first series' own, and those that repeat. Neither their number nor
# that of the dashes has a factor in common with that of the colours that repeat, so that two series of one colour have
# different markers and different dashes.
DISC = "M4.5 0A4.5 4.5 0 1 1-4.5 0A4.5 4.5 0 1 1 4.5 0Z"
MARKERS = (
    "M-4-4H4V4H-4Z",
    "M0-5.5L5 4H-5Z",
    "M0-6L5 0L0 6L-5 0Z",
    "M0 5.5L5-4H-5Z",
    "M-1.8-5H1.8V-1.8H5V1.8H1.8V5H-1.8V1.8H-5V-1.8H-1.8Z",
    "M-4.8-2.3L-2.3-4.8L0-2.5L2.3-4.8L4.8-2.3L2.5 0L4.8 2.3L2.3 4.8L0 2.5L-2.3 4.8L-4.8 2.3L-2.5 0Z",
)
DASHES = ("", "7 3", "2 3", "9 3 2 3")
COLOURS = 8
MOST_HIDDEN = 0.1  # of a label's area, by what stands there already or under it


def colour(style: int) -> int:
    """A colour of the style sheet; the first series, which the page is about, shares its colour with none."""
    return style if style == 0 else 1 + (style - 1) % (COLOURS - 1)


def outline(style: int) -> str:
    """The first series has a marker of its own, too: some of the colours are nearly alike."""
    return DISC if style == 0 else MARKERS[(style - 1) % len(MARKERS)]


def dash(style: int) -> str:
    return DASHES[style % len(DASHES)]


class Tick(NamedTuple):
    value: float
    label: str


@dataclass(frozen=True)
class Scale:
    """An axis; `share` says how far along it a value lies, and what lies beyond an end is drawn at that end."""

    low: float
    high: float
    ticks: tuple[Tick, ...]
    log: bool = False

    def share(self, value: float) -> float:
        if self.log:
            along = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            along = (value - self.low) / (self.high - self.low)
        return min(max(along, 0.0), 1.0)


def linear(low: float, high: float, *, parts: int = 5) -> Scale:
    """Ticks at multiples of 1, 2 or 5 times a power of ten, about `parts` of them."""
    high = high if high > low else low + 1.0
    rough = (high - low) / parts
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(nice * power for nice in (1, 2, 5, 10) if nice * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Scale(low, high, tuple(Tick(n * step, _short(n * step)) for n in range(first, last + 1)))


def logarithmic(values: Sequence[float], *, ticks: Sequence[float] = ()) -> Scale:
    """Around the values, with the given ticks or else powers of ten; at least one decade if those are to be seen."""
    low, high = min(values), max(values)
    if ticks:
        return Scale(low / 1.15, high * 1.15, tuple(Tick(tick, _short(tick)) for tick in ticks), log=True)
    first = math.floor(math.log10(low))
    last = max(math.ceil(math.log10(high)), first + 1)
    marks = [Tick(10.0**power, _power_of_ten(power)) for power in range(first, last + 1)]
    return Scale(marks[0].value, marks[-1].value, tuple(marks), log=True)


def named(names: Sequence[str]) -> Scale:
    """One place a name: 0, 1, 2, …"""
    return Scale(-0.4, len(names) - 0.6, tuple(Tick(place, name) for place, name in enumerate(names)))


@dataclass(frozen=True, kw_only=True)
class Line:
    """`band` gives the lowest and highest of several seeds at each x."""

    title: str
    style: int
    points: Sequence[Place]
    band: Sequence[tuple[float, float, float]] = ()
    marked: bool = False


@dataclass(frozen=True, kw_only=True)
class Point:
    """A labelled place with whiskers; `hollow` ones are somebody else's."""

    title: str
    label: str
    style: int
    x: float
    y: float
    x_range: Place | None = None
    y_range: Place | None = None
    hollow: bool = False


class Bars(NamedTuple):
    """A histogram: `heights[k]` between `edges[k]` and `edges[k + 1]`."""

    edges: Sequence[float]
    heights: Sequence[float]


class Note(NamedTuple):
    """A point's label in pixels, with the end of its leader where it had to move away."""

    x: float
    y: float
    anchor: str
    point: Point
    leader: Place | None


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    x_label: str
    y_label: str
    x: Scale
    y: Scale
    lines: Sequence[Line] = ()
    points: Sequence[Point] = ()
    arrows: Sequence[tuple[Place, Place]] = ()
    bars: Bars | None = None
    width: int = 380
    height: int = 270

    left, right, top, bottom = 48, 12, 12, 42

    def px(self, value: float) -> float:
        return round(self.left + self.x.share(value) * (self.width - self.left - self.right), 1)

    def py(self, value: float) -> float:
        return round(self.height - self.bottom - self.y.share(value) * (self.height - self.top - self.bottom), 1)

    def path(self, points: Sequence[Place]) -> str:
        return " ".join(f"{self.px(x)},{self.py(y)}" for x, y in points)

    def area(self, band: Sequence[tuple[float, float, float]]) -> str:
        lower = [(x, low) for x, low, _ in band]
        upper = [(x, high) for x, _, high in reversed(band)]
        return self.path(lower + upper)

    def notes(self) -> list[Note]:
        """Labels near their points, each where it hides least of what is already there; ours are placed first. One that
        would hide too much wherever it stands is left out: the point still tells its title."""
        boxes = [box for point in self.points for box in self._occupied(point)]
        notes = []
        for point in sorted(self.points, key=lambda point: point.hollow):
            box, note = min(self._candidates(point), key=lambda candidate: self._cost(candidate[0], point, boxes))
            if _hidden(box, boxes) <= MOST_HIDDEN * box.area:
                boxes.append(box)
                notes.append(note)
        return notes

    def _occupied(self, point: Point) -> Iterator[_Box]:
        """The marker and its whiskers."""
        x, y = self.px(point.x), self.py(point.y)
        yield _Box(x - 6, y - 6, x + 6, y + 6)
        if point.x_range:
            yield _Box(self.px(point.x_range[0]), y - 2, self.px(point.x_range[1]), y + 2)
        if point.y_range:
            yield _Box(x - 2, self.py(point.y_range[1]), x + 2, self.py(point.y_range[0]))

    def _candidates(self, point: Point) -> Iterator[tuple[_Box, Note]]:
        x, y = self.px(point.x), self.py(point.y)
        width = (6.1 if point.hollow else 6.8) * len(point.label)  # ours are bold
        for distance in (11, 22, 36, 52, 70):
            for turn in range(16):
                dx, dy = distance * math.cos(turn * math.pi / 8), distance * math.sin(turn * math.pi / 8)
                anchor = "start" if dx > 1 else "end" if dx < -1 else "middle"
                start = x + dx - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
                leader = (round(x + dx, 1), round(y + dy, 1)) if distance > 11 else None
                note = Note(round(x + dx, 1), round(y + dy + 4, 1), anchor, point, leader)
                yield _Box(start, y + dy - 7, start + width, y + dy + 6), note

    def _cost(self, box: _Box, point: Point, taken: Sequence[_Box]) -> float:
        inside = _Box(self.left + 2, self.top, self.width - self.right, self.height - self.bottom - 2)
        outside = box.area - box.overlap(inside)
        away = math.dist(box.centre, (self.px(point.x), self.py(point.y)))
        return 4 * outside + 4 * _hidden(box, taken) + away


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.bottom - self.top)

    @property
    def centre(self) -> Place:
        return (self.left + self.right) / 2, (self.top + self.bottom) / 2

    def overlap(self, other: _Box) -> float:
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(width, 0.0) * max(height, 0.0)


def _hidden(box: _Box, others: Sequence[_Box]) -> float:
    return sum(box.overlap(other) for other in others)


def _power_of_ten(power: int) -> str:
    """Below 0.01 as 1e-3, which leaves room for the name of a vertical axis."""
    return f"1e{power}" if power < -2 else _short(10.0**power)


def _short(value: float) -> str:
    """At most four digits: 1000 is 1k, 0.30000000000000004 is 0.3."""
    return f"{value / 1000:g}k" if value >= 10000 else f"{value:.4g}"
