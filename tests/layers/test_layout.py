"""Each layout against lists of tokens, so that no gather or index of its own is taken on trust."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from naju.layers.layout import Layout, PackedLayout, PaddedLayout, layout_of
from naju.scan.dispatch import boundaries_on

LAW = settings(max_examples=60, deadline=None)
widths = st.integers(1, 5)


def numbered(batch, length):
    """A different number for every token, channel by channel."""
    return torch.arange(1.0, batch * length * 2 + 1).reshape(batch, length, 2)


def tails(rows, width):
    return -torch.arange(1.0, rows * (width - 1) * 2 + 1).reshape(rows, width - 1, 2)


def windows(tail, tokens):
    """For each token the tokens of its window, oldest first, and the window that the next sequence would inherit."""
    joined = [*tail, *tokens]
    count = len(tail)
    return [joined[t : t + count + 1] for t in range(len(tokens))], joined[len(joined) - count :]


def assert_windows(layout_past, row, places, expected):
    for place, window in zip(places, expected, strict=True):
        assert torch.equal(torch.stack([delayed[row, place] for delayed in layout_past]), torch.stack(window))


def assert_tail(tail, expected):
    assert tail.shape[0] == len(expected)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(tail, expected, strict=True))


@LAW
@given(length=st.integers(1, 8), width=widths)
def test_plain_rows(length, width):
    u, tail, layout = numbered(2, length), tails(2, width), Layout(2)
    past, last = layout.past(u, tail), layout.last(u, tail)
    assert len(past) == width
    for row in range(2):
        expected, left = windows(tail[row], u[row])
        assert_windows(past, row, range(length), expected)
        assert_tail(last[row], left)


@LAW
@given(mask=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=2, max_size=2), width=widths)
def test_padded_rows(mask, width):
    mask = torch.tensor(mask)
    u, tail, layout = numbered(2, 6), tails(2, width), PaddedLayout(mask)
    arranged = layout.arrange(u)
    past, last = layout.past(arranged, tail), layout.last(arranged, tail)
    for row in range(2):
        real = u[row, mask[row]]
        assert torch.equal(arranged[row, : len(real)], real)
        assert arranged[row, len(real) :].eq(0).all()
        expected, left = windows(tail[row], real)
        assert_windows(past, row, range(len(real)), expected)
        assert_tail(last[row], left)
    assert torch.equal(layout.restore(arranged), u * mask.unsqueeze(-1))


@LAW
@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any), width=widths)
def test_packed_rows(counts, width):
    ends = list(accumulate(counts))
    u, tail = numbered(1, sum(counts)), tails(len(counts), width)
    layout = PackedLayout(torch.tensor([0, *ends]), sum(counts))
    past, last = layout.past(u, tail), layout.last(u, tail)
    assert last.shape == tail.shape
    for row, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        expected, left = windows(tail[row], u[0, start:end])
        assert_windows(past, 0, range(start, end), expected)
        assert_tail(last[row], left)


def test_padding_is_held_by_its_gates():
    layout = PaddedLayout(torch.tensor([[0, 1, 0, 1]]))
    f_logit, i_logit = layout.hold(torch.zeros(1, 4, 1), torch.zeros(1, 4, 1))
    assert f_logit.flatten().tolist() == [0.0, 0.0, float("inf"), float("inf")]
    assert i_logit.flatten().tolist() == [0.0, 0.0, float("-inf"), float("-inf")]


def test_nan_in_padding_is_left_out_and_gets_no_gradient():
    u = torch.tensor([[[1.0], [float("nan")], [3.0]]], requires_grad=True)
    layout = PaddedLayout(torch.tensor([[1, 0, 1]]))
    arranged = layout.arrange(u)
    assert arranged.flatten().tolist() == [1.0, 3.0, 0.0]
    (gradient,) = torch.autograd.grad(arranged.square().sum(), u)
    assert gradient.flatten().tolist() == [2.0, 0.0, 6.0]


def test_the_layout_follows_from_what_is_given():
    u = torch.zeros(1, 4, 2)
    assert type(layout_of(u)) is Layout
    assert type(layout_of(u, attention_mask=torch.ones(1, 4))) is PaddedLayout
    packed = layout_of(u, cu_seqlens=torch.tensor([0, 1, 4]))
    assert type(packed) is PackedLayout
    assert packed.rows == 2


def test_boundaries_of_the_host_go_to_where_the_tokens_are():
    u, tail = torch.empty(1, 4, 2, device="meta"), torch.empty(2, 3, 2, device="meta")
    layout = layout_of(u, cu_seqlens=torch.tensor([0, 1, 4]))
    assert layout.cu_seqlens.device == u.device
    assert [delayed.shape for delayed in layout.past(u, tail)] == [u.shape] * 4
    assert layout.last(u, tail).shape == tail.shape


def test_boundaries_of_the_host_are_traced_for_tokens_on_a_gpu():
    with FakeTensorMode():
        u, boundaries = torch.empty(1, 4, 2, device="cuda"), torch.tensor([0, 1, 4])
        moved = torch.compile(boundaries_on, backend="eager", fullgraph=True)(u.device, boundaries)
    assert moved.device.type == "cuda"


def test_boundaries_of_the_host_are_checked_for_tokens_elsewhere():
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the length 4"):
        layout_of(torch.empty(1, 4, 2, device="meta"), cu_seqlens=torch.tensor([0, 5]))


def test_what_does_not_fit_is_refused():
    u = torch.zeros(2, 4, 2)
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(2, 4\), but has \(4, 2\)"):
        layout_of(u, attention_mask=torch.ones(4, 2))
    with pytest.raises(ValueError, match="needs batch 1, but h has batch 2"):
        layout_of(u, cu_seqlens=torch.tensor([0, 4]))
