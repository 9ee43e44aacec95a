"""Two mixers over one sequence, one of which reads it from its end."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_cases import HYBRID, sentences, small_config

from memories import D_MODEL, EXACT, SMALL, difference, few_examples
from naju.mixers import MIXERS, build_mixer
from naju.models import Backbone, BidirectionalMixer

everywhere = pytest.mark.parametrize("name", MIXERS)


def both_ways(name):
    torch.manual_seed(0)
    return BidirectionalMixer(*(build_mixer(name, D_MODEL, **SMALL.get(name, {})) for _ in range(2))).double()


def sequence(batch, length):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, length, D_MODEL, generator=generator, dtype=torch.float64)


@everywhere
def test_it_is_the_sum_of_both_readings(name):
    mixer, u = both_ways(name), sequence(2, 9)
    out, state = mixer(u)
    assert difference(out, mixer.ahead(u)[0] + mixer.back(u.flip(1))[0].flip(1)) <= EXACT
    assert state is None


@everywhere
def test_a_mirrored_sequence_and_exchanged_mixers_give_the_mirrored_output(name):
    mixer, u = both_ways(name), sequence(2, 9)
    exchanged = BidirectionalMixer(mixer.back, mixer.ahead)
    assert difference(exchanged(u.flip(1))[0].flip(1), mixer(u)[0]) <= EXACT
    assert difference(mixer(u.flip(1))[0].flip(1), mixer(u)[0]) > 0.1


def test_a_mirrored_model_gives_the_mirrored_features():
    torch.manual_seed(0)
    backbone = Backbone(small_config(HYBRID, bidirectional=True), 1.0).double()
    tokens = sentences(2, 9)
    want, _ = backbone(tokens)
    for block in backbone.blocks:
        block.mixer = BidirectionalMixer(block.mixer.back, block.mixer.ahead)
    assert difference(backbone(tokens.flip(1))[0].flip(1), want) <= EXACT


@everywhere
@few_examples
@given(mask=st.lists(st.lists(st.integers(0, 1), min_size=8, max_size=8), min_size=3, max_size=3))
def test_padded_equals_unpadded(name, mask):
    mask, u, mixer = torch.tensor(mask), sequence(3, 8), both_ways(name)
    dirty = u.masked_fill(mask.unsqueeze(-1) == 0, float("nan"))
    out, _ = mixer(dirty, attention_mask=mask)
    assert out[mask == 0].eq(0).all()
    for row, real in enumerate(mask.bool()):
        if real.any():
            assert difference(out[row : row + 1, real], mixer(u[row : row + 1, real])[0]) <= EXACT


@everywhere
@few_examples
@given(counts=st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any))
def test_packed_equals_apart(name, counts):
    u, mixer = sequence(1, sum(counts)), both_ways(name)
    out, _ = mixer(u, cu_seqlens=torch.tensor([0, *accumulate(counts)]))
    for piece, got in zip(u.split(counts, dim=1), out.split(counts, dim=1), strict=True):
        if piece.shape[1] > 0:
            assert difference(got, mixer(piece)[0]) <= EXACT


@everywhere
def test_every_token_reaches_every_output(name):
    mixer, u = both_ways(name), sequence(1, 7)
    rows = torch.autograd.functional.jacobian(lambda v: mixer(v)[0].sum(dim=(0, 2)), u)
    assert rows.ne(0).any(dim=-1).all()


@everywhere
def test_it_cannot_stream(name):
    mixer, u = both_ways(name), sequence(2, 5)
    state = mixer.ahead.init_state(2)
    for attempt in (lambda: mixer(u, state), lambda: mixer.step(u[:, 0], state), lambda: mixer.init_state(2)):
        with pytest.raises(TypeError, match="reads the whole sequence at once"):
            attempt()


def test_a_model_of_both_directions_cannot_stream():
    backbone = Backbone(small_config(HYBRID, bidirectional=True), 1.0)
    tokens = sentences(2, 5)
    _, state = backbone(tokens)
    for attempt in (
        lambda: backbone(tokens, state),
        lambda: backbone.step(tokens[:, 0], state),
        lambda: backbone.init_state(2),
    ):
        with pytest.raises(TypeError, match="reads the whole sequence at once"):
            attempt()


def test_the_memory_is_that_of_both():
    assert both_ways("naju").state_size == 2 * build_mixer("naju", D_MODEL, **SMALL["naju"]).state_size
    assert both_ways("attention").state_size is None


def test_both_directions_need_one_width():
    with pytest.raises(ValueError, match="both directions need one d_model, but have 8 and 16"):
        BidirectionalMixer(build_mixer("naju", 8), build_mixer("naju", 16))
