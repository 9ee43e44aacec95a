"""Whole, in pieces or token by token: the same outputs and the same memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mixer_cases import (
    assert_same_memory,
    lengths,
    run_in_pieces,
    run_in_steps,
    seeds,
    sequence,
    small_mixer,
    used_state,
    widths,
    with_width,
)

from memories import EXACT, LAW_TOLERANCE, assert_states_agree, difference, storage_bytes
from naju.mixers import MIXERS

cuts = st.lists(st.integers(0, 24), max_size=6)


@pytest.mark.parametrize("dtype", LAW_TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MIXERS)
@given(length=lengths, cuts=cuts, width=widths, seed=seeds, carried=st.booleans())
def test_any_cut_equals_the_whole(name, dtype, length, cuts, width, seed, carried):
    mixer = small_mixer(name, dtype, seed=seed, **with_width(name, width))
    u = sequence(2, length, dtype, seed=seed)
    start = used_state(mixer, 2) if carried else None
    want, memory = mixer(u, start)
    got, streamed = run_in_pieces(mixer, u, cuts, start)
    assert difference(got, want) <= LAW_TOLERANCE[dtype]
    assert_same_memory(mixer, streamed, memory, LAW_TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", LAW_TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MIXERS)
@given(length=lengths, width=widths, seed=seeds)
def test_steps_equal_the_whole(name, dtype, length, width, seed):
    mixer = small_mixer(name, dtype, seed=seed, **with_width(name, width))
    u = sequence(2, length, dtype, seed=seed)
    start = used_state(mixer, 2)
    want, memory = mixer(u, start)
    got, streamed = run_in_steps(mixer, u, start)
    assert difference(got, want) <= LAW_TOLERANCE[dtype]
    assert_same_memory(mixer, streamed, memory, LAW_TOLERANCE[dtype])


@pytest.mark.parametrize("name", MIXERS)
def test_any_cut_of_many_chunks_equals_the_whole(name):
    """The scans work in chunks of up to 64 tokens; these cuts fall on, before and behind their ends."""
    mixer = small_mixer(name, torch.float32)
    u = sequence(2, 150, torch.float32)
    want, memory = mixer(u)
    for got, streamed in (
        run_in_pieces(mixer, u, [1, 63, 64, 65, 128, 149]),
        run_in_steps(mixer, u, mixer.init_state(2)),
    ):
        assert difference(got, want) <= LAW_TOLERANCE[torch.float32]
        assert_same_memory(mixer, streamed, memory, LAW_TOLERANCE[torch.float32])


@pytest.mark.parametrize("name", MIXERS)
def test_no_state_means_the_initial_state(name):
    mixer = small_mixer(name)
    u = sequence(3, 6)
    assert torch.equal(mixer(u)[0], mixer(u, mixer.init_state(3))[0])


@pytest.mark.parametrize("name", MIXERS)
def test_a_stream_may_turn_from_pieces_to_steps_and_back(name):
    mixer = small_mixer(name)
    u = sequence(2, 12)
    want, memory = mixer(u)
    first, state = mixer(u[:, :5])
    second, state = run_in_steps(mixer, u[:, 5:8], state)
    third, state = mixer(u[:, 8:], state)
    assert difference(torch.cat([first, second, third], dim=1), want) <= EXACT
    assert_same_memory(mixer, state, memory, EXACT)


@pytest.mark.parametrize("name", MIXERS)
def test_gradients_pass_through_the_carried_state(name):
    mixer = small_mixer(name)
    u = sequence(2, 9).requires_grad_()
    arguments = [u, *mixer.parameters()]
    want = torch.autograd.grad(mixer(u)[0][:, -1].square().sum(), arguments)
    got = torch.autograd.grad(run_in_pieces(mixer, u, [1, 2, 6])[0][:, -1].square().sum(), arguments)
    assert want[0][:, 0].abs().min() > 0
    for mine, whole in zip(got, want, strict=True):
        assert difference(mine, whole) <= EXACT


@pytest.mark.parametrize("name", MIXERS)
def test_reading_on_leaves_the_given_state_as_it_was(name):
    mixer = small_mixer(name, torch.float32)
    state = used_state(mixer, 2)
    before = state.clone()
    mixer(sequence(2, 20, torch.float32), state)
    mixer.step(sequence(2, 1, torch.float32)[:, 0], state)
    assert_states_agree(state, before, 0.0)


@pytest.mark.parametrize("name", MIXERS)
def test_a_state_of_fixed_size_does_not_hold_on_to_what_was_read(name):
    mixer = small_mixer(name, torch.float32)
    if mixer.state_size is None:
        pytest.skip("its memory is the whole past")
    after = {length: mixer(sequence(1, length, torch.float32))[1] for length in (10, 1000)}
    assert storage_bytes(after[10]) == storage_bytes(after[1000])


@pytest.mark.parametrize("name", MIXERS)
def test_state_size_counts_the_memory_of_one_sequence(name):
    mixer = small_mixer(name)
    sizes = [state.tensors() for state in (mixer(sequence(1, length))[1] for length in (3, 30))]
    grows = any(sizes[0][key].shape != sizes[1][key].shape for key in sizes[0])
    assert (mixer.state_size is None) == grows
    if mixer.state_size is not None:
        assert mixer.state_size in [tensor[0].numel() for tensor in sizes[0].values()]


@pytest.mark.parametrize("name", MIXERS)
def test_a_wrong_input_is_refused_with_its_shape(name):
    mixer = small_mixer(name)
    for wrong in (sequence(2, 3)[..., :-1], sequence(2, 3)[0]):
        with pytest.raises(ValueError, match=r"u must have shape \(batch, length, d_model\)"):
            mixer(wrong)
    with pytest.raises(ValueError, match=r"u must have shape \(batch, d_model\)"):
        mixer.step(sequence(2, 3), mixer.init_state(2))


@pytest.mark.parametrize("name", MIXERS)
def test_a_state_of_another_batch_is_refused(name):
    mixer = small_mixer(name)
    with pytest.raises(ValueError, match="state holds 3 sequences, but the input has 2"):
        mixer(sequence(2, 4), mixer.init_state(3))
    with pytest.raises(ValueError, match="state"):
        mixer.step(sequence(2, 1)[:, 0], mixer.init_state(3))


@pytest.mark.parametrize("dtype", LAW_TOLERANCE, ids=str)
@pytest.mark.parametrize("other", [{"d_conv": 2}, {"d_conv": 6}, {"d_state": 3}, {"expand": 1}], ids=str)
@pytest.mark.parametrize("name", ["naju", "coupled"])
def test_a_state_of_another_mixer_is_refused(name, other, dtype):
    mixer = small_mixer(name, dtype)
    state = small_mixer(name, dtype, **other).init_state(2)
    with pytest.raises(ValueError, match="state"):
        mixer(sequence(2, 9, dtype), state)
    with pytest.raises(ValueError, match="state"):
        mixer.step(sequence(2, 1, dtype)[:, 0], state)
