from __future__ import annotations

import math

import pytest
import torch

from naju.layers.gate import GateLogit, gate_logits
from naju.layers.layout import Layout


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("reparam", [False, True])
def test_the_logit_is_a_matrix_a_convolution_and_a_bias(rank, reparam):
    torch.manual_seed(0)
    gates = [GateLogit(5, 2, bias=bias, rank=rank, reparam=reparam).double() for bias in (3.0, -1.0)]
    tail, h = torch.randn(2, 1, 5).double(), torch.randn(2, 4, 5).double()
    before = torch.cat([tail, h], dim=1)[:, :-1]
    scale = math.sqrt(5) if reparam else 1.0
    for gate, logit in zip(gates, gate_logits(gates, h, tail, Layout(2)), strict=True):
        matrix = gate.weight.weight if rank is None else gate.weight.weight @ gate.reduce.weight
        want = h @ matrix.T + gate.conv.weight[:, 0] * before + gate.conv.weight[:, 1] * h + gate.bias
        assert gate.scale == scale
        assert torch.allclose(logit, want / scale, rtol=1e-13)
        for t in range(4):
            assert torch.allclose(gate.step(h[:, t], [before[:, t], h[:, t]]), want[:, t] / scale, rtol=1e-13)


def test_the_scaled_parameters_are_those_that_enter_the_logit_linearly():
    """All of them but the inner factor of a low rank: scaling both factors would scale the product twice."""
    gate = GateLogit(6, 3, bias=1.0, rank=2, reparam=True)
    scaled = {id(parameter) for parameter in gate.scaled_parameters()}
    names = {name for name, parameter in gate.named_parameters() if id(parameter) in scaled}
    assert names == {"weight.weight", "conv.weight", "bias"}


def test_a_logit_keeps_more_than_half_precision():
    """Near 7 bfloat16 has steps of 1/32, so that a smaller part of the sum would be lost."""
    gate = GateLogit(2, 1, bias=7.0, rank=None, reparam=False).bfloat16()
    with torch.no_grad():
        gate.weight.weight.zero_()
        gate.conv.weight.fill_(2.0**-9)
    h = torch.ones(1, 1, 2).bfloat16()
    (whole,) = gate_logits([gate], h, h[:, :0], Layout(1))
    for logit in (whole, gate.step(h[:, 0], [h[:, 0]])):
        assert logit.dtype == torch.float32
        assert logit.eq(7.0 + 2.0**-9).all()


@pytest.mark.parametrize("rank", [0, -3])
def test_a_rank_below_one_is_refused(rank):
    with pytest.raises(ValueError, match=f"gate_rank must be a positive integer or None, but is {rank}"):
        GateLogit(4, 2, bias=0.0, rank=rank, reparam=False)
