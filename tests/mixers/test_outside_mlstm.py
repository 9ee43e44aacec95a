"""The mLSTM cell against mlstm_kernels' native recurrence, and the layer's parts against their definitions."""

from __future__ import annotations

import pytest
import torch
from outside import assert_same_function

from naju.layers.layout import Layout
from naju.mixers import build_mixer
from naju.mixers.mlstm import BlockLinear, mlstm_cell
from numerics import relative_rms

BATCH, HEADS, KEY = 2, 3, 4


def draw(length, i_shift):
    def normal(*shape):
        return torch.randn(BATCH, *shape, dtype=torch.float64)

    drive = [normal(length, HEADS, KEY) for _ in range(3)]
    logits = [normal(length, HEADS) + 3, 3 * normal(length, HEADS) + i_shift]
    memory = [normal(HEADS, KEY, KEY), normal(HEADS, KEY)]
    return [tensor.requires_grad_() for tensor in (*drive, *logits, *memory)], normal(HEADS)


def true_memory(o, C, n, m):
    """Outputs and what the state stands for: their C and n carry a derivative through m that cancels only here."""
    scale = m.exp().unsqueeze(-1)
    return o, C * scale.unsqueeze(-1), n * scale


@pytest.mark.parametrize("length", [1, 9, 150])
@pytest.mark.parametrize("i_shift", [-8.0, 0.0, 12.0])
def test_outputs_states_and_gradients_agree(length, i_shift):
    native = pytest.importorskip("mlstm_kernels.torch.recurrent.native_sequence", reason="mlstm_kernels is missing")
    arguments, m = draw(length, i_shift)
    q, k, v, f_logit, i_logit, C, n = arguments
    *results, level = mlstm_cell(*arguments, m, Layout(BATCH))
    heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v, i_logit, f_logit)]
    o, (last_C, last_n, last_m) = native.mlstm_recurrent_sequence__native_fw(
        *heads_first, C, n, m.unsqueeze(-1), return_last_states=True, eps=0.0, dtype_state=torch.float64
    )
    assert relative_rms(level, last_m.squeeze(-1).detach()) <= 1e-14
    theirs = true_memory(o.transpose(1, 2), last_C, last_n, last_m.squeeze(-1))
    assert_same_function(true_memory(*results, level), theirs, arguments)


def test_an_enormous_write_gate_is_harmless():
    (q, k, v, f_logit, i_logit, C, n), m = draw(40, 1000.0)
    o, *_ = mlstm_cell(q, k, v, f_logit, i_logit, C, n, m, Layout(BATCH))
    same, *_ = mlstm_cell(q, k, v, f_logit, i_logit - 900, C * 0, n * 0, m, Layout(BATCH))
    assert relative_rms(o.detach(), same.detach()) <= 1e-12


def test_a_block_linear_map_is_a_block_diagonal_matrix():
    layer = BlockLinear(12, 4, std=0.5).double()
    u = torch.randn(2, 5, 12, dtype=torch.float64)
    assert torch.equal(layer.matrix(), torch.block_diag(*layer.weight))
    assert relative_rms(layer(u).detach(), (u @ layer.matrix()).detach()) <= 1e-15


def test_the_layer_starts_holding_whatever_the_input_is():
    mixer = build_mixer("mlstm", 32)
    assert not mixer.gates.weight.any()
    assert torch.equal(mixer.gate_bias[:4], torch.tensor([3.0, 4.0, 5.0, 6.0]))


@pytest.mark.parametrize("d_model", [64, 256])
def test_maps_start_as_small_as_in_xlstms_code(d_model):
    mixer = build_mixer("mlstm", d_model)
    for part in (mixer.project_in, mixer.project_q, mixer.project_k, mixer.project_v):
        assert float(part.weight.detach().std()) == pytest.approx((2 / (5 * d_model)) ** 0.5, rel=0.1)
