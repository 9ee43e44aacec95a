"""Length-bucketed batches: what they hold, how much padding, and accuracies through them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from naju.lab.lra_batches import BucketedSet, DeviceExamples, accuracy, bucket_widths
from naju.tasks.lra import LRA
from naju.tasks.lra.examples import byte_examples
from naju.training import Reporter, StoppedError

CPU = torch.device("cpu")
TASK = replace(LRA["text"], length=100)


def texts(count=200, seed=0):
    """Labels tell the length, contents the number."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(100, rng.geometric(0.04, size=count))
    return byte_examples([bytes([number % 251]) * length for number, length in enumerate(lengths)], lengths % 2, 100)


def test_tokens_are_bytes_plus_one_and_the_rest_is_padding():
    data = DeviceExamples(TASK, byte_examples([b"ab", b"", b"\xffcd"], [0, 1, 0], 9), CPU)
    tokens, targets = data.gather(torch.tensor([2, 0, 1]), 4)
    assert tokens.tolist() == [[256, 100, 101, 0], [98, 99, 0, 0], [0, 0, 0, 0]]
    assert targets.tolist() == [0, 0, 1]


def test_pictures_are_their_pixels():
    task = replace(LRA["image"], length=2)
    data = DeviceExamples(task, byte_examples([b"\x00\xff", b"\x01\x02"], [0, 1], 2), CPU)
    assert data.gather(torch.tensor([1, 0]), 2)[0].tolist() == [[1, 2], [0, 255]]
    assert task.vocab_size == 256


def test_pairs_come_as_pairs():
    task = replace(LRA["retrieval"], length=4)
    data = DeviceExamples(task, byte_examples([b"a", b"bb", b"c", b"d"], [0, 1], 4), CPU)
    assert data.gather(torch.tensor([1, 0]), 2)[0].tolist() == [[[100, 0], [101, 0]], [[98, 0], [99, 99]]]


def epoch(data, number):
    data.shuffle(number)
    steps = range(number * data.epoch_steps, (number + 1) * data.epoch_steps)
    return [data.batch(torch.tensor([step]), data.kind(step + 1)) for step in steps]


def test_an_epoch_has_every_example_once_and_cuts_none():
    examples = texts()
    data = BucketedSet(TASK, examples, batch_size=8, seed=1, device=CPU)
    batches = epoch(data, 3)
    assert len(batches) == data.epoch_steps == 25
    rows = {(int(row[0]), int((row != 0).sum())) for tokens, _ in batches for row in tokens}
    assert rows == {(n % 251 + 1, length) for n, length in enumerate(examples.lengths.tolist())}
    for tokens, targets in batches:
        assert ((tokens != 0).sum(1) % 2 == targets).all()
        assert tokens.shape[1] in data.widths


def test_like_goes_with_like_in_an_order_of_its_own():
    data = BucketedSet(TASK, texts(3200), batch_size=8, seed=1, device=CPU)
    batches = epoch(data, 0)
    filled = sum(int((tokens != 0).sum()) for tokens, _ in batches) / sum(tokens.numel() for tokens, _ in batches)
    longest = float(data.lengths.double().mean() / 100)
    assert filled > 0.6 > 1.5 * longest
    widths = [tokens.shape[1] for tokens, _ in batches]
    assert widths != sorted(widths)
    again = BucketedSet(TASK, texts(3200), batch_size=8, seed=1, device=CPU)
    assert all(torch.equal(one[0], other[0]) for one, other in zip(epoch(again, 0), batches, strict=True))
    assert [tokens.shape[1] for tokens, _ in epoch(again, 1)] != widths
    other = BucketedSet(TASK, texts(3200), batch_size=8, seed=2, device=CPU)
    assert [tokens.shape[1] for tokens, _ in epoch(other, 0)] != widths


def test_batches_of_few_sequences_come_in_no_order_of_length():
    widths = [tokens.shape[1] for tokens, _ in epoch(BucketedSet(TASK, texts(), batch_size=8, seed=1, device=CPU), 0)]
    assert widths != sorted(widths)
    assert widths != sorted(widths, reverse=True)


def test_the_longest_of_many_do_not_always_go_together():
    task = replace(TASK, length=1024)
    lengths = range(1, 1025)
    data = BucketedSet(
        task, byte_examples([b"x" * n for n in lengths], [0] * 1024, 1024), batch_size=8, seed=1, device=CPU
    )
    for number in range(3):
        longest = max(epoch(data, number), key=lambda batch: int((batch[0] != 0).sum()))[0]
        assert (longest != 0).sum(1).min() < 1017


def test_widths_are_few():
    assert bucket_widths(TASK, texts()) == [25, 50, 75, 100]
    assert bucket_widths(TASK, byte_examples([b"x" * 60, b""], [0, 1], 100)) == [25, 75]
    assert bucket_widths(replace(TASK, length=10), byte_examples([b"x" * 10], [0], 10)) == [10]
    assert bucket_widths(LRA["image"], texts()) == [1024]
    assert bucket_widths(replace(TASK, length=10), byte_examples([b"x" * n for n in range(11)], range(11), 10)) == [
        3,
        6,
        9,
        10,
    ]


def test_too_few_examples_are_refused():
    with pytest.raises(ValueError, match="examples must fill a batch of 8, but are 5"):
        BucketedSet(TASK, texts(5), batch_size=8, seed=1, device=CPU)
    assert BucketedSet(TASK, texts(8), batch_size=8, seed=1, device=CPU).epoch_steps == 1


class Parity(nn.Module):
    """Right about everything but texts of one character."""

    def forward(self, tokens):
        lengths = (tokens != 0).sum(1)
        return nn.functional.one_hot(torch.where(lengths == 1, 0, lengths % 2), 2).float()


@pytest.mark.parametrize("tokens_at_once", [1, 500, 10**6])
def test_accuracy_counts_every_example_once(tokens_at_once):
    examples, model = texts(), Parity()
    share = accuracy(model, TASK, examples, tokens_at_once=tokens_at_once, device=CPU)
    assert share == 1 - (examples.lengths == 1).mean() < 1
    assert model.training


class Watched(nn.Module):
    """Remembers how it was called."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, tokens):
        self.calls.append((self.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), tokens.numel()))
        return torch.zeros(len(tokens), 2)


@pytest.mark.parametrize("bf16", [False, True])
def test_an_examination_learns_nothing_and_holds_no_more_tokens_than_it_may(bf16):
    task = replace(LRA["retrieval"], length=4)
    pairs = byte_examples([b"a", b"bb", b"c", b"d"] * 10, [0, 1] * 10, 4)
    model = Watched()
    assert accuracy(model, task, pairs, tokens_at_once=16, device=CPU, bf16=bf16) == 0.5
    assert {call[:3] for call in model.calls} == {(False, False, bf16)}
    assert max(call[3] for call in model.calls) <= 16


def test_an_examination_tells_how_far_it_is_and_can_be_stopped():
    shares, model = [], Parity()
    accuracy(model, TASK, texts(), tokens_at_once=500, device=CPU, examined=shares.append)
    assert shares[0] == 0
    assert shares == sorted(set(shares))
    assert 0.9 < shares[-1] < 1
    with pytest.raises(StoppedError):
        accuracy(model, TASK, texts(), tokens_at_once=100, device=CPU, examined=Reporter(stop=lambda: True).examined)
    assert model.training
