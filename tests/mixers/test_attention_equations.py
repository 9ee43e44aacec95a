"""Attention and the Transformer against their equations, written out."""

from __future__ import annotations

import pytest
import torch
from outside import assert_same_function
from torch.nn import functional as F

from memories import unsettle
from naju.mixers import build_mixer

D_MODEL, HEADS, WIDTH = 16, 4, 4


def turned(rows):
    """Channel pairs (c, c + half) of rows (l, width) as complex numbers, turned by their place."""
    pairs = torch.complex(rows[:, : WIDTH // 2], rows[:, WIDTH // 2 :])
    frequency = 10_000.0 ** (-torch.arange(WIDTH // 2, dtype=torch.float64) / (WIDTH // 2))
    return pairs * torch.polar(torch.ones(1, dtype=torch.float64), torch.arange(len(rows)).unsqueeze(1) * frequency)


def attended(mixer, u, *, rotary):
    """One sequence (l, m), head by head and token by token."""
    outputs = []
    for q, k, v in zip(*(part.split(WIDTH, dim=1) for part in mixer.project_in(u).chunk(3, dim=1)), strict=True):
        scores = (turned(q) @ turned(k).conj().T).real if rotary else q @ k.T
        rows = [(scores[n, : n + 1] / WIDTH**0.5).softmax(0) @ v[: n + 1] for n in range(len(u))]
        outputs.append(torch.stack(rows))
    return mixer.project_out(torch.cat(outputs, dim=1))


def built(name, **options):
    mixer = build_mixer(name, D_MODEL, **options).double()
    unsettle(mixer)
    return mixer, torch.randn(2, 9, D_MODEL, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("rotary", [True, False])
def test_attention(rotary):
    mixer, u = built("attention", rotary=rotary)
    want = torch.stack([attended(mixer, row, rotary=rotary) for row in u])
    assert mixer.n_heads == HEADS
    assert_same_function([mixer(u)[0]], [want], [u, *mixer.parameters()])


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_the_transformers_branch_is_attention_and_a_feed_forward_network_of_their_sum(positions):
    mixer, u = built("transformer", positions=positions, max_length=9)
    v = F.rms_norm(u, (D_MODEL,), mixer.attention_norm.weight, eps=1e-5)
    if positions == "learned":
        v = v + mixer.position.weight @ mixer.project_position.weight.T
    a = torch.stack([attended(mixer.attention, row, rotary=positions == "rotary") for row in v])
    hidden = mixer.feed_forward.project_in(F.rms_norm(u + a, (D_MODEL,), mixer.feed_forward_norm.weight, eps=1e-5))
    want = a + mixer.feed_forward.project_out(F.gelu(hidden))
    assert_same_function([mixer(u)[0]], [want], [u, *mixer.parameters()])
