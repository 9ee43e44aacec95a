"""An output depends on its own token and those before it, and on nothing after."""

from __future__ import annotations

import pytest
import torch
from mixer_cases import sequence, small_mixer

from naju.mixers import MIXERS


def influence(mixer, u):
    """(l, l) booleans: does the input at column s move the output at row t?"""
    rows = torch.autograd.functional.jacobian(lambda v: mixer(v)[0].sum(dim=(0, 2)), u)  # (t, b, s, m)
    return rows.ne(0).any(dim=-1).any(dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", MIXERS)
def test_gradients_reach_the_past_only(name, dtype):
    moved = influence(small_mixer(name, dtype), sequence(2, 20, dtype))
    assert torch.equal(moved, torch.ones(20, 20).tril().bool())


@pytest.mark.parametrize("name", MIXERS)
def test_the_initial_state_reaches_every_output(name):
    mixer = small_mixer(name)
    state = mixer(sequence(1, 5))[1].detach()
    differentiable = state.map(lambda t: t.requires_grad_() if t.is_floating_point() else t)
    out, _ = mixer(sequence(1, 12, seed=2), differentiable)
    inputs = [tensor for tensor in differentiable.tensors().values() if tensor.requires_grad]
    for t in range(12):
        gradients = torch.autograd.grad(out[:, t].sum(), inputs, retain_graph=True)
        assert any(gradient.ne(0).any() for gradient in gradients)
