"""The Mamba mixer against the one in transformers, with the same weights."""

from __future__ import annotations

import pytest
import torch

from naju.mixers import build_mixer
from numerics import TOLERANCE, relative_rms

mamba = pytest.importorskip("transformers.models.mamba.modeling_mamba", reason="transformers is not installed")

D_MODEL = 24


def same_weights(d_state):
    """Ours and theirs in float32, with no parameter at its initial value."""
    torch.manual_seed(0)
    ours = build_mixer("mamba", D_MODEL, d_state=d_state)
    config = mamba.MambaConfig(hidden_size=D_MODEL, state_size=d_state, expand=2, conv_kernel=4, num_hidden_layers=1)
    theirs = mamba.MambaMixer(config, layer_idx=0).eval()
    pairs = {
        "in_proj.weight": ours.project_in.weight,
        "conv1d.weight": ours.conv.weight.unsqueeze(1),
        "conv1d.bias": ours.conv.bias,
        "x_proj.weight": ours.project_dtBC.weight,
        "dt_proj.weight": ours.project_dt.weight,
        "dt_proj.bias": ours.project_dt.bias,
        "A_log": ours.A_log,
        "D": ours.D,
        "out_proj.weight": ours.project_out.weight,
    }
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        assert {name for name, _ in theirs.named_parameters()} == pairs.keys()
        for name, parameter in theirs.named_parameters():
            parameter.copy_(pairs[name])
    return ours, theirs


@pytest.mark.parametrize("d_state", [4, 16])
def test_outputs_and_gradients_agree(d_state):
    ours, theirs = same_weights(d_state)
    u = torch.randn(2, 100, D_MODEL, requires_grad=True)
    got, want = ours(u)[0], theirs(u)
    assert relative_rms(got.detach(), want.detach()) <= TOLERANCE[torch.float32, "law"]
    cotangent = torch.randn_like(want)
    (mine,), (other,) = (torch.autograd.grad(out, u, cotangent) for out in (got, want))
    assert relative_rms(mine, other) <= TOLERANCE[torch.float32, "law"]


def test_the_layer_starts_as_theirs_does():
    """A and D are the same numbers; step sizes fill the same range."""
    torch.manual_seed(0)
    ours = build_mixer("mamba", 256)
    config = mamba.MambaConfig(hidden_size=256, state_size=16, num_hidden_layers=1)
    theirs = mamba.MambaMixer(config, layer_idx=0)
    assert torch.equal(ours.A_log, theirs.A_log)
    assert torch.equal(ours.D, theirs.D)
    steps = [torch.nn.functional.softplus(bias).detach() for bias in (ours.project_dt.bias, theirs.dt_proj.bias)]
    for dt in steps:
        assert 0.99e-3 < dt.min() < 1.2e-3
        assert 0.9e-1 < dt.max() < 1.01e-1
    assert steps[0].max() > 0.97e-1  # with the bias that softplus undoes, not about it
    assert 0.9 * 16**-0.5 < ours.project_dt.weight.abs().max() <= 16**-0.5
    assert steps[0].log().mean().item() == pytest.approx(steps[1].log().mean().item(), abs=0.3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dt_rank": 0}, "dt_rank 0 give no layer: every size must be at least 1"),
        ({"d_state": 0}, "d_state 0"),
        ({"backend": "fast"}, "unknown diagonal scan backend 'fast'; expected one of auto, mamba_ssm, triton, torch"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build_mixer("mamba", D_MODEL, **options)


@pytest.mark.parametrize("other", [{"d_conv": 2}, {"d_state": 3}, {"expand": 1}], ids=str)
def test_a_state_of_another_mamba_is_refused(other):
    mixer, state = build_mixer("mamba", D_MODEL), build_mixer("mamba", D_MODEL, **other).init_state(2)
    with pytest.raises(ValueError, match="state does not fit this mixer"):
        mixer(torch.randn(2, 5, D_MODEL), state)
