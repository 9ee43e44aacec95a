"""The mLSTM cell against mlstm_kernels' native recurrence, and the layer's parts against their definitions."""

from __future__ import annotations

import pytest
import torch
from outside import assert_same_function
from torch.nn import functional as F

from memories import unsettle
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


def test_the_layer_around_the_cell_is_its_definition():
    mixer = build_mixer("mlstm", 16, n_heads=2).double()
    unsettle(mixer)
    u = torch.randn(BATCH, 20, 16, dtype=torch.float64, requires_grad=True)
    u_tilde, z = mixer.project_in(u).chunk(2, dim=-1)
    padded = F.pad(u_tilde.transpose(1, 2), (3, 0))
    h = F.silu(F.conv1d(padded, mixer.conv.weight.unsqueeze(1), mixer.conv.bias, groups=32)).transpose(1, 2)
    qkv = [h @ mixer.project_q.matrix(), h @ mixer.project_k.matrix(), u_tilde @ mixer.project_v.matrix()]
    f_logit, i_logit = (mixer.gates(torch.cat(qkv, dim=-1)) + mixer.gate_bias).chunk(2, dim=-1)
    heads, empty = [part.unflatten(-1, (2, 16)) for part in qkv], mixer.init_state(BATCH)
    o, *_ = mlstm_cell(*heads, f_logit, i_logit, empty.C, empty.n, empty.m, Layout(BATCH))
    normed = [F.layer_norm(o[..., head, :], (16,), mixer.norm.weight[head]) for head in range(2)]
    want = mixer.project_out((torch.cat(normed, dim=-1) + mixer.skip * h) * F.silu(z))
    assert_same_function([mixer(u)[0]], [want], [u, *mixer.parameters()])


def test_the_layer_starts_holding_whatever_the_input_is():
    mixer = build_mixer("mlstm", 32)
    assert not mixer.gates.weight.any()
    assert torch.equal(mixer.gate_bias[:4], torch.tensor([3.0, 4.0, 5.0, 6.0]))


@pytest.mark.parametrize("d_model", [64, 256])
def test_maps_start_as_small_as_in_xlstms_code(d_model):
    mixer = build_mixer("mlstm", d_model)
    for part in (mixer.project_in, mixer.project_q, mixer.project_k, mixer.project_v):
        assert float(part.weight.detach().std()) == pytest.approx((2 / (5 * d_model)) ** 0.5, rel=0.1)
