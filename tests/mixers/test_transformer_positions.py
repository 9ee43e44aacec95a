"""What the Transformer knows about places, and where its table ends."""

from __future__ import annotations

import pytest
import torch
from mixer_cases import run_in_steps, sequence, small_mixer

from memories import EXACT, difference
from naju.mixers import build_mixer


def small(**options):
    return small_mixer("transformer", **({"max_length": 8} | options))


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_places_matter(positions):
    """A layer without positions would answer the last token alike however the past is ordered."""
    mixer, u = small(positions=positions), sequence(1, 6)
    shuffled = u[:, [3, 0, 4, 1, 2, 5]]
    assert difference(mixer(shuffled)[0][:, -1], mixer(u)[0][:, -1]) > 1e-3


def test_attention_without_positions_forgets_the_order():
    mixer, u = small_mixer("attention", rotary=False), sequence(1, 6)
    shuffled = u[:, [3, 0, 4, 1, 2, 5]]
    assert difference(mixer(shuffled)[0][:, -1], mixer(u)[0][:, -1]) <= EXACT


def test_rotary_positions_are_relative_and_learned_ones_are_not():
    """A token before the sequence that nobody may attend to moves its positions by one, and nothing else."""
    u = sequence(1, 5)
    for positions, moves in (("rotary", False), ("learned", True)):
        mixer = small(positions=positions)
        _, state = mixer(sequence(1, 1, seed=9))
        later = type(state)(state.keys, state.values, torch.zeros_like(state.real), state.seen)
        assert (difference(mixer(u, later)[0], mixer(u)[0]) > 1e-3) is moves


def test_the_table_can_be_used_to_its_end():
    mixer = small()
    assert mixer(sequence(2, 8))[0].isfinite().all()
    assert run_in_steps(mixer, sequence(2, 8), mixer.init_state(2))[0].isfinite().all()


def test_a_sequence_longer_than_the_table_is_refused():
    mixer = small()
    told = "learned positions end at max_length 8, but the sequence has 9 tokens; .* positions='rotary'"
    with pytest.raises(ValueError, match=told):
        mixer(sequence(2, 9))
    _, state = mixer(sequence(2, 8))
    with pytest.raises(ValueError, match=told):
        mixer.step(sequence(2, 1)[:, 0], state)
    assert small(positions="rotary")(sequence(2, 9))[0].isfinite().all()


def test_padding_and_packed_neighbours_do_not_use_up_the_table():
    mixer, u = small(), sequence(1, 12)
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1]])
    assert mixer(u, attention_mask=mask)[0].isfinite().all()
    assert mixer(u, cu_seqlens=torch.tensor([0, 5, 12]))[0].isfinite().all()
    with pytest.raises(ValueError, match="the sequence has 9 tokens"):
        mixer(u, attention_mask=mask | torch.tensor([1, *[0] * 11]))
    with pytest.raises(ValueError, match="the sequence has 9 tokens"):
        mixer(u, cu_seqlens=torch.tensor([0, 3, 12]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": "sinus"}, "positions must be 'learned' or 'rotary', but is 'sinus'"),
        ({"max_length": 0}, "max_length and feed_forward must leave at least one position .* but are 0 and 4"),
        ({"feed_forward": 0}, "but are 4096 and 0"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build_mixer("transformer", 16, **options)
