"""Poles, zeros and transfer function of a frozen layer against what the scan does with frozen gates."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from naju import NajuMixer, naju_scan
from naju.analysis import FrozenResponse, freeze, horizon_logit, horizon_pole, observe_layer, tau_e

DOUBLE = {"dtype": torch.float64}


def frozen_layer(token=7):
    """A real layer on a real input, and its filters at one token."""
    torch.manual_seed(0)
    mixer = NajuMixer(4, d_state=3, f_bias=2.0, i_bias=0.0, D_init=0.3).double()
    run = observe_layer(mixer, 5 * torch.randn(1, 12, 4, **DOUBLE))
    return run, freeze(run, token)


def simulate(run, token, h):
    """The operator on drive h (1, l, c), with gates and directions held as they are at `token`."""
    held = [logit[:, token].expand(h.shape) for logit in (run.f_logit, run.i_logit)]
    B, C = (part[token].expand(1, h.shape[1], -1) for part in (run.B, run.C))
    return naju_scan(h, *held, B, C, D=run.D, alpha=run.alpha)[0][0].T


def impulse(length, channels):
    h = torch.zeros(1, length, channels, **DOUBLE)
    h[:, 0] = 1.0
    return h


def test_the_impulse_response_is_the_simulated_one():
    run, response = frozen_layer()
    simulated = simulate(run, 7, impulse(50, 8))
    assert simulated[:, 1:].abs().max() > 1e-2
    torch.testing.assert_close(response.impulse_response(50), simulated, rtol=0, atol=1e-14)


def test_the_transfer_function_is_the_spectrum_of_the_simulated_impulse_response():
    run, response = frozen_layer()
    length = 2048
    assert response.pole.max() ** length < 1e-16  # nothing is left to wrap around
    spectrum = torch.fft.fft(simulate(run, 7, impulse(length, 8)))
    omega = 2 * torch.pi * torch.arange(length, **DOUBLE) / length
    torch.testing.assert_close(response.frequency_response(omega), spectrum, rtol=0, atol=1e-12)


def test_a_sine_comes_out_scaled_and_shifted_as_the_response_says():
    run, response = frozen_layer()
    omega, n = 0.3, torch.arange(1500, **DOUBLE)
    y = simulate(run, 7, torch.sin(omega * n).reshape(1, -1, 1).expand(1, -1, 8))
    H = response.frequency_response(torch.tensor([omega], **DOUBLE))
    want = H.abs() * torch.sin(omega * n + H.angle())
    torch.testing.assert_close(y[:, -100:], want[:, -100:], rtol=0, atol=1e-10)


def test_the_pole_is_the_forget_gate_and_sets_the_decay():
    run, response = frozen_layer()
    assert torch.equal(response.pole, run.f[:, 7])
    assert (response.pole < 1).all()
    y = simulate(run, 7, impulse(30, 8))
    torch.testing.assert_close(y[:, 2:] / y[:, 1:-1], response.pole.unsqueeze(1).expand(-1, 28), rtol=1e-12, atol=0)


def test_a_drive_at_the_zero_gives_no_output():
    """h = zero^n is silenced but for the transient, which decays as f^n: here the zero is made larger than the pole."""
    response = FrozenResponse(*(torch.tensor([value], **DOUBLE) for value in (0.5, -0.3, 0.8)))
    zero = response.zero.item()
    assert zero == pytest.approx(0.8)
    assert response.transfer(response.zero).abs().item() < 1e-15
    n = torch.arange(80, **DOUBLE)
    drive, impulse = (zero**n).tolist(), response.impulse_response(80)[0].tolist()
    y = [sum(impulse[k] * drive[t - k] for k in range(t + 1)) for t in range(80)]
    torch.testing.assert_close(torch.tensor(y, **DOUBLE), y[0] * 0.5**n, rtol=0, atol=1e-14)


@given(st.floats(0, 1), st.floats(-2, 2), st.floats(-2, 2))
def test_the_numerator_vanishes_at_the_zero(f, gain, D):
    response = FrozenResponse(*(torch.tensor([value], **DOUBLE) for value in (f, gain, D)))
    zero = response.zero.item()
    if math.isfinite(zero):
        assert (D + gain) * zero - D * f == pytest.approx(0.0, abs=1e-12)


def test_special_zeros():
    f, gain, D = (torch.tensor(values, **DOUBLE) for values in ([0.9] * 4, [0.5, 0.0, -1.0, 0.0], [0.0, 0.2, 1.0, 0.0]))
    without_D, without_gain, cancelled, silent = FrozenResponse(f, gain, D).zero.tolist()
    assert (without_D, without_gain, cancelled) == (0.0, pytest.approx(0.9), math.inf)
    assert math.isnan(silent)


def test_d_changes_zeros_and_never_poles():
    _, response = frozen_layer()
    other = FrozenResponse(response.f, response.gain, response.D + 1.0)
    assert torch.equal(other.pole, response.pole)
    assert not torch.isclose(other.zero, response.zero).any()


@given(st.floats(1e-3, 0.999), st.integers(1, 10**6))
def test_the_horizon_rule(rho, length):
    f, logit = horizon_pole(rho, length), horizon_logit(rho, length)
    assert f**length == pytest.approx(rho, rel=1e-9)
    assert torch.sigmoid(torch.tensor(logit, **DOUBLE)).item() == pytest.approx(f, rel=1e-14)


def test_the_horizon_rule_is_a_threshold():
    length, rho = 2048, 0.5
    f = horizon_pole(rho, length)
    assert (1.01 * f - 0.01) ** length < rho < (0.99 * f + 0.01) ** length
    assert length * (1 - f) == pytest.approx(math.log(2), rel=1e-3)  # 1 - f = O(1/length)
    assert tau_e(f).item() == pytest.approx(length / math.log(2))


@pytest.mark.parametrize(("rho", "length"), [(0.5, 2048), (0.9, 300), (0.01, 7)])
def test_a_scan_at_the_horizons_logit_keeps_what_the_rule_says(rho, length):
    h, B = torch.zeros(1, length, 3, **DOUBLE), torch.zeros(1, length, 2, **DOUBLE)
    written = torch.ones(1, 3, 2, **DOUBLE)
    _, held = naju_scan(h, h + horizon_logit(rho, length), h, B, B, initial_state=written)
    torch.testing.assert_close(held, rho * written, rtol=0, atol=1e-12)


def test_refusals():
    run, response = frozen_layer()
    with pytest.raises(ValueError, match="token must lie between 0 and 11, but is 12"):
        freeze(run, 12)
    with pytest.raises(ValueError, match="z must not be a pole"):
        response.transfer(response.pole[:1])
    with pytest.raises(ValueError, match=r"z must have shape \(points,\)"):
        response.transfer(torch.ones(2, 2))
    with pytest.raises(ValueError, match="length must be a positive integer, but is 0"):
        response.impulse_response(0)
    with pytest.raises(ValueError, match=r"f must lie in \[0, 1\], but holds 1.5"):
        FrozenResponse(torch.tensor([1.5]), torch.ones(1), torch.ones(1))
    with pytest.raises(ValueError, match=r"must have one shape \(channels,\), but gain has \(2,\)"):
        FrozenResponse(torch.tensor([0.5]), torch.ones(2), torch.ones(1))
    for rho in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="rho must lie strictly between 0 and 1"):
            horizon_pole(rho, 10)
    with pytest.raises(ValueError, match=r"length must be a positive integer, but is 2.5"):
        horizon_logit(0.5, 2.5)
