"""The Naju and the coupled mixer against the paper's equations, written out token by token."""

from __future__ import annotations

import math

import pytest
import torch
from mixer_cases import run_in_steps, sequence, small_mixer

from memories import D_MODEL, EXACT, difference

OPTIONS = [
    {},
    {"gate_rank": 3},
    {"gate_reparam": True},
    {"gate_rank": 3, "gate_reparam": True},
    {"alpha": 1.0},
    {"d_state": 1, "d_conv": 1},
    {"d_state": 7, "d_conv": 5, "expand": 1.5},
    {"expand": 0.25, "D_init": 1.0},
]


def depthwise(weight, history):
    """sum_j w_j u_{n-j} channel by channel; the last column of the weight meets the current token."""
    width = weight.shape[1]
    total = torch.zeros_like(history[-1])
    for j in range(min(width, len(history))):
        total = total + weight[:, width - 1 - j] * history[-1 - j]
    return total


def logit(gate, history, scale):
    """W h + DWConv(h) + bias, all of it divided by the scale of the reparameterisation."""
    matrix = gate.weight.weight
    if hasattr(gate.reduce, "weight"):
        matrix = matrix @ gate.reduce.weight
    return (matrix @ history[-1] + depthwise(gate.conv.weight, history) + gate.bias) / scale


def two_gates(mixer, history, scale):
    return torch.sigmoid(logit(mixer.forget, history, scale)), torch.sigmoid(logit(mixer.write, history, scale))


def one_gate(mixer, history, scale):
    g = torch.sigmoid(logit(mixer.write, history, scale))
    return 1 - g, g


def paper_layer(mixer, sentence, gates, *, alpha, scale):
    """One sequence (l, m) through the recurrence; returns its outputs (l, m) and the last state (d, n)."""
    d_inner, d_state = mixer.D.shape[0], mixer.project_BC.weight.shape[0] // 2
    x = torch.zeros(d_inner, d_state, dtype=torch.float64)
    u_tildes, hs, outputs = [], [], []
    for u in sentence:
        both = mixer.project_in.weight @ u
        u_tilde, z = both[:d_inner], both[d_inner:]
        u_tildes.append(u_tilde)
        content = depthwise(mixer.conv.weight, u_tildes) + mixer.conv.bias
        h = content * torch.sigmoid(content)
        hs.append(h)
        f, i = gates(mixer, hs, scale)
        BC = mixer.project_BC.weight @ h
        B, C = BC[:d_state], BC[d_state:]
        x = f[:, None] * x + i[:, None] * torch.outer(h, B)
        y = alpha * (x @ C) + mixer.D * h
        outputs.append(mixer.project_out.weight @ (y * z * torch.sigmoid(z)))
    return torch.stack(outputs), x


@pytest.mark.parametrize("backend", ["auto", "reference", "associative", "chunked"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("name", "gates"), [("naju", two_gates), ("coupled", one_gate)])
def test_the_mixer_is_the_papers_recurrence(name, gates, options, backend):
    mixer = small_mixer(name, backend=backend, **options)
    d_inner = int(options.get("expand", 2) * D_MODEL)
    alpha = options.get("alpha", 1 / math.sqrt(options.get("d_state", 6)))
    scale = math.sqrt(d_inner) if options.get("gate_reparam") else 1.0
    u = sequence(2, 21)
    with torch.no_grad():
        out, state = mixer(u)
        for row in range(2):
            want, x = paper_layer(mixer, u[row], gates, alpha=alpha, scale=scale)
            assert difference(out[row], want) <= EXACT
            assert difference(state.x[row], x) <= EXACT


@pytest.mark.parametrize(("name", "gates"), [("naju", two_gates), ("coupled", one_gate)])
def test_stepping_is_the_papers_recurrence(name, gates):
    mixer = small_mixer(name)
    u = sequence(1, 9)
    with torch.no_grad():
        out, state = run_in_steps(mixer, u, mixer.init_state(1))
        want, x = paper_layer(mixer, u[0], gates, alpha=6**-0.5, scale=1.0)
    assert difference(out[0], want) <= EXACT
    assert difference(state.x[0], x) <= EXACT


def test_what_is_kept_and_what_is_written_sum_to_one_in_the_coupled_mixer_only():
    sums = {}
    for name in ("naju", "coupled"):
        arguments = small_mixer(name).scan_arguments(sequence(2, 9))
        sums[name] = torch.sigmoid(arguments.f_logit) + torch.sigmoid(arguments.i_logit)
    assert (sums["coupled"] - 1).abs().max() <= 1e-15
    assert (sums["naju"] - 1).abs().mean() > 0.05
