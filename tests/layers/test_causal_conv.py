"""The short convolution against torch's own, for the fused float32 path and its float64 twin."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from naju.layers.causal_conv import DepthwiseConv, convolve, weighted_sum
from naju.layers.layout import Layout, PackedLayout
from numerics import TOLERANCE, relative_rms

CHANNELS = 5
DTYPES = [torch.float32, torch.float64]


def drawn(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def arguments(rows, length, width, outputs, dtype, *, batch=None, adds=True):
    """u, tail, and for each output a weight, a bias and an addend."""
    batch = rows if batch is None else batch
    return {
        "u": drawn(batch, length, CHANNELS, dtype=dtype, seed=1),
        "tail": drawn(rows, width - 1, CHANNELS, dtype=dtype, seed=2),
        "weights": [drawn(CHANNELS, width, dtype=dtype, seed=10 + k) for k in range(outputs)],
        "biases": [drawn(CHANNELS, dtype=dtype, seed=20 + k) for k in range(outputs)],
        "adds": [drawn(batch, length, CHANNELS, dtype=dtype, seed=30 + k) for k in range(outputs)] if adds else [],
    }


def torchs_own(u, tail, weights, biases, adds, *, silu):
    """In float64 by conv1d on the joined past; returns one output for each weight."""
    joined = torch.cat([tail, u], dim=1).double().transpose(1, 2)
    outputs = []
    for k, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        out = F.conv1d(joined, weight.double().unsqueeze(1), bias.double(), groups=CHANNELS).transpose(1, 2)
        out = out + adds[k].double() if adds else out
        outputs.append(F.silu(out) if silu else out)
    return outputs


def leaves(given):
    return [given["u"], given["tail"], *given["weights"], *given["biases"], *given["adds"]]


def assert_same_values_and_gradients(got, want, given, dtype):
    cotangents = [drawn(*out.shape, seed=40 + k).detach() for k, out in enumerate(want)]
    inputs = [tensor for tensor in leaves(given) if tensor.numel() > 0]
    mine = torch.autograd.grad(got, inputs, [cotangent.to(dtype) for cotangent in cotangents])
    theirs = torch.autograd.grad(want, inputs, cotangents)
    for out, expected in zip(got, want, strict=True):
        assert out.dtype == dtype
        assert relative_rms(out.detach(), expected.detach()) <= TOLERANCE[dtype, "forward"]
    for gradient, expected in zip(mine, theirs, strict=True):
        assert relative_rms(gradient, expected) <= TOLERANCE[dtype, "gradient"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("outputs", [1, 2, 3])
@pytest.mark.parametrize(("adds", "silu"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("length", "width"), [(1, 1), (1, 4), (2, 4), (9, 1), (9, 5), (40, 4)])
def test_it_is_torchs_depthwise_convolution(length, width, adds, silu, outputs, dtype):
    given = arguments(3, length, width, outputs, dtype, adds=adds)
    got = convolve(**given, layout=Layout(3), silu=silu)
    assert_same_values_and_gradients(got, torchs_own(**given, silu=silu), given, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_activation_and_addends_exclude_each_other(dtype):
    with pytest.raises(ValueError, match="either adds or silu=True"):
        convolve(**arguments(1, 3, 2, 1, dtype), layout=Layout(1), silu=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(counts=st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any), width=st.integers(1, 5))
def test_packed_sequences_are_convolved_apart(dtype, counts, width):
    given = arguments(len(counts), sum(counts), width, 2, dtype, batch=1)
    got = convolve(**given, layout=PackedLayout(torch.tensor([0, *accumulate(counts)]), sum(counts)))
    pieces = []
    for row, (start, end) in enumerate(zip([0, *accumulate(counts)][:-1], accumulate(counts), strict=True)):
        apart = given | {"u": given["u"][:, start:end], "tail": given["tail"][row : row + 1]}
        apart["adds"] = [add[:, start:end] for add in given["adds"]]
        if start < end:
            pieces.append(torchs_own(**apart, silu=False))
    want = [torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True)]
    for out, expected in zip(got, want, strict=True):
        assert relative_rms(out.detach(), expected.detach()) <= TOLERANCE[dtype, "forward"]
    mine = torch.autograd.grad(sum(out.double().square().sum() for out in got), leaves(given))
    theirs = torch.autograd.grad(sum(out.square().sum() for out in want), leaves(given))
    for gradient, expected in zip(mine, theirs, strict=True):
        assert torch.equal(gradient, expected) or relative_rms(gradient, expected) <= TOLERANCE[dtype, "gradient"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_inputs_are_read_as_they_lie(dtype):
    given = arguments(2, 12, 4, 2, dtype)
    want = convolve(**given, layout=Layout(2))
    wide = torch.cat([given["u"], given["u"]], dim=-1)
    strided = given | {
        "u": wide.chunk(2, dim=-1)[0],
        "adds": [add.transpose(1, 2).contiguous().transpose(1, 2) for add in given["adds"]],
    }
    for got, expected in zip(convolve(**strided, layout=Layout(2)), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's forward mode
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_mode_and_second_derivatives_are_right_or_refused(dtype):
    given = arguments(1, 6, 3, 1, dtype, adds=False)
    rest = {name: value for name, value in given.items() if name != "u"}

    def energy(u):
        return convolve(u, **rest, layout=Layout(1), silu=True)[0].square().sum()

    def truth(u):
        return torchs_own(u, **rest, silu=True)[0].square().sum()

    u, direction = given["u"], drawn(1, 6, CHANNELS, dtype=dtype, seed=5).detach()
    _, slope = torch.func.jvp(energy, (u.detach(),), (direction,))
    _, wanted = torch.func.jvp(truth, (u.detach(),), (direction,))
    assert slope.item() == pytest.approx(wanted.item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(energy(u), u, create_graph=True)
    (true_gradient,) = torch.autograd.grad(truth(u), u, create_graph=True)
    (wanted,) = torch.autograd.grad((true_gradient * direction).sum(), u)
    try:
        (second,) = torch.autograd.grad((gradient * direction).sum(), u)
    except RuntimeError:
        return
    assert relative_rms(second, wanted) <= TOLERANCE[dtype, "gradient"]


def test_half_precision_is_summed_in_float32():
    past = [torch.tensor([[256.0]]).bfloat16(), torch.tensor([[1.0]]).bfloat16()]
    total = weighted_sum(past, torch.ones(1, 2).bfloat16(), torch.zeros(1).bfloat16())
    assert total.dtype == torch.float32
    assert total.item() == 257.0  # bfloat16 would round it to 256


@pytest.mark.parametrize("width", [1, 4])
def test_initial_weights_are_bounded_like_torchs_own(width):
    torch.manual_seed(0)
    conv = DepthwiseConv(2000, width, bias=True)
    bound = width**-0.5
    for parameter in (conv.weight, conv.bias):
        assert 0.95 * bound < parameter.abs().max() <= bound
        assert parameter.mean().abs() < 0.1 * bound
    assert len(list(DepthwiseConv(3, width, bias=False).parameters())) == 1
