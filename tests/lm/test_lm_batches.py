"""What an update reads: every window once an epoch, the same for a seed, and documents where they are."""

import numpy as np
import pytest
import torch
from tiny_language import END, prepare, split

from naju.lm.batches import Order, pack, read_batch
from naju.lm.loss import IGNORED
from naju.mixers import build_mixer


def order(tokens=1003, *, length=10, rows=4, seed=0, lanes=False):
    return Order(tokens, length=length, rows=rows, seed=seed, lanes=lanes)


def test_an_epoch_reads_every_window_once_in_a_new_order_at_a_new_offset():
    found = order()
    starts = np.concatenate([found.starts(step) for step in range(99)])
    epochs = starts[: 4 * found.windows].reshape(-1, found.windows)
    assert found.windows == 99
    for epoch in epochs:
        assert sorted(epoch) == list(range(min(epoch), min(epoch) + 990, 10))
        assert max(epoch) + 10 < 1003
    assert len({int(min(epoch)) for epoch in epochs}) > 1
    assert not np.array_equal(epochs[0] - min(epochs[0]), epochs[1] - min(epochs[1]))


def test_a_step_can_be_asked_for_alone_and_follows_from_the_seed():
    first, second, other = order(), order(), order(seed=1)
    backwards = [second.starts(step) for step in reversed(range(60))]
    for step, later in zip(range(60), reversed(backwards), strict=True):
        assert np.array_equal(first.starts(step), later)
    assert not np.array_equal(first.starts(0), other.starts(0))


def test_lanes_are_read_from_end_to_end():
    found = order(lanes=True)
    steps = np.array([found.starts(step) for step in range(found.lane)])
    assert (np.diff(steps, axis=0) == 10).all()
    assert len(np.unique(steps)) == steps.size
    assert [step for step in range(50) if found.begins(step)] == [0, 24, 48]


def test_too_short_a_text_is_refused():
    assert order(20, rows=1).windows == 1
    with pytest.raises(ValueError, match="at least 20 tokens for 1 windows of length 10, but it has 19"):
        order(19, rows=1)
    with pytest.raises(ValueError, match="at least 50 tokens for 4 windows"):
        order(49, lanes=True)


@pytest.fixture
def text(tmp_path):
    return split(prepare(tmp_path))


def test_targets_are_the_next_tokens_and_end_with_the_text(text):
    last = len(text.tokens) - 3
    batch = read_batch(text, np.array([0, last, len(text.tokens)]), 8, reset=False)
    assert batch.tokens[0].tolist() == text.tokens[:8].tolist()
    assert batch.targets[0].tolist() == text.tokens[1:9].tolist()
    assert batch.targets[1].tolist() == [*text.tokens[last + 1 :].tolist(), *[IGNORED] * 6]
    assert (batch.targets[2] == IGNORED).all()
    assert batch.packing is None


def test_sequences_begin_where_rows_and_documents_do(text):
    starts = np.array([int(text.documents[2]), 100, 1000])
    batch = read_batch(text, starts, 64, reset=True)
    cuts = batch.packing.cu_seqlens.tolist()
    flat = batch.tokens.flatten().tolist()
    expected = {0, 64, 128} | {place + 1 for place, token in enumerate(flat[:-1]) if token == END}
    assert cuts == [*sorted(expected), 192]


def test_the_rows_state_enters_its_first_sequence_and_leaves_its_last():
    documents = np.array([0, 4, 13, 30], np.uint64)
    packing = pack(documents, np.array([0, 10, 20]), 10)
    assert packing.cu_seqlens.tolist() == [0, 4, 10, 13, 20, 30]
    assert packing.source.tolist() == [3, 3, 1, 3, 2]  # row 3 is the empty state
    assert packing.last.tolist() == [1, 3, 4]


def test_a_documents_features_do_not_depend_on_what_stands_before_it():
    """Rows with carried states, packed, against each sequence read alone from where its row stands."""
    mixer = build_mixer("naju", 8, d_state=4)
    u, empty = torch.randn(3, 10, 8), mixer.init_state(1)
    _, carried = mixer(torch.randn(3, 6, 8))
    packing = pack(np.array([0, 4, 13, 30], np.uint64), np.array([0, 10, 20]), 10)
    out, after = mixer(u.reshape(1, 30, 8), packing.open(carried, empty), None, packing.cu_seqlens)
    after = packing.close(after)
    pieces = [(0, 0, 4, empty), (0, 4, 10, empty), (1, 0, 3, carried[1]), (1, 3, 10, empty), (2, 0, 10, carried[2])]
    ends = {}
    for row, left, right, state in pieces:
        alone, ends[row] = mixer(u[row : row + 1, left:right], state)
        torch.testing.assert_close(out[:, row * 10 + left : row * 10 + right], alone)
    for row, end in ends.items():
        torch.testing.assert_close(after[row].x, end.x)
        torch.testing.assert_close(after[row].h_tail, end.h_tail)
