"""Several sequences in one row equal the same sequences apart."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mixer_cases import (
    assert_same_memory,
    assert_untouched,
    seeds,
    sequence,
    small_mixer,
    used_state,
    widths,
    with_width,
)

from memories import EXACT, LAW_TOLERANCE, difference
from naju.mixers import MIXERS

counts = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any)


def boundaries(counts, dtype=torch.int64):
    return torch.tensor([0, *accumulate(counts)], dtype=dtype)


def assert_packed_equals_apart(mixer, u, counts, state, tolerance):
    out, after = mixer(u, state, cu_seqlens=boundaries(counts))
    assert out.shape == u.shape
    assert after.batch == len(counts)
    for row, (piece, got) in enumerate(zip(u.split(counts, dim=1), out.split(counts, dim=1), strict=True)):
        start = mixer.init_state(1) if state is None else state[row]
        if piece.shape[1] == 0:
            assert_untouched(mixer, after[row], start, tolerance)
            continue
        want, memory = mixer(piece, start)
        assert difference(got, want) <= tolerance
        assert_same_memory(mixer, after[row], memory, tolerance)


@pytest.mark.parametrize("dtype", LAW_TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MIXERS)
@given(counts=counts, width=widths, seed=seeds, carried=st.booleans())
def test_packed_equals_apart(name, dtype, counts, width, seed, carried):
    mixer = small_mixer(name, dtype, seed=seed, **with_width(name, width))
    state = used_state(mixer, len(counts)) if carried else None
    u = sequence(1, sum(counts), dtype, seed=seed)
    assert_packed_equals_apart(mixer, u, counts, state, LAW_TOLERANCE[dtype])


@pytest.mark.parametrize("name", MIXERS)
def test_boundaries_may_be_int32(name):
    mixer = small_mixer(name)
    u = sequence(1, 9)
    want, _ = mixer(u, cu_seqlens=boundaries([4, 5]))
    assert torch.equal(mixer(u, cu_seqlens=boundaries([4, 5], torch.int32))[0], want)


@pytest.mark.parametrize("dtype", LAW_TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MIXERS)
def test_nan_in_one_sequence_touches_no_other(name, dtype):
    mixer = small_mixer(name, dtype)
    counts = [4, 3, 5]
    clean = sequence(1, 12, dtype).requires_grad_()
    poisoned = clean.detach().clone()
    poisoned[:, 4:7] = float("nan")
    poisoned.requires_grad_()
    others = [0, 1, 2, 3, 7, 8, 9, 10, 11]
    want, memory = mixer(clean, cu_seqlens=boundaries(counts))
    got, state = mixer(poisoned, cu_seqlens=boundaries(counts))
    assert got[:, 4:7].isnan().all()
    assert torch.equal(got[:, others], want[:, others])
    for row in (0, 2):
        assert_same_memory(mixer, state[row], memory[row], 0.0)
    (wanted,) = torch.autograd.grad(want[:, others].square().sum(), clean)
    (found,) = torch.autograd.grad(got[:, others].square().sum(), poisoned)
    assert torch.equal(found[:, others], wanted[:, others])


@pytest.mark.parametrize("name", MIXERS)
def test_no_gradient_crosses_a_boundary(name):
    mixer = small_mixer(name)
    u = sequence(1, 9).requires_grad_()
    out, _ = mixer(u, cu_seqlens=boundaries([4, 5]))
    (gradient,) = torch.autograd.grad(out[:, 4:].sum(), u)
    assert gradient[:, :4].eq(0).all()
    assert gradient[:, 4:].ne(0).any(dim=-1).all()


@pytest.mark.parametrize("name", MIXERS)
def test_packed_states_continue_as_a_batch(name):
    mixer = small_mixer(name)
    _, state = mixer(sequence(1, 9), cu_seqlens=boundaries([4, 5]))
    follow = sequence(2, 6, seed=5)
    out, _ = mixer(follow, state)
    for row, past in enumerate(sequence(1, 9).split([4, 5], dim=1)):
        want, _ = mixer(torch.cat([past, follow[row : row + 1]], dim=1))
        assert difference(out[row : row + 1], want[:, past.shape[1] :]) <= EXACT


@pytest.mark.parametrize(
    ("cu_seqlens", "batch", "error", "message"),
    [
        (torch.tensor([0, 4, 3, 6]), 1, ValueError, "cu_seqlens must rise from 0 to the length 6"),
        (torch.tensor([0, 4]), 1, ValueError, "cu_seqlens must rise from 0 to the length 6"),
        (torch.tensor([1, 6]), 1, ValueError, "cu_seqlens must rise from 0 to the length 6"),
        (torch.tensor([[0, 6]]), 1, ValueError, "cu_seqlens must have shape"),
        (torch.tensor([0, 6]), 2, ValueError, "needs batch 1"),
        (torch.tensor([0.0, 6.0]), 1, TypeError, "cu_seqlens must be int32 or int64"),
        ([0, 6], 1, TypeError, "cu_seqlens must be an integer tensor"),
    ],
)
@pytest.mark.parametrize("name", MIXERS)
def test_boundaries_that_do_not_fit_are_refused(name, cu_seqlens, batch, error, message):
    with pytest.raises(error, match=message):
        small_mixer(name)(sequence(batch, 6), cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("name", MIXERS)
def test_a_state_must_have_a_row_for_each_sequence(name):
    mixer = small_mixer(name)
    with pytest.raises(ValueError, match="state holds 1 sequences, but the input has 2"):
        mixer(sequence(1, 6), mixer.init_state(1), cu_seqlens=boundaries([2, 4]))
