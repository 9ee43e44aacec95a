"""The Mamba-2 mixer against the one in transformers, with the same weights."""

from __future__ import annotations

import pytest
import torch
from outside import assert_same_function

from memories import unsettle
from naju.mixers import build_mixer

mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2", reason="transformers is not installed")

D_MODEL, D_STATE, D_HEAD = 24, 6, 8


def same_weights():
    """Ours and theirs in float32, with no parameter at its initial value."""
    ours = build_mixer("mamba2", D_MODEL, d_state=D_STATE, d_head=D_HEAD)
    unsettle(ours)
    config = mamba2.Mamba2Config(
        hidden_size=D_MODEL,
        state_size=D_STATE,
        head_dim=D_HEAD,
        num_heads=2 * D_MODEL // D_HEAD,
        expand=2,
        n_groups=1,
        conv_kernel=4,
        chunk_size=32,
        num_hidden_layers=1,
    )
    theirs = mamba2.Mamba2Mixer(config, layer_idx=0).eval()
    pairs = {
        "in_proj.weight": ours.project_in.weight,
        "conv1d.weight": ours.conv.weight.unsqueeze(1),
        "conv1d.bias": ours.conv.bias,
        "dt_bias": ours.dt_bias,
        "A_log": ours.A_log,
        "D": ours.D,
        "norm.weight": ours.norm.weight,
        "out_proj.weight": ours.project_out.weight,
    }
    with torch.no_grad():
        assert {name for name, _ in theirs.named_parameters()} == pairs.keys()
        for name, parameter in theirs.named_parameters():
            parameter.copy_(pairs[name])
    return ours, theirs


def test_outputs_and_gradients_agree():
    ours, theirs = same_weights()
    u = torch.randn(2, 100, D_MODEL, requires_grad=True)
    assert_same_function([ours(u)[0]], [theirs(u)], [u])


def test_the_layer_starts_in_the_usual_ranges():
    mixer = build_mixer("mamba2", 512, d_head=1, d_state=1)  # many heads, to see the ranges filled
    dt, A = torch.nn.functional.softplus(mixer.dt_bias), mixer.A_log.exp()
    assert 0.99e-3 < dt.min() < 1.1e-3
    assert 0.97e-1 < dt.max() < 1.01e-1
    assert dt.log().mean().item() == pytest.approx(torch.tensor([1e-3, 0.1]).log().mean().item(), abs=0.2)
    assert 1 <= A.min() < 1.2
    assert 15.8 < A.max() < 16.01
    assert mixer.D.unique().tolist() == [1.0]
