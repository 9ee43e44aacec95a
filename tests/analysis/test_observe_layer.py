"""A run holds exactly what the layer scans, and refuses what it cannot hold."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from naju import LanguageModel, ModelConfig, NajuMixer, naju_scan
from naju.analysis import (
    complementary_pair,
    draw_memory,
    draw_reachable,
    effective_memory,
    freeze,
    layer_input,
    layer_sizes,
    observe_layer,
    observe_scan,
    readout_growth,
    stability_report,
    tau_e,
)
from naju.mixers import build_mixer
from naju.models import backbone


def scan_arguments(batch=2, length=5, d_inner=3, d_state=2):
    wide = [torch.randn(batch, length, d_inner) for _ in range(3)]
    return [*wide, *(torch.randn(batch, length, d_state) for _ in range(2))]


def test_a_run_scanned_again_is_the_layers_own_output():
    torch.manual_seed(0)
    mixer = NajuMixer(8, d_state=4).double()
    u = torch.randn(3, 11, 8, dtype=torch.float64)
    _, state = mixer(torch.randn(3, 6, 8, dtype=torch.float64))
    run = observe_layer(mixer, u, state=state, row=1)
    drive = (part.T.unsqueeze(0) for part in (run.h, run.f_logit, run.i_logit))
    y, x = naju_scan(
        *drive, run.B.unsqueeze(0), run.C.unsqueeze(0), alpha=run.alpha, D=run.D, initial_state=run.x0.unsqueeze(0)
    )
    z = mixer.scan_arguments(u, state).z[1:2]
    out, after = mixer(u, state)
    torch.testing.assert_close(mixer.project_out(y * F.silu(z)), out[1:2], rtol=0, atol=1e-14)
    torch.testing.assert_close(x, after.x[1:2], rtol=0, atol=1e-14)


def test_a_low_precision_layer_is_observed_in_float64():
    torch.manual_seed(0)
    mixer = NajuMixer(8, d_state=4).bfloat16()
    run = observe_layer(mixer, torch.randn(1, 7, 8).bfloat16())
    assert {part.dtype for part in (run.h, run.f, run.i, run.B, run.C, run.D, run.x0)} == {torch.float64}
    assert not run.D.requires_grad


def test_channels_keep_their_numbers():
    arguments = scan_arguments()
    whole, some = observe_scan(*arguments), observe_scan(*arguments, channels=[2, 0])
    assert some.channels == (2, 0)
    assert torch.equal(some.f_logit, whole.f_logit[[2, 0]])
    assert torch.equal(some.select([0]).h, whole.h[:1])


def test_layer_input_is_what_reached_the_layer_inside_the_model():
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab_size=11, d_model=8, n_layers=2, mixer_options={"d_state": 4}))
    tokens = torch.randint(11, (2, 9))
    second = model.backbone.blocks[1]
    u = layer_input(model, second.mixer, tokens)
    first_out, _ = model.backbone.blocks[0](model.backbone.embedding(tokens), None, None, None)
    torch.testing.assert_close(u, second.norm(first_out))
    assert not second.mixer._forward_pre_hooks
    with pytest.raises(ValueError, match="this Linear did not"):
        layer_input(model, torch.nn.Linear(1, 1), tokens)


def test_refusals_say_what_came_and_what_was_expected():
    h, f_logit, i_logit, B, C = scan_arguments()
    with pytest.raises(ValueError, match="row must be one of the batch's 2 rows, 0 to 1, but is 2"):
        observe_scan(h, f_logit, i_logit, B, C, row=2)
    with pytest.raises(ValueError, match=r"channels must name some of the channels \[0, 1, 2\], but is \[0, 3\]"):
        observe_scan(h, f_logit, i_logit, B, C, channels=[0, 3])
    with pytest.raises(ValueError, match="channels must name some of"):
        observe_scan(h, f_logit, i_logit, B, C, channels=[])
    with pytest.raises(ValueError, match=r"f_logit must lie in .* but holds nan"):
        observe_scan(h, f_logit * torch.nan, i_logit, B, C)
    with pytest.raises(ValueError, match=r"B must lie in .* but holds inf"):
        observe_scan(h, f_logit, i_logit, B + torch.inf, C)
    with pytest.raises(ValueError, match="C must have shape"):
        observe_scan(h, f_logit, i_logit, B, C[:, :-1])
    with pytest.raises(TypeError, match="mixer must be a NajuMixer or a CoupledMixer, but is AttentionMixer"):
        observe_layer(build_mixer("attention", 8), torch.randn(1, 3, 8))


def test_a_text_longer_than_a_piece_is_seen_whole(monkeypatch):
    monkeypatch.setattr(backbone, "PIECE", 8)
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(11, 8, 2, mixer_options={"d_state": 2}))
    tokens = torch.randint(11, (1, 20))
    assert layer_input(model, model.backbone.blocks[1].mixer, tokens).shape == (1, 20, 8)
    assert len(layer_sizes(model.backbone, tokens)) == 2
    with torch.no_grad():  # as before: in pieces
        calls = []
        model.backbone.blocks[0].register_forward_hook(lambda *_: calls.append(1))
        model(tokens)
    assert len(calls) == 3


@pytest.fixture
def other_default_device():
    """One that no number can be read from, so that whatever lands there by accident shows."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("other_default_device")
def test_analysis_stays_on_the_cpu_whatever_the_default_device_is(tmp_path):
    mixer = NajuMixer(4, d_state=3).to_empty(device="cpu")
    for parameter in mixer.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    u = torch.ones(1, 6, 4, device="cpu")
    run = observe_layer(mixer, u).select([2, 0])
    without_D = observe_scan(*mixer.scan_arguments(u)[:5])
    response = freeze(run, 3)
    omega = torch.zeros(2, device="cpu")
    results = [
        *(effective_memory(run)[:2]),
        *(without_D.D, stability_report(run).state_bound, tau_e(0.5), *complementary_pair(0.3)),
        *(response.impulse_response(4), response.frequency_response(omega)),
        readout_growth((2, 4), generator=torch.Generator("cpu").manual_seed(0), batch=1, length=3).normalised,
    ]
    assert {result.device.type for result in results} == {"cpu"}
    assert draw_memory(run, tmp_path / "memory.svg").exists()
    assert draw_reachable(tmp_path / "pairs.svg").exists()
