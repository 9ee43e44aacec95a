"""Pathfinder: are two marked ends those of one dashed contour? 32×32 pixels, "hard" (contours of 14 dashes).

A picture has two contours that begin seven pixels apart near the middle, up to five short ones that distract, and two
discs: on the first dash of a long contour, and on the last dash of the same one (label 1) or of the other (label 0).

The geometry is the public generator's at these settings, on whole pixels: a dash ends on one of the sixteen pixels at
a distance of three from its pivot, begins a third of the way to it, and the next pivot lies one pixel beyond its end.
Directions are drawn in proportion to the squared cosine of the turn. Other than there, at least one pixel always stays
free between two contours, the gaps between dashes included, so that the label is what the picture shows: only
directions that leave it free are drawn, and a picture where a long contour has none left is begun anew.

Blocks of pictures grow in step, so that every operation is one on arrays; a block is a pure function of the seed and
its number, in whole numbers alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from naju.tasks.lra.examples import Bytes, Examples, Integers
from naju.tasks.lra.streams import Stream

SIZE, PADDING, MARGIN = 32, 1, 1
REACH, STEP = 3, 4  # from a pivot to the end of its dash, and to the next pivot
LENGTH, SHORT, DISTRACTORS = 14, 4, 5  # dashes of a contour and of a distracting one; how many of those
SEED_DISTANCE, SEED_BORDER = 7, 14
RADIUS = 3  # of a disc, in half pixels
CONTRAST = {"contour": 1.5, "distractor": 2.0}  # 0.75 · 2, and 2; what exceeds white is cut off
TRIES, PLACES = 5, 16  # of a distracting contour, and the pixels where each try looks for room
BLOCK = 500
# Pictures that grow at once; part of what a block is, like the order of its draws.
ATTEMPTS = 8192

# Everything is looked up on a larger canvas whose border is occupied, so that no place has to be clipped.
BORDER = 8
CANVAS = SIZE + 2 * BORDER

Vectors = NDArray[np.int64]
Flags = NDArray[np.bool_]


def _ring(least: int, limit: int) -> Vectors:
    """Vectors (y, x) whose squared length lies in [least, limit)."""
    reach = np.arange(-limit, limit + 1)
    y, x = (axis.ravel() for axis in np.meshgrid(reach, reach, indexing="ij"))
    near = (y * y + x * x >= least) & (y * y + x * x < limit)
    return np.stack([y[near], x[near]], axis=1)


def _rounded(vectors: Vectors, length: int) -> Vectors:
    """Of the same direction and about this length."""
    norm = np.sqrt((vectors * vectors).sum(axis=1, keepdims=True))
    return np.asarray(np.floor(vectors * (length / norm) + 0.5), np.int64)


def _cells(offsets: Vectors) -> Integers:
    return np.asarray(offsets[..., 0] * CANVAS + offsets[..., 1])


HEADS = _ring(8, 11)  # the sixteen ends of a dash, seen from its pivot
PIVOTS = _rounded(HEADS, STEP)
TAILS = _rounded(HEADS, REACH - 2)
SEEDS = _ring(43, 57)  # from 6.5 to 7.5 pixels away


def _turn_weights() -> Integers:
    """cos² of the angle between two directions, exactly, as whole numbers: 720 is divisible by 8, 9 and 10."""
    cosine = np.maximum(HEADS @ HEADS.T, 0)
    share = 720 // (HEADS * HEADS).sum(axis=1)
    return np.asarray(cosine * cosine * share[:, None] * share)


def _around_ways(distance: float) -> Integers:
    """Cells so close to the way from the pivot to the end, for every direction; short lists repeat their last."""
    lists = []
    grid = _ring(0, 33)
    for head in HEADS:
        along = np.clip(grid @ head / (head @ head), 0, 1)[:, None]
        away = grid - along * head
        near = (away * away).sum(axis=1) <= distance * distance
        lists.append(_cells(grid[near]))
    longest = max(map(len, lists))
    return np.stack([np.pad(cells, (0, longest - len(cells)), mode="edge") for cells in lists])


WEIGHTS = _turn_weights()
# What a dash covers, and what of it nothing else may cover.
FOOTPRINTS, WAYS = _around_ways(MARGIN + 0.5), _around_ways(0.6)


class Dashes(NamedTuple):
    """One dash of every picture; `is_there` says where it is one."""

    pivot: Vectors  # (b, 2)
    direction: Integers  # (b,)
    is_there: Flags
    contrast: float

    def cells(self, shapes: Integers) -> Integers:
        """Of the canvas; `shapes` are FOOTPRINTS or WAYS."""
        return _cells(self.pivot + BORDER)[:, None] + shapes[self.direction]

    def chosen(self, rows: Flags) -> Dashes:
        return Dashes(self.pivot[rows], self.direction[rows], self.is_there[rows], self.contrast)


@dataclass
class Pictures:
    """Pictures while they grow: how often every cell is covered."""

    stream: Stream
    cover: Bytes  # (b, CANVAS²)

    def add(self, dashes: Dashes, sign: int = 1) -> None:
        rows = np.flatnonzero(dashes.is_there)
        self.cover[rows[:, None], dashes.cells(FOOTPRINTS)[rows]] += np.uint8(sign % 256)

    def has_room(self, cells: Integers) -> Flags:
        """Whether nothing covers any of the cells (b, choices, cells)."""
        rows = np.arange(len(self.cover))[:, None, None]
        return np.asarray(~self.cover[rows, cells].any(axis=-1))

    def extended(self, last: Dashes) -> Dashes:
        """The dash after `last`, of which only the direction is left to chance; it may touch no other."""
        self.add(last, -1)
        pivot = last.pivot + PIVOTS[last.direction]
        # A dead contour may have left the canvas: look at its room where that does no harm.
        inside = np.where(last.is_there[:, None], pivot, SIZE // 2)
        cells = _cells(inside + BORDER)[:, None, None] + WAYS
        weight = np.where(self.has_room(cells), WEIGHTS[last.direction], 0)
        total = weight.sum(axis=1)
        drawn = self.stream.below(np.maximum(total, 1), len(total))
        direction = (np.cumsum(weight, axis=1) <= drawn[:, None]).sum(axis=1)
        is_there = last.is_there & (total > 0)
        self.add(last)
        dashes = Dashes(inside, np.where(is_there, direction, 0), is_there, last.contrast)
        self.add(dashes)
        return dashes


@dataclass(frozen=True)
class Scenes:
    """Finished pictures before they are drawn: a dash is a pivot and a direction, contours are rows of dashes.

    The first two contours are the long ones; dashes that are not there belong to distracting ones that found no room.
    """

    pivots: Vectors  # (b, dashes, 2)
    directions: Integers  # (b, dashes)
    are_there: Flags  # (b, dashes)
    contrasts: tuple[float, ...]
    contours: Integers  # (dashes,): which contour each belongs to
    first_mark: Vectors  # (b, 2)
    last_mark: Vectors
    labels: Integers

    def __len__(self) -> int:
        return len(self.labels)


def block_of(seed: int, number: int) -> Examples:
    """BLOCK pictures; the same in every process and on every machine."""
    stream = Stream(seed, "pathfinder", number)
    pictures, labels = [np.empty((0, SIZE * SIZE), np.uint8)], [np.empty(0, np.int64)]
    while sum(map(len, labels)) < BLOCK:
        scenes = grow(stream, ATTEMPTS)
        pictures.append(draw(scenes).reshape(len(scenes), -1))
        labels.append(scenes.labels)
    values = np.concatenate(pictures)[:BLOCK].ravel()
    return Examples(values, np.arange(BLOCK + 1) * SIZE**2, np.concatenate(labels)[:BLOCK])


def grow(stream: Stream, attempts: int) -> Scenes:
    """What becomes of so many attempts; those whose long contours find no way are left out."""
    pictures = Pictures(stream, _empty_canvas(attempts))
    contours = _long_contours(pictures)
    contours += [_short_contour(pictures) for _ in range(DISTRACTORS)]
    return _marked(stream, contours)


def _empty_canvas(count: int) -> Bytes:
    cover = np.ones((count, CANVAS, CANVAS), np.uint8)
    inside = slice(BORDER + PADDING, CANVAS - BORDER - PADDING)
    cover[:, inside, inside] = 0
    return cover.reshape(count, -1)


def _long_contours(pictures: Pictures) -> list[list[Dashes]]:
    """Two contours that grow in turn, from pivots in the middle and SEED_DISTANCE from there."""
    stream, count = pictures.stream, len(pictures.cover)
    middle = SEED_BORDER + stream.below(SIZE - 2 * SEED_BORDER, count, 2)
    beside = middle + SEEDS[stream.below(len(SEEDS), count)]
    contours = []
    for pivot in (middle, beside):
        first = Dashes(pivot, stream.below(len(HEADS), count), np.ones(count, bool), CONTRAST["contour"])
        contours.append([_placed(pictures, first)])
    for _ in range(LENGTH - 1):
        for contour in contours:
            contour.append(pictures.extended(contour[-1]))
        contours = _going_on(pictures, contours)
    return contours


def _going_on(pictures: Pictures, contours: list[list[Dashes]]) -> list[list[Dashes]]:
    """Leave out the pictures where one of the contours has come to an end."""
    chosen = np.logical_and.reduce([contour[-1].is_there for contour in contours])
    pictures.cover = pictures.cover[chosen]
    return [[dashes.chosen(chosen) for dashes in contour] for contour in contours]


def _placed(pictures: Pictures, dashes: Dashes) -> Dashes:
    """Those of the dashes that have room."""
    room = pictures.has_room(dashes.cells(WAYS)[:, None])[:, 0]
    placed = dashes._replace(is_there=dashes.is_there & room)
    pictures.add(placed)
    return placed


def _short_contour(pictures: Pictures) -> list[Dashes]:
    """One distracting contour a picture, whole or not at all, after a few tries."""
    best = _tried(pictures, np.ones(len(pictures.cover), bool))
    for _ in range(TRIES - 1):
        again = _tried(pictures, ~best[-1].is_there)
        best = [_either(*pair) for pair in zip(best, again, strict=True)]
    return best


def _tried(pictures: Pictures, wanted: Flags) -> list[Dashes]:
    """A short contour where one is wanted and finds its way; elsewhere nothing stays behind."""
    before = pictures.cover.copy()
    contour = [_seeded(pictures, wanted)]
    for _ in range(SHORT - 1):
        contour.append(pictures.extended(contour[-1]))
    whole = contour[-1].is_there
    pictures.cover[~whole] = before[~whole]
    return [dashes._replace(is_there=whole) for dashes in contour]


def _seeded(pictures: Pictures, wanted: Flags) -> Dashes:
    """A first dash at the first of some random places that has room for it."""
    stream, count = pictures.stream, len(wanted)
    direction = stream.below(len(HEADS), count)
    places = PADDING + stream.below(SIZE - 2 * PADDING, count, PLACES, 2)
    cells = _cells(places + BORDER)[:, :, None] + WAYS[direction][:, None]
    room = pictures.has_room(cells)
    pivot = places[np.arange(count), room.argmax(axis=1)]
    dashes = Dashes(pivot, direction, wanted & room.any(axis=1), CONTRAST["distractor"])
    pictures.add(dashes)
    return dashes


def _either(one: Dashes, other: Dashes) -> Dashes:
    """The other where it is there."""
    pivot = np.where(other.is_there[:, None], other.pivot, one.pivot)
    direction = np.where(other.is_there, other.direction, one.direction)
    return Dashes(pivot, direction, one.is_there | other.is_there, one.contrast)


def _marked(stream: Stream, contours: list[list[Dashes]]) -> Scenes:
    """Choose the ends that get a disc."""
    dashes = [dash for contour in contours for dash in contour]
    count = len(dashes[0].direction)
    labels, begins = stream.below(2, count), stream.below(2, count)
    firsts = np.stack([contour[0].pivot + TAILS[contour[0].direction] for contour in contours[:2]])
    lasts = np.stack([contour[-1].pivot + HEADS[contour[-1].direction] for contour in contours[:2]])
    rows = np.arange(count)
    return Scenes(
        np.stack([dash.pivot for dash in dashes], axis=1),
        np.stack([dash.direction for dash in dashes], axis=1),
        np.stack([dash.is_there for dash in dashes], axis=1),
        tuple(dash.contrast for dash in dashes),
        np.repeat(np.arange(len(contours)), [len(contour) for contour in contours]),
        firsts[begins, rows],
        lasts[np.where(labels == 1, begins, 1 - begins), rows],
        labels,
    )


def _stamp(half_pixels: Vectors) -> Bytes:
    """How many quarters of every pixel around the middle one (of 2·BORDER) are covered, flat, on a small canvas."""
    stamp = np.zeros((2 * BORDER, 2 * BORDER), np.uint8)
    places = np.unique(half_pixels, axis=0) // 2 + BORDER
    np.add.at(stamp, (places[:, 0], places[:, 1]), 1)
    return stamp


def _stroke(head: Vectors) -> Bytes:
    """A line one half pixel wide, from a third of the way to the head to its end."""
    along = np.arange(8, 25)[:, None]
    return _stamp(np.floor(2 * head * along / 24 + 0.5).astype(np.int64))


STROKES = np.stack([_stroke(head) for head in HEADS])
DISC = _stamp(_ring(0, RADIUS * RADIUS + 1))


def draw(scenes: Scenes) -> NDArray[np.uint8]:
    """Pictures (b, 32, 32): every pixel has the brightest of what covers it."""
    white = np.zeros((len(scenes), CANVAS * CANVAS))
    for place, contrast in enumerate(scenes.contrasts):
        shade = STROKES[scenes.directions[:, place]] * (scenes.are_there[:, place, None, None] * contrast / 4)
        _brighten(white, scenes.pivots[:, place], shade)
    for mark in (scenes.first_mark, scenes.last_mark):
        _brighten(white, mark, np.broadcast_to(DISC / 4, (len(scenes), *DISC.shape)))
    inside = slice(BORDER, BORDER + SIZE)
    pictures = white.reshape(-1, CANVAS, CANVAS)[:, inside, inside]
    return np.floor(np.minimum(pictures, 1) * 255 + 0.5).astype(np.uint8)


def _brighten(white: NDArray[np.float64], centre: Vectors, shade: NDArray[np.float64]) -> None:
    """The shades are small canvases whose middle comes to `centre`."""
    patch = np.arange(2 * BORDER)
    cells = _cells(centre)[:, None, None] + patch[:, None] * CANVAS + patch
    rows = np.arange(len(white))[:, None, None]
    white[rows, cells] = np.maximum(white[rows, cells], shade)
