"""The random integers of generated data."""

from __future__ import annotations

from itertools import product

import numpy as np

from naju.tasks.lra.streams import Stream, scaled


def test_every_seed_purpose_and_block_has_its_own_stream():
    names = list(product((0, 1, 10), ("listops", "pathfinder"), range(5)))
    assert len({Stream(*name).words(4).tobytes() for name in names}) == len(names)
    assert np.array_equal(Stream(*names[0]).words(4), Stream(*names[0]).words(4))


def test_integers_below_a_limit_are_uniform_and_limits_broadcast():
    drawn = Stream(0, "here", 0).below(np.array([1, 2, 5]), 6000, 3)
    for limit, column in zip((1, 2, 5), drawn.T, strict=True):
        counts = np.bincount(column)
        assert len(counts) == limit
        assert np.abs(counts - 6000 / limit).max() < 5 * (6000 / limit) ** 0.5


def test_the_smallest_and_the_largest_word_give_the_ends_of_the_range():
    ends = np.array([0, 2**32 - 1, 2**64 - 1], np.uint64)
    for limit in (1, 10, 2**31):
        assert scaled(ends, limit).tolist() == [0, limit - 1, limit - 1]
