"""Padding, wherever it stands and whatever stands in it, changes nothing."""

from __future__ import annotations

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

# Each row pads differently: left, right, both sides, holes, nothing, everything.
PADDINGS = torch.tensor(
    [
        [0, 0, 0, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 1, 1, 0],
        [1, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
)


@st.composite
def masks(draw, rows=3):
    length = draw(st.integers(1, 20))
    row = st.lists(st.integers(0, 1), min_size=length, max_size=length)
    return torch.tensor(draw(st.lists(row, min_size=rows, max_size=rows)))


def assert_rows_equal_unpadded(mixer, u, mask, state, tolerance):
    out, after = mixer(u, state, attention_mask=mask)
    assert out[~mask.bool()].eq(0).all()
    for row, real in enumerate(mask.bool()):
        start = None if state is None else state[row]
        if not real.any():
            assert_untouched(mixer, after[row], start or mixer.init_state(1), tolerance)
            continue
        want, memory = mixer(u[row : row + 1, real], start)
        assert difference(out[row : row + 1, real], want) <= tolerance
        assert_same_memory(mixer, after[row], memory, tolerance)


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("dtype", LAW_TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MIXERS)
def test_each_kind_of_padding_equals_none(name, dtype, carried):
    mixer = small_mixer(name, dtype)
    u = sequence(*PADDINGS.shape, dtype)
    state = used_state(mixer, len(PADDINGS)) if carried else None
    assert_rows_equal_unpadded(mixer, u, PADDINGS, state, LAW_TOLERANCE[dtype])


@pytest.mark.parametrize("name", MIXERS)
@given(mask=masks(), width=widths, seed=seeds, carried=st.booleans())
def test_any_mask_equals_no_padding(name, mask, width, seed, carried):
    mixer = small_mixer(name, seed=seed, **with_width(name, width))
    state = used_state(mixer, len(mask)) if carried else None
    assert_rows_equal_unpadded(mixer, sequence(*mask.shape, seed=seed), mask, state, EXACT)


@pytest.mark.parametrize("name", MIXERS)
@given(mask=masks(), cut=st.integers(1, 19), seed=seeds)
def test_padding_may_be_cut_anywhere(name, mask, cut, seed):
    mixer = small_mixer(name, seed=seed)
    u = sequence(*mask.shape, seed=seed)
    want, memory = mixer(u, attention_mask=mask)
    first, state = mixer(u[:, :cut], attention_mask=mask[:, :cut])
    if cut < u.shape[1]:
        second, state = mixer(u[:, cut:], state, attention_mask=mask[:, cut:])
        first = torch.cat([first, second], dim=1)
    assert difference(first, want) <= EXACT
    assert_same_memory(mixer, state, memory, EXACT)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("name", MIXERS)
def test_what_stands_in_the_padding_goes_nowhere(name, garbage):
    mixer = small_mixer(name, torch.float32)
    padding = ~PADDINGS.bool().unsqueeze(-1)
    clean = sequence(*PADDINGS.shape, torch.float32).masked_fill(padding, 0.0).requires_grad_()
    dirty = clean.detach().masked_fill(padding, garbage).requires_grad_()
    want, memory = mixer(clean, attention_mask=PADDINGS)
    got, state = mixer(dirty, attention_mask=PADDINGS)
    assert torch.equal(got, want)
    assert_same_memory(mixer, state, memory, 0.0)
    wanted = torch.autograd.grad(want.square().sum(), [clean, *mixer.parameters()])
    found = torch.autograd.grad(got.square().sum(), [dirty, *mixer.parameters()])
    assert found[0].masked_select(padding).eq(0).all()
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", MIXERS)
def test_a_mask_of_ones_is_no_mask(name):
    mixer = small_mixer(name)
    u = sequence(2, 7)
    want, memory = mixer(u)
    got, state = mixer(u, attention_mask=torch.ones(2, 7))
    assert difference(got, want) <= EXACT
    assert_same_memory(mixer, state, memory, EXACT)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("name", MIXERS)
def test_a_mask_may_have_any_of_the_usual_dtypes(name, dtype):
    mixer = small_mixer(name)
    u = sequence(*PADDINGS.shape)
    assert torch.equal(mixer(u, attention_mask=PADDINGS.to(dtype))[0], mixer(u, attention_mask=PADDINGS)[0])


@pytest.mark.parametrize(
    "mask", [(1.0 - PADDINGS) * -1e9, (1.0 - PADDINGS).log(), torch.zeros(PADDINGS.shape), PADDINGS * 0.5]
)
@pytest.mark.parametrize("name", MIXERS)
def test_a_mask_that_would_be_added_to_scores_is_refused(name, mask):
    """It has 0 where there is a token; read as a mask of ones it would turn everything round."""
    with pytest.raises(ValueError, match="attention_mask must be 1 at tokens and 0 at padding; of floats"):
        small_mixer(name)(sequence(*PADDINGS.shape), attention_mask=mask)


def test_a_mask_of_floats_is_looked_at_where_values_are_not_at_hand():
    mixer, u, mask = small_mixer("naju"), sequence(*PADDINGS.shape), PADDINGS.double()
    want, _ = mixer(u, attention_mask=PADDINGS)
    compiled = torch.compile(mixer, backend="aot_eager", fullgraph=True)
    assert difference(compiled(u, attention_mask=mask)[0], want) <= EXACT
    with pytest.raises(RuntimeError, match="attention_mask must be 1 at tokens"):
        compiled(u, attention_mask=mask.log())
    row_by_row = torch.vmap(lambda u, mask: mixer(u[None], attention_mask=mask[None])[0][0])
    assert difference(row_by_row(u, PADDINGS), want) <= EXACT
    with pytest.raises(TypeError, match="attention_mask must be of booleans or integers under vmap"):
        row_by_row(u, mask)


@pytest.mark.parametrize("name", MIXERS)
def test_a_mask_that_does_not_fit_is_refused(name):
    mixer = small_mixer(name)
    u = sequence(1, 5)
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(1, 5\), but has \(1, 4\)"):
        mixer(u, attention_mask=torch.ones(1, 4))
    with pytest.raises(ValueError, match="exclude each other"):
        mixer(u, attention_mask=torch.ones(1, 5), cu_seqlens=torch.tensor([0, 5]))
