"""Which pairs of retention and write each kind of gate can reach, and how the readout grows with the state."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from naju import NajuMixer, naju_scan
from naju.analysis import (
    FAMILIES,
    complementary_excess,
    complementary_pair,
    gated_rnn_limit,
    largest_write,
    naju_logits,
    naju_pair,
    observe_layer,
    reachable,
    readout_growth,
    rg_lru_pair,
    zoh_pair,
    zoh_small_step,
)
from naju.mixers import build_mixer

DOUBLE = {"dtype": torch.float64}
unit = st.floats(0, 1)


@given(unit, st.floats(-1, 1))
def test_a_complementary_gate_trades_retention_for_write(g, lam):
    retention, write = complementary_pair(g, lam)
    assert complementary_excess(retention, write).item() <= 1e-15
    epsilon = 1 - abs(retention.item())
    assert write.item() <= epsilon + 1e-15


def test_the_inequality_needs_a_transition_that_does_not_expand():
    assert complementary_excess(*complementary_pair(0.5, 1.5)).item() == pytest.approx(0.25)


def test_the_real_coupled_layer_obeys_it_and_naju_does_not():
    torch.manual_seed(0)
    u = 3 * torch.randn(1, 50, 8, **DOUBLE)
    coupled = observe_layer(build_mixer("coupled", 8, d_state=4, g_bias=0.0).double(), u)
    assert complementary_excess(coupled.f, coupled.i).abs().max().item() < 1e-15
    assert coupled.f.max() - coupled.f.min() > 0.3
    naju = observe_layer(NajuMixer(8, d_state=4, f_bias=5.0, i_bias=5.0).double(), u)
    assert complementary_excess(naju.f, naju.i).min().item() > 0.9


@given(st.floats(-700, 700))
def test_zoh_with_unit_rate_is_a_sigmoid_gate(logit):
    retention, write = gated_rnn_limit(logit)
    gate = torch.tensor(logit, **DOUBLE)
    assert retention.item() == pytest.approx(torch.sigmoid(-gate).item(), rel=1e-12)
    assert write.item() == pytest.approx(torch.sigmoid(gate).item(), rel=1e-12)


def test_a_scan_with_the_zoh_limits_gates_is_the_held_continuous_system():
    """dx/dτ = -x + u, held over steps of softplus(a), against naju_scan with logits (-a, a) and B = C = 1."""
    torch.manual_seed(0)
    a, u = torch.randn(2, 30, **DOUBLE)
    x, states = torch.zeros((), **DOUBLE), []
    for delta, drive in zip(torch.nn.functional.softplus(a), u, strict=True):
        x = drive + (x - drive) * torch.exp(-delta)  # the exact solution over one step
        states.append(x)
    one = torch.ones(1, 30, 1, **DOUBLE)
    y, _ = naju_scan(u.reshape(1, -1, 1), -a.reshape(1, -1, 1), a.reshape(1, -1, 1), one, one)
    torch.testing.assert_close(y.flatten(), torch.stack(states), rtol=0, atol=1e-14)


@given(st.floats(0, 20), st.floats(-8, -0.05), st.floats(-3, 3))
def test_zoh_solves_its_differential_equation(delta, A, B):
    """After a step Δ under constant u, x = e^(ΔA) x + (steady state)(1 - e^(ΔA)), with steady state -B u / A."""
    retention, write = zoh_pair(delta, A, B)
    assert write.item() == pytest.approx(-B / A * (1 - math.exp(delta * A)), abs=1e-12)
    assert write.item() == pytest.approx((1 - retention.item()) * B / abs(A), abs=1e-12)


def test_zoh_without_a_rate_is_an_integrator():
    pair = zoh_pair(0.3, 0.0, 2.0)
    assert (pair.retention.item(), pair.write.item()) == (1.0, 0.6)


@given(st.floats(-4, -0.25), st.floats(0.25, 4))
def test_small_steps_couple_retention_and_write_to_first_order(A, B):
    deltas = torch.tensor([1e-2, 1e-3, 1e-4], **DOUBLE)
    exact, approximate = zoh_pair(deltas, A, B), zoh_small_step(deltas, A, B)
    for got, near in zip(exact, approximate, strict=True):
        error = (got - near).abs()
        assert ((error[:-1] / error[1:]) > 90).all()  # a tenth of the step, a hundredth of the error
    torch.testing.assert_close(exact.write / (1 - exact.retention), torch.full_like(deltas, B / -A), rtol=1e-9, atol=0)


@given(unit, unit)
def test_the_rg_lru_writes_inside_the_unit_circle(a, gate):
    retention, write = rg_lru_pair(a, gate)
    assert retention.item() ** 2 + write.item() ** 2 <= 1 + 1e-15
    envelope = rg_lru_pair(a).write.item()
    assert a**2 + envelope**2 == pytest.approx(1.0, abs=1e-14)


@given(unit, unit)
def test_naju_reaches_every_pair(retention, write):
    got = naju_pair(*naju_logits(retention, write))
    assert got.retention.item() == pytest.approx(retention, abs=1e-12)
    assert got.write.item() == pytest.approx(write, abs=1e-12)


def random_pairs(family, count):
    """Pairs as the family's own parameters make them."""
    generator = torch.Generator().manual_seed(0)
    first, second = 4 * torch.randn(2, count, generator=generator, **DOUBLE)
    gate = torch.sigmoid(second)
    return {
        "zoh": lambda: zoh_pair(torch.nn.functional.softplus(first)),
        "complementary": lambda: complementary_pair(torch.sigmoid(first), gate),
        "rg_lru": lambda: rg_lru_pair(torch.sigmoid(first), gate),
        "naju": lambda: naju_pair(first, second),
    }[family]()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_makes_is_reachable_and_fills_its_set(family):
    retention, write = random_pairs(family, 20_000)
    assert reachable(family, retention, write).all()
    for lower in torch.arange(0, 1, 0.1).tolist():
        inside = (retention >= lower) & (retention < lower + 0.1)
        used = write[inside] / largest_write(family, retention[inside])
        assert used.max() > 0.98
        if FAMILIES[family].smaller_writes:
            assert used.min() < 0.1


