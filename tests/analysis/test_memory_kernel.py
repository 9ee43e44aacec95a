"""Kernel times drive, plus the initial-state and current-token terms, is the layer's output."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from naju import naju_scan
from naju.analysis import (
    decompose,
    effective_memory,
    lag_mass,
    memory_kernel,
    observe_layer,
    observe_scan,
    retention_products,
    retention_to_end,
    tau_e,
    tau_e_from_logit,
)
from naju.mixers import build_mixer

EXACT = {"rtol": 0.0, "atol": 1e-12}


def random_scan(seed, length, d_inner, d_state, gates):
    """Arguments of a scan whose forget logits are drawn from `gates`."""
    torch.manual_seed(seed)
    h, i_logit = torch.randn(2, 1, length, d_inner, dtype=torch.float64)
    B, C = torch.randn(2, 1, length, d_state, dtype=torch.float64)
    chosen = torch.tensor(gates, dtype=torch.float64)[torch.randint(len(gates), (1, length, d_inner))]
    D, x0 = torch.randn(d_inner, dtype=torch.float64), torch.randn(1, d_inner, d_state, dtype=torch.float64)
    return (h, chosen, i_logit, B, C), D, x0


gate_sets = st.lists(
    st.one_of(st.floats(-20, 20), st.sampled_from([-math.inf, math.inf, -1e4, 1e4])), min_size=1, max_size=4
)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 24), st.integers(1, 5), st.integers(1, 5), gate_sets)
def test_the_three_terms_are_the_scan(seed, length, d_inner, d_state, gates):
    arguments, D, x0 = random_scan(seed, length, d_inner, d_state, gates)
    y, _ = naju_scan(*arguments, D=D, alpha=0.7, initial_state=x0, backend="reference")
    parts = decompose(observe_scan(*arguments, D=D, alpha=0.7, initial_state=x0))
    torch.testing.assert_close(parts.total, y[0].T, **EXACT)


@pytest.mark.parametrize("name", ["naju", "coupled"])
def test_the_three_terms_are_a_real_layer_on_a_real_state(name):
    torch.manual_seed(0)
    mixer = build_mixer(name, 12, d_state=5).double()
    _, state = mixer(torch.randn(2, 9, 12, dtype=torch.float64))
    u = torch.randn(2, 40, 12, dtype=torch.float64)
    out, _ = mixer(u, state)
    z = mixer.scan_arguments(u, state).z
    for row in range(2):
        parts = decompose(observe_layer(mixer, u, state=state, row=row))
        assert all(part.abs().max() > 1e-3 for part in parts)
        torch.testing.assert_close(mixer.project_out(parts.total.T * F.silu(z[row])), out[row], **EXACT)


def test_the_kernel_is_the_layers_derivative_with_gates_and_directions_held():
    (h, f_logit, i_logit, B, C), _, _ = random_scan(0, 12, 3, 4, [6.0, 2.0, -3.0])
    kernel = memory_kernel(observe_scan(h, f_logit, i_logit, B, C, channels=[1]))
    jacobian = torch.autograd.functional.jacobian(lambda drive: naju_scan(drive, f_logit, i_logit, B, C)[0], h)
    torch.testing.assert_close(kernel[0], jacobian[0, :, 1, 0, :, 1], **EXACT)


@given(st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0])), min_size=1, max_size=12))
def test_retention_products_are_products(gates):
    R = retention_products(torch.tensor(gates, dtype=torch.float64))
    for n in range(len(gates)):
        for m in range(len(gates)):
            assert R[n, m].item() == pytest.approx(math.prod(gates[m + 1 : n + 1]) if m <= n else 0.0, abs=1e-14)


def test_gates_of_zero_and_one_are_exact():
    R = retention_products(torch.tensor([[0.3, 1.0, 1.0, 0.0, 1.0]], dtype=torch.float64))[0]
    held_then_cleared = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    assert torch.equal(R, torch.tensor(held_then_cleared, dtype=torch.float64))


def test_retention_to_the_end_is_the_last_row():
    arguments, _, _ = random_scan(1, 15, 4, 2, [5.0, -1.0, math.inf])
    run = observe_scan(*arguments)
    torch.testing.assert_close(retention_to_end(run), retention_products(run.f)[:, -1], **EXACT)


def test_lag_mass_sums_the_kernels_diagonals():
    arguments, _, _ = random_scan(2, 14, 3, 2, [4.0, 1.0])
    run = observe_scan(*arguments)
    kernel = memory_kernel(run).abs()
    diagonals = [kernel.diagonal(-lag, dim1=1, dim2=2).sum(-1) for lag in range(run.length)]
    torch.testing.assert_close(lag_mass(run), torch.stack(diagonals, dim=1), **EXACT)


def constant_run(f, length):
    """B = C = 1, i = 1, h = 1: the kernel is f^(n - m) itself."""
    one = torch.ones(1, length, 1, dtype=torch.float64)
    logit = torch.tensor(f, dtype=torch.float64).logit()
    return observe_scan(one, logit * one, torch.inf * one, one, one)


def test_effective_memory_of_a_constant_gate():
    length, f = 2000, 0.9
    mass = [(length - lag) * f**lag for lag in range(length)]
    found = effective_memory(constant_run(f, length), share=0.9)
    within = [sum(mass[: lag + 1]) / sum(mass) for lag in range(40)]
    assert found.lag.item() == next(lag for lag, share in enumerate(within) if share >= 0.9) == 21
    expected = sum(lag * part for lag, part in enumerate(mass)) / sum(mass)
    assert found.mean_lag.item() == pytest.approx(expected, rel=1e-12)
    assert found.mean_lag.item() == pytest.approx(f / (1 - f), rel=0.01)


def test_effective_memory_at_its_ends():
    assert effective_memory(constant_run(0.0, 9)).lag.item() == 0
    assert effective_memory(constant_run(1.0, 9), share=1.0).lag.item() == 8
    h, f_logit, i_logit = torch.randn(3, 1, 6, 2)
    silent = effective_memory(observe_scan(h, f_logit, i_logit - torch.inf, h, h))
    assert silent.lag.tolist() == [0, 0]
    assert silent.mean_lag.tolist() == [0.0, 0.0]
    for share in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"share must lie in \(0, 1\]"):
            effective_memory(constant_run(0.5, 3), share=share)


def test_a_longer_memory_reaches_farther():
    reaches = [effective_memory(constant_run(f, 400)).mean_lag.item() for f in (0.5, 0.9, 0.99, 0.999)]
    assert reaches == sorted(reaches)
    assert reaches[-1] > 100 * reaches[0]


def test_tau_e_is_the_papers():
    assert tau_e(0.999).item() == pytest.approx(999.49992, rel=1e-8)
    assert tau_e_from_logit(5.0).item() == pytest.approx(149, abs=0.5)
    assert tau_e_from_logit(6.0).item() == pytest.approx(404, abs=0.5)
    assert tau_e(torch.tensor([0.0, 1.0])).tolist() == [0.0, math.inf]
    assert tau_e_from_logit(torch.tensor([-math.inf, math.inf])).tolist() == [0.0, math.inf]


@given(st.floats(-30, 15))
def test_tau_e_from_the_logit_agrees_where_the_gate_does_not_round(logit):
    f = torch.sigmoid(torch.tensor(logit, dtype=torch.float64))
    assert tau_e_from_logit(logit).item() == pytest.approx(tau_e(f).item(), rel=1e-8)


@given(st.floats(20, 700))
def test_tau_e_from_the_logit_keeps_its_digits_where_the_gate_rounds_to_one(logit):
    # 1/log(1 + e^-a) = e^a + 1/2 - …
    assert tau_e_from_logit(logit).item() == pytest.approx(math.exp(logit) + 0.5, rel=1e-12)


def test_a_write_decays_to_one_over_e_in_tau_e_tokens():
    logit = 4.0
    left = retention_to_end(constant_run(torch.sigmoid(torch.tensor(logit, dtype=torch.float64)).item(), 200))[0]
    tau = tau_e_from_logit(logit).item()
    assert left[199 - math.floor(tau)].item() > math.exp(-1) > left[199 - math.ceil(tau)].item()


def test_refusals():
    with pytest.raises(ValueError, match=r"f must lie in \[0, 1\], but holds 1.5"):
        retention_products(torch.tensor([0.5, 1.5]))
    with pytest.raises(ValueError, match="f must have shape"):
        retention_products(torch.ones(3, 0))
    with pytest.raises(ValueError, match=r"would take 8.0 GiB; choose fewer channels or a shorter input"):
        retention_products(torch.ones(1).expand(2**10, 2**10))
    with pytest.raises(TypeError, match="f must be a number or a tensor, but is str"):
        tau_e("0.5")
    with pytest.raises(ValueError, match=r"f_logit must lie in .* but holds nan"):
        tau_e_from_logit(math.nan)
