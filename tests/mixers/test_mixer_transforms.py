"""Derivatives other than a plain backward: right, or refused, but never zero in silence."""

from __future__ import annotations

import pytest
import torch
from mixer_cases import sequence, small_mixer
from torch.autograd import forward_ad

from memories import difference
from naju.mixers import MIXERS

everywhere = pytest.mark.parametrize("name", MIXERS)
precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
# Both come from torch itself: the first from its forward mode, the second from its attention under vmap.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]


def energy(mixer):
    return lambda u: mixer(u)[0].square().sum()


def true_gradient(name, u):
    u = u.double().requires_grad_()
    return torch.autograd.grad(energy(small_mixer(name))(u), u)[0]


def by_functional(mixer, u, direction):
    return torch.func.jvp(energy(mixer), (u,), (direction,))[1]


def by_dual_numbers(mixer, u, direction):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(energy(mixer)(forward_ad.make_dual(u, direction))).tangent


@pytest.mark.parametrize("forward_mode", [by_functional, by_dual_numbers])
@everywhere
@precisions
def test_forward_mode_is_right_or_refused(name, dtype, forward_mode):
    u, direction = sequence(2, 7, dtype), sequence(2, 7, dtype, seed=2)
    try:
        slope = forward_mode(small_mixer(name, dtype), u, direction)
    except NotImplementedError:
        return
    wanted = (true_gradient(name, u) * direction.double()).sum().item()
    assert slope.item() == pytest.approx(wanted, rel=1e-4)


def test_forward_mode_is_not_refused_by_naju():
    slope = by_functional(small_mixer("naju", torch.float32), *(sequence(2, 7, torch.float32, seed=k) for k in (1, 2)))
    assert slope.ne(0)


@everywhere
@precisions
def test_gradients_by_transform(name, dtype):
    u = sequence(2, 7, dtype)
    got = torch.func.grad(energy(small_mixer(name, dtype)))(u)
    assert difference(got.double(), true_gradient(name, u)) <= 1e-5


@everywhere
@precisions
def test_vmap_maps(name, dtype):
    mixer = small_mixer(name, dtype)
    many = torch.stack([sequence(2, 7, dtype, seed=seed) for seed in range(3)])
    want = torch.stack([mixer(u)[0] for u in many])
    assert difference(torch.vmap(lambda u: mixer(u)[0])(many), want) <= 1e-5


@everywhere
@precisions
def test_second_derivatives_are_right_or_refused(name, dtype):
    mixer, u, direction = small_mixer(name, dtype), sequence(2, 7, dtype), sequence(2, 7, dtype, seed=2)
    u.requires_grad_()
    (gradient,) = torch.autograd.grad(energy(mixer)(u), u, create_graph=True)
    try:
        (curvature,) = torch.autograd.grad((gradient * direction).sum(), u)
    except RuntimeError:
        return
    step = 1e-5 * direction.double()
    wanted = (true_gradient(name, u.detach() + step) - true_gradient(name, u.detach() - step)) / 2e-5
    assert difference(curvature.double(), wanted) <= 1e-5


def test_second_derivatives_of_a_mixer_that_keeps_to_torch():
    u = sequence(2, 5).float().requires_grad_()
    plain, exact = small_mixer("naju", torch.float32, backend="chunked"), small_mixer("naju")

    def second(mixer, u):
        (first,) = torch.autograd.grad(energy(mixer)(u), u, create_graph=True)
        return torch.autograd.grad(first.square().sum(), u)[0]

    assert difference(second(plain, u).double(), second(exact, u.detach().double().requires_grad_())) <= 1e-4
    with pytest.raises(RuntimeError, match="cannot be differentiated; Naju with backend='chunked' can be"):
        second(small_mixer("naju", torch.float32, backend="cpu_compiled"), u)
