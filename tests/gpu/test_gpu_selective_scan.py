"""mamba_ssm's kernel, Naju's and the torch path give the same scan, the same gradients and the same mixer."""

from __future__ import annotations

import copy

import pytest
import torch

from naju.layers.diagonal_scan import diagonal_scan
from naju.mixers import build_mixer
from numerics import relative_rms

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
# The kernel exponentiates and sums in its own order, with the hardware's fast exponential.
TOLERANCE = 1e-4


@pytest.fixture(scope="module", autouse=True)
def kernel():
    pytest.importorskip("mamba_ssm.ops.selective_scan_interface", reason="mamba_ssm is not installed")


def draw(length, channels, states):
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    dt = torch.nn.functional.softplus(normal(2, length, channels) - 2)
    h, B, C = normal(2, length, channels), normal(2, length, states), normal(2, length, states)
    return [tensor.requires_grad_() for tensor in (h, dt, -torch.exp(normal(channels, states)), B, C)]


@pytest.mark.parametrize(("length", "channels", "states"), [(1, 32, 16), (100, 48, 4), (2048, 256, 16), (700, 64, 64)])
def test_the_kernels_equal_the_torch_path(length, channels, states):
    arguments = draw(length, channels, states)
    dy = torch.randn(2, length, channels, device="cuda")
    results = []
    for backend in ("mamba_ssm", "triton", "torch"):
        y, x = diagonal_scan(*arguments, backend=backend)
        results.append((y.detach(), x.detach(), *torch.autograd.grad(y, arguments, dy)))
    for theirs, ours, want in zip(*results, strict=True):
        if want.any():
            assert relative_rms(theirs, want) <= TOLERANCE
            assert relative_rms(ours, want) <= TOLERANCE
        else:  # of one token the decay has no gradient
            assert not theirs.any()
            assert not ours.any()


def test_auto_takes_the_kernel_and_leaves_it_where_it_cannot_run():
    drive = draw(40, 32, 16)
    by_kernel, chosen = (diagonal_scan(*drive, backend=backend)[0] for backend in ("mamba_ssm", "auto"))
    assert torch.equal(by_kernel, chosen)
    with pytest.raises(ValueError, match="it takes no initial state and no packed sequences"):
        diagonal_scan(*drive, initial_state=torch.zeros(2, 32, 16, device="cuda"), backend="mamba_ssm")


def test_the_final_state_of_the_kernel_refuses_a_gradient():
    _, x = diagonal_scan(*draw(40, 32, 16), backend="mamba_ssm")
    with pytest.raises(RuntimeError, match="no gradient for the final state; use backend='torch'"):
        x.sum().backward()


def test_the_mixer_is_the_same_with_either():
    fast = build_mixer("mamba", 128, backend="mamba_ssm").cuda()
    slow = copy.deepcopy(fast)
    slow.backend = "torch"
    u = torch.randn(4, 512, 128, device="cuda")
    mask = torch.ones(4, 512, device="cuda", dtype=torch.bool)
    mask[0, :100] = mask[1, 300:] = False
    (got, state), (want, memory) = fast(u, attention_mask=mask), slow(u, attention_mask=mask)
    assert relative_rms(got.detach(), want.detach()) <= TOLERANCE
    assert relative_rms(state.x.detach(), memory.x.detach()) <= TOLERANCE
