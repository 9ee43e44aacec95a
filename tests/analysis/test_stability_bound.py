"""The theorem's bounds hold on random and adversarial runs, and are nearly reached by the worst of them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from naju import NajuMixer, naju_scan
from naju.analysis import observe_layer, observe_scan, stability_report
from naju.mixers import build_mixer

DOUBLE = {"dtype": torch.float64}


def random_run(seed, length, d_inner, d_state, centre, spread):
    torch.manual_seed(seed)
    h, f_logit, i_logit = torch.randn(3, 1, length, d_inner, **DOUBLE)
    B, C = torch.randn(2, 1, length, d_state, **DOUBLE)
    D, x0 = torch.randn(d_inner, **DOUBLE), 5 * torch.randn(1, d_inner, d_state, **DOUBLE)
    return (h, centre + spread * f_logit, 3 * i_logit, B, C), {"D": D, "initial_state": x0, "alpha": 0.4}


def worst_run(f, length, *, x0=0.0, D=0.0):
    """One scalar coordinate with the gates at their maximum and a drive of constant sign, all read with one sign."""
    one = torch.ones(1, length, 1, **DOUBLE)
    f_logit = torch.tensor(f, **DOUBLE).logit() * one
    start = torch.full((1, 1, 1), x0, **DOUBLE)
    return observe_scan(one, f_logit, torch.inf * one, one, one, alpha=1.0, D=D * one[0, 0], initial_state=start)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(1, 6),
    st.floats(-10, 30),
    st.floats(0, 5),
)
def test_the_bounds_hold_on_random_runs(seed, length, d_inner, d_state, centre, spread):
    arguments, options = random_run(seed, length, d_inner, d_state, centre, spread)
    assert stability_report(observe_scan(*arguments, **options)).holds


@settings(max_examples=40, deadline=None)
@given(st.floats(0.01, 0.999), st.integers(1, 60), st.floats(0, 100), st.floats(0, 2))
def test_the_bounds_hold_on_the_worst_runs(f, length, x0, D):
    assert stability_report(worst_run(f, length, x0=x0, D=D)).holds


@pytest.mark.parametrize("name", ["naju", "coupled"])
def test_the_bounds_hold_on_real_layers(name):
    torch.manual_seed(0)
    mixer = build_mixer(name, 8, d_state=6)
    _, state = mixer(torch.randn(2, 30, 8))
    report = stability_report(observe_layer(mixer, 3 * torch.randn(2, 30, 8), state=state, row=1))
    assert report.holds
    assert (report.state_slack > 0).all()
    assert (report.output_slack > 0).all()


def test_the_norms_are_those_of_the_scan():
    arguments, options = random_run(0, 20, 3, 4, 2.0, 2.0)
    report = stability_report(observe_scan(*arguments, **options))
    y, x = naju_scan(*arguments, **options, backend="reference")
    torch.testing.assert_close(report.output_norm, y[0].T.abs(), rtol=0, atol=1e-12)
    torch.testing.assert_close(report.state_norm[:, -1], x[0].norm(dim=1), rtol=0, atol=1e-12)


def test_the_bounds_are_those_of_the_theorem():
    arguments, options = random_run(1, 10, 2, 3, 1.0, 1.0)
    h, f_logit, i_logit, B, C = (part[0] for part in arguments)
    report = stability_report(observe_scan(*arguments, **options))
    for channel in range(2):
        rho = torch.sigmoid(f_logit[:, channel].max()).item()
        M_v = max((torch.sigmoid(i_logit[n, channel]) * h[n, channel] * B[n]).norm().item() for n in range(10))
        M_C = max(C[n].norm().item() for n in range(10))
        start = options["initial_state"][0, channel].norm().item()
        feedthrough = abs(options["D"][channel].item()) * h[:, channel].abs().max().item()
        assert report.rho[channel].item() == pytest.approx(rho, rel=1e-14)
        for n in range(1, 11):
            state = rho**n * start + M_v / (1 - rho)
            assert report.state_bound[channel, n - 1].item() == pytest.approx(state, rel=1e-12)
            output = 0.4 * M_C * state + feedthrough
            assert report.output_bound[channel, n - 1].item() == pytest.approx(output, rel=1e-12)


@pytest.mark.parametrize("f", [0.5, 0.9, 0.99])
def test_the_worst_run_nearly_reaches_the_bound(f):
    report = stability_report(worst_run(f, math.ceil(5 / (1 - f)), x0=2.0, D=0.7))
    assert report.holds
    assert (report.state_norm / report.state_bound)[0, -1].item() > 0.99
    assert (report.output_norm / report.output_bound)[0, -1].item() > 0.99


def test_every_write_fades_geometrically():
    arguments, _ = random_run(2, 25, 1, 3, 1.0, 2.0)
    run = observe_scan(*arguments)
    rho = stability_report(run).rho.item()
    h = arguments[0]
    only_first = torch.zeros_like(h)
    only_first[:, 0] = h[:, 0]
    report = stability_report(observe_scan(only_first, *arguments[1:]))
    steps = torch.arange(25, **DOUBLE)
    assert (report.state_norm[0] <= rho**steps * report.state_norm[0, 0] * (1 + 1e-12)).all()


def test_a_pole_that_rounds_to_one_still_has_a_bound():
    run = worst_run(0.5, 3)
    held = dataclasses.replace(run, f_logit=torch.full_like(run.f_logit, 60.0))
    report = stability_report(held)
    assert report.rho.item() == 1.0
    assert report.holds
    assert report.state_bound[0, 0].item() == pytest.approx(math.exp(60), rel=1e-12)
    silent = dataclasses.replace(held, f_logit=held.f_logit + 1e4, i_logit=-held.i_logit, x0=held.x0 + 2.0)
    assert stability_report(silent).state_bound.tolist() == [[2.0, 2.0, 2.0]]


def test_the_readout_gain_moves_the_output_bound_and_not_the_state():
    torch.manual_seed(0)
    u = torch.randn(1, 12, 4)
    mixer = NajuMixer(4, d_state=9)
    small = stability_report(observe_layer(mixer, u))
    mixer.alpha = 1.0
    large = stability_report(observe_layer(mixer, u))
    assert torch.equal(small.state_bound, large.state_bound)
    assert torch.equal(small.state_norm, large.state_norm)
    assert (large.output_bound > 2 * small.output_bound).all()


def test_a_broken_bound_is_noticed():
    report = stability_report(worst_run(0.9, 10))
    beyond = report.state_bound * (1 + 1e-9)
    assert not dataclasses.replace(report, state_norm=beyond).holds
    assert not dataclasses.replace(report, output_norm=report.output_bound * (1 + 1e-9)).holds


def test_an_unbounded_logit_is_refused():
    h, f_logit, i_logit = torch.randn(3, 1, 4, 3)
    f_logit[0, 2, 1] = math.inf
    with pytest.raises(ValueError, match=r"f_logit must be bounded by a finite number, but is \+inf in channel 1"):
        stability_report(observe_scan(h, f_logit, i_logit, h, h))