def test_only_naju_holds_and_writes_at_once():
    grid = torch.linspace(0, 1, 101, **DOUBLE)
    retention, write = torch.meshgrid(grid, grid, indexing="ij")
    share = {family: reachable(family, retention, write).double().mean().item() for family in FAMILIES}
    assert share["zoh"] == pytest.approx(1 / 101)
    assert share["complementary"] == pytest.approx(1 / 2, abs=0.01)
    assert share["rg_lru"] == pytest.approx(math.pi / 4, abs=0.01)
    assert share["naju"] == 1.0
    assert [bool(reachable(family, 0.999, 0.5)) for family in FAMILIES] == [False, False, False, True]


def test_what_is_left_to_write_at_long_retention():
    room = {family: largest_write(family, 0.999).item() for family in FAMILIES}
    assert room == pytest.approx({"zoh": 1e-3, "complementary": 1e-3, "rg_lru": math.sqrt(1 - 0.999**2), "naju": 1.0})


def test_the_unnormalised_readout_grows_as_the_root_of_the_state():
    growth = readout_growth(generator=torch.Generator().manual_seed(0))
    unnormalised, normalised = growth.exponents
    assert unnormalised == pytest.approx(0.5, abs=0.05)
    assert normalised == pytest.approx(0.0, abs=0.05)
    roots = torch.tensor(growth.d_states, **DOUBLE).sqrt()
    torch.testing.assert_close(growth.unnormalised / growth.normalised, roots)


def readout_rms(d_state, alpha, u, draws=200):
    """RMS of a real layer's readout over many initialisations of its directions, everything else the same."""
    torch.manual_seed(0)
    mixer = NajuMixer(16, d_state=d_state, alpha=alpha)
    h, f_logit, i_logit, _, _, _ = mixer.scan_arguments(u)
    directions = []
    for _ in range(draws):
        mixer.project_BC.reset_parameters()
        directions.append(mixer.project_BC(h))
    B, C = torch.cat(directions).chunk(2, dim=-1)
    drive = (part.expand(draws, -1, -1) for part in (h, f_logit, i_logit))
    return naju_scan(*drive, B, C, alpha=mixer.alpha)[0].square().mean().sqrt().item()


@pytest.mark.parametrize(("alpha", "exponent"), [(1.0, 0.5), (None, 0.0)])
def test_a_real_layers_readout_grows_the_same_way(alpha, exponent):
    u = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        growth = readout_rms(128, alpha, u) / readout_rms(8, alpha, u)
    assert math.log(growth) / math.log(128 / 8) == pytest.approx(exponent, abs=0.1)


def test_refusals():
    with pytest.raises(ValueError, match=r"g must lie in \[0, 1\], but holds 1.2"):
        complementary_pair(1.2)
    with pytest.raises(ValueError, match=r"delta must lie in \[0, inf\], but holds -1"):
        zoh_pair(-1.0)
    with pytest.raises(ValueError, match=r"a must lie in \[0, 1\]"):
        rg_lru_pair(torch.tensor([0.5, -0.5]))
    with pytest.raises(ValueError, match="unknown family 'mamba'; expected one of zoh, complementary, rg_lru, naju"):
        largest_write("mamba", 0.5)
    with pytest.raises(TypeError, match="retention must be real, but is complex64"):
        naju_logits(torch.ones(1, dtype=torch.complex64), 0.5)
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(ValueError, match="d_states must hold at least two sizes"):
        readout_growth([8], generator=generator)
    with pytest.raises(ValueError, match="d_states must be a positive integer, but is 0"):
        readout_growth([8, 0], generator=generator)
