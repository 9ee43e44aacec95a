"""Examples as flat arrays, and the random streams behind generated ones."""

from __future__ import annotations

import numpy as np
import pytest

from naju.tasks.lra.examples import Examples, byte_examples, joined
from naju.tasks.lra.streams import Stream


def test_parts_choices_and_joins_keep_every_sequence():
    whole = byte_examples([b"one", b"", b"three", b"four"], [0, 1, 2, 3], 4)
    assert whole.lengths.tolist() == [3, 0, 4, 4]
    again = joined([whole.part(0, 1), whole.part(1, 4)])
    assert np.array_equal(again.values, whole.values)
    assert np.array_equal(again.starts, whole.starts)
    chosen = whole.chosen(np.array([3, 0]))
    assert [chosen.sequence(0).tobytes(), chosen.sequence(1).tobytes()] == [b"four", b"one"]
    assert chosen.labels.tolist() == [3, 0]


def test_pairs_stay_together():
    pairs = byte_examples([b"a", b"bb", b"ccc", b"d"], [0, 1], 9)
    assert (pairs.width, pairs.lengths.tolist()) == (2, [2, 3])
    second = pairs.part(1, 2)
    assert [second.sequence(0).tobytes(), second.sequence(1).tobytes()] == [b"ccc", b"d"]
    assert pairs.chosen(np.array([1])).values.tobytes() == b"cccd"


@pytest.mark.parametrize(
    ("starts", "labels", "told"),
    [
        ([0, 1, 2, 3], 2, "starts must bound one or two sequences a label, but bound 3"),
        ([0, 1, 2, 3], 1, "starts must bound one or two sequences a label, but bound 3"),
        ([0], 0, "starts must bound one or two sequences a label, but bound 0"),
        ([0, 4, 3], 2, "starts must rise from 0 to the number of values"),
        ([1, 2, 3], 2, "starts must rise from 0 to the number of values"),
        ([0, 1, 2], 2, "starts must rise from 0 to the number of values"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(starts, labels, told):
    with pytest.raises(ValueError, match=told):
        Examples(np.zeros(3, np.uint8), np.array(starts), np.zeros(labels, np.int64))


def test_no_texts_are_no_examples():
    with pytest.raises(ValueError, match="starts must bound one or two sequences a label, but bound 0"):
        byte_examples([], [], 9)


def test_streams_are_fixed_even_and_independent():
    assert Stream(0, "one", 0).words(2).tolist() == [16978115468042994356, 11667303248393479888]
    numbers = Stream(0, "one", 0).below(10, 100_000)
    assert np.allclose(np.bincount(numbers) / 100_000, 0.1, atol=0.005)
    for other in (Stream(1, "one", 0), Stream(0, "two", 0), Stream(0, "one", 1)):
        assert abs(np.corrcoef(numbers, other.below(10, 100_000))[0, 1]) < 0.02
    limits = np.array([1, 5])
    assert (Stream(0, "one", 0).below(limits, 50, 2).max(axis=0) == [0, 4]).all()
