"""The training set and its order."""

import pytest
import torch
from tiny import TokenBeforeLast, config

from naju.training import FixedSet
from naju.training import fixed_set as module

CPU = torch.device("cpu")


def fixed_set(**changes):
    return FixedSet(TokenBeforeLast(), config(**{"sequences": 70, "length": 12, **changes}), CPU)


def epoch(data, number):
    """The rows that an epoch shows, step by step."""
    data.shuffle(number)
    steps = len(data.order)
    rows = []
    for step in range(steps):
        tokens, targets = data.batch(torch.tensor([number * steps + step]))
        assert torch.equal(tokens[:, -2].long(), targets)
        rows += [tuple(row) for row in tokens.tolist()]
    return rows


def test_an_epoch_shows_every_sequence_at_most_once_and_fills_its_batches():
    data = fixed_set()
    everything = [tuple(row) for row in data.tokens.tolist()]
    assert len(set(everything)) == 70  # twelve letters: no two rows are alike, so rows name sequences
    shown = [epoch(data, number) for number in range(3)]
    for rows in shown:
        assert len(rows) == len(set(rows)) == 64
        assert set(rows) <= set(everything)
    assert shown[0] != shown[1] != shown[2]
    assert set(shown[0]) != set(shown[1])  # another six wait


def test_the_order_of_an_epoch_does_not_depend_on_what_came_before():
    first, second = fixed_set(), fixed_set()
    for number in range(3):
        epoch(first, number)
    assert epoch(first, 3) == epoch(second, 3)


def test_the_seed_determines_both():
    assert torch.equal(fixed_set().tokens, fixed_set().tokens)
    assert not torch.equal(fixed_set().tokens, fixed_set(seed=1).tokens)


def test_it_is_drawn_in_portions(monkeypatch):
    monkeypatch.setattr(module, "PORTION", 32)
    data = fixed_set()
    assert len({tuple(row) for row in data.tokens.tolist()}) == 70
    assert torch.equal(data.tokens[:, -2].long(), data.targets)


def test_fresh_sequences_are_no_fixed_set():
    with pytest.raises(ValueError, match="sequences must be a number for a fixed set, but is None"):
        fixed_set(sequences=None)
    with pytest.raises(ValueError, match="fresh sequences have no epochs"):
        _ = config().epoch_steps
