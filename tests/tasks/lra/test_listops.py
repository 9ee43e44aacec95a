"""ListOps against a second, plain reading of its rules."""

from __future__ import annotations

import hashlib
import random
from statistics import median

import numpy as np
import pytest

from naju.tasks.lra import listops
from naju.tasks.lra.examples import examples_of
from naju.tasks.lra.streams import Stream


@pytest.fixture(scope="module")
def block():
    return listops.block_of(0, 0)


def evaluated(words: list[str]) -> int:
    """With a stack; also fails on anything that is not one whole expression."""
    stack: list[list] = [[]]
    for word in words:
        if word.startswith("["):
            stack.append([word])
        elif word == "]":
            operator, *values = stack.pop()
            assert 2 <= len(values) <= 10
            apply = {"[MIN": min, "[MAX": max, "[MED": lambda v: int(median(v)), "[SM": lambda v: sum(v) % 10}
            stack[-1].append(apply[operator](values))
        else:
            stack[-1].append(int(word))
        assert len(stack) <= 10  # operators stand at depths 1 to 9
    assert len(stack) == 1
    (value,) = stack[0]
    return value


def plain_tree(rng: random.Random, depth: int = 1) -> list[str]:
    if depth == 10 or rng.random() > 0.25:
        return [str(rng.randrange(10))]
    arguments = [plain_tree(rng, depth + 1) for _ in range(rng.randint(2, 10))]
    return [rng.choice(("[MIN", "[MAX", "[MED", "[SM")), *(word for tree in arguments for word in tree), "]"]


def test_every_label_is_the_value_of_its_expression(block):
    for index, label in enumerate(block.labels.tolist()):
        assert evaluated(listops.in_words(block.sequence(index)).split()) == label


def test_lengths_and_classes_are_distributed_as_by_the_plain_rules(block):
    rng = random.Random(0)
    trees = [tree for tree in (plain_tree(rng) for _ in range(6000)) if 500 < len(tree) < 2000]
    assert len(trees) > 250
    assert block.lengths.min() > 500
    assert block.lengths.max() < 2000
    limit = 1.95 * np.sqrt(1 / len(trees) + 1 / len(block))  # Kolmogorov and Smirnov, one in a thousand
    lengths = np.sort([len(tree) for tree in trees])
    for ours, theirs in ((block.lengths, lengths), (block.labels, np.sort([evaluated(tree) for tree in trees]))):
        points = np.unique(theirs)
        shares = [np.searchsorted(np.sort(values), points, side="right") / len(values) for values in (ours, theirs)]
        assert np.abs(shares[0] - shares[1]).max() < limit


def test_an_expression_as_long_as_either_limit_does_not_count(monkeypatch):
    monkeypatch.setattr(listops, "LONGER_THAN", 5)
    monkeypatch.setattr(listops, "SHORTER_THAN", 10)
    assert np.unique(listops.block_of(0, 0).lengths).tolist() == [6, 7, 8, 9]


def test_the_two_ends_are_the_most_frequent_classes(block):
    counts = np.bincount(block.labels, minlength=10)
    assert counts.min() > 30
    assert set(np.argsort(counts)[-2:]) == {0, 9}  # MIN and MAX pull there


def test_a_block_has_the_same_bytes_everywhere(block):
    digest = hashlib.sha256(block.values.tobytes() + block.labels.astype("<i8").tobytes()).hexdigest()
    assert digest == "ddfac2c09d891c42871a4b443a59bf60522c636d81af3a73713d689d53dd682d"
    again, other_seed, next_block = listops.block_of(0, 0), listops.block_of(1, 0), listops.block_of(0, 1)
    assert np.array_equal(again.values, block.values)
    assert not np.array_equal(other_seed.labels, block.labels)
    assert not np.array_equal(next_block.labels, block.labels)


def test_operators_arguments_and_digits_are_drawn_evenly():
    levels = listops.grow(Stream(3, "listops", 0), 4096)
    share = np.concatenate([level.is_operator for level in levels[:-1]]).mean()
    assert share == pytest.approx(0.25, abs=0.005)
    assert not levels[-1].is_operator.any()
    arguments = np.bincount(np.concatenate([level.arguments for level in levels]), minlength=11)
    assert arguments[:2].sum() == 0
    assert np.allclose(arguments[2:] / arguments.sum(), 1 / 9, atol=0.01)
    symbols = np.bincount(np.concatenate([level.symbol for level in levels]), minlength=14)
    assert np.allclose(symbols[:10] / symbols[:10].sum(), 0.1, atol=0.005)
    assert np.allclose(symbols[10:] / symbols[10:].sum(), 0.25, atol=0.01)


def test_repetitions_are_left_out_and_more_blocks_asked_for():
    one, two, three = (np.array([value], np.uint8) for value in (1, 2, 3))
    blocks = [examples_of([one, two, one], [1, 2, 1]), examples_of([two, three], [2, 3])]
    assert listops.first_different(blocks[:1], 3) is None
    found = listops.first_different(blocks, 3)
    assert found is not None
    assert found.values.tolist() == found.labels.tolist() == [1, 2, 3]
