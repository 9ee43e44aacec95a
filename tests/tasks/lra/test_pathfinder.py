"""Pathfinder: labels against what a flood finds on the undashed contours, and the pictures' statistics."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import pytest

from naju.tasks.lra import pathfinder
from naju.tasks.lra.streams import Stream

FINE = 4  # points a pixel of the clean strokes


@pytest.fixture(scope="module")
def scenes():
    return pathfinder.grow(Stream(0, "pathfinder", 0), 8192)


def contour_points(scenes, picture, contour):
    """The undashed contour: pivots joined by straight lines, from the first dash to the end of the last."""
    dashes = np.flatnonzero(scenes.contours == contour)
    if not scenes.are_there[picture, dashes].all():
        return np.empty((0, 2))
    pivots = scenes.pivots[picture, dashes]
    end = pivots[-1] + pathfinder.HEADS[scenes.directions[picture, dashes[-1]]]
    corners = np.concatenate([pivots, end[None]]).astype(float)
    share = np.linspace(0, 1, 40)[:, None]
    return np.concatenate([a + share * (b - a) for a, b in pairwise(corners)])


def reached(strokes: np.ndarray, start: tuple[int, int]) -> np.ndarray:
    """Everything that hangs together with `start`, corners included."""
    found, waiting = np.zeros_like(strokes), [start]
    while waiting:
        y, x = waiting.pop()
        if 0 <= y < len(strokes) and 0 <= x < len(strokes) and strokes[y, x] and not found[y, x]:
            found[y, x] = True
            waiting += [(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
    return found


def test_labels_are_what_the_clean_strokes_connect(scenes):
    assert len(scenes) > 30
    for picture in range(len(scenes)):
        strokes = np.zeros((FINE * pathfinder.SIZE,) * 2, bool)
        for contour in range(2 + pathfinder.DISTRACTORS):
            places = np.round(FINE * contour_points(scenes, picture, contour)).astype(int)
            strokes[places[:, 0], places[:, 1]] = True
        begin, end = (np.round(FINE * mark[picture]).astype(int) for mark in (scenes.first_mark, scenes.last_mark))
        near = np.argwhere(strokes)
        start = near[((near - begin) ** 2).sum(1).argmin()]
        assert ((start - begin) ** 2).sum() <= FINE * FINE
        connected = np.argwhere(reached(strokes, tuple(start)))
        joined = ((connected - end) ** 2).sum(1).min() <= FINE * FINE / 4
        assert joined == bool(scenes.labels[picture])


def test_contours_keep_clear_of_each_other(scenes):
    for picture in range(len(scenes)):
        points = [contour_points(scenes, picture, contour) for contour in range(2 + pathfinder.DISTRACTORS)]
        for place, one in enumerate(points):
            for other in points[:place]:
                if len(one) and len(other):
                    assert ((one[:, None] - other[None]) ** 2).sum(-1).min() > 1


def test_long_contours_are_whole_and_begin_apart(scenes):
    long = scenes.contours < 2
    assert long.sum() == 2 * pathfinder.LENGTH
    assert scenes.are_there[:, long].all()
    away = scenes.pivots[:, 0] - scenes.pivots[:, pathfinder.LENGTH]
    assert np.allclose(np.sqrt((away**2).sum(1)), pathfinder.SEED_DISTANCE, atol=0.6)
    heads = scenes.pivots + pathfinder.HEADS[scenes.directions]
    assert heads[scenes.are_there].min() >= pathfinder.PADDING
    assert heads[scenes.are_there].max() < pathfinder.SIZE - pathfinder.PADDING
    shorts = scenes.are_there[:, ~long].reshape(len(scenes), pathfinder.DISTRACTORS, pathfinder.SHORT)
    assert (shorts.all(2) == shorts.any(2)).all()  # whole or not at all
    assert shorts.any(2).sum(1).mean() > 2


def test_directions_turn_by_the_squared_cosine():
    weights = pathfinder.WEIGHTS / 720**2
    unit = pathfinder.HEADS / np.linalg.norm(pathfinder.HEADS, axis=1, keepdims=True)
    assert np.allclose(weights, np.maximum(unit @ unit.T, 0) ** 2)
    assert len(pathfinder.HEADS) == 16


def test_pictures_show_their_dashes_and_discs(scenes):
    pictures = pathfinder.draw(scenes)
    assert pictures.shape == (len(scenes), 32, 32)
    rows = np.arange(len(scenes))
    for mark in (scenes.first_mark, scenes.last_mark):
        inside = np.clip(mark, 0, 31)
        assert (pictures[rows, inside[:, 0], inside[:, 1]] == 255).all()
    middle = np.round(scenes.pivots + 2 * pathfinder.HEADS[scenes.directions] / 3).astype(int)
    for dash in range(scenes.pivots.shape[1]):
        there = scenes.are_there[:, dash]
        around = [pictures[rows, middle[:, dash, 0] + dy, middle[:, dash, 1] + dx] for dy in (-1, 0) for dx in (-1, 0)]
        assert (np.max(around, axis=0)[there] > 0).all()
    bright = (pictures > 0).mean()
    assert 0.1 < bright < 0.35


def test_a_block_is_balanced_and_has_the_same_bytes_everywhere():
    block = pathfinder.block_of(0, 0)
    assert len(block) == pathfinder.BLOCK
    assert set(block.lengths.tolist()) == {1024}
    assert block.labels.mean() == pytest.approx(0.5, abs=3 * 0.5 / np.sqrt(pathfinder.BLOCK))
    digest = hashlib.sha256(block.values.tobytes() + block.labels.astype("<i8").tobytes()).hexdigest()
    assert digest == "7ba412603097a4446b9866310939e3605526e9bfb4af6264b31636198d78e03e"
