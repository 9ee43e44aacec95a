"""The compiled short convolution against the torch twin in float64: outputs and every gradient."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from naju.layers import causal_conv
from naju.layers.causal_conv import convolve
from naju.layers.layout import Layout, PackedLayout
from naju.scan.cpu_compiled.conv import cpu_conv
from naju.scan.cpu_compiled.native import missing_here
from numerics import relative_rms

pytestmark = pytest.mark.skipif(missing_here() is not None, reason=f"no compiled kernels: {missing_here()}")

CASES = [  # batch or packed lengths, length, channels, width, outputs, with adds, silu
    (2, 7, 33, 4, 1, False, True),
    (2, 1, 5, 4, 2, True, False),
    (1, 2, 40, 1, 1, False, True),
    (3, 50, 64, 3, 2, True, False),
    (1, 3, 1, 6, 1, False, False),
    (2, 19, 16, 2, 1, True, False),
    ([4, 0, 1, 9, 2], 16, 31, 4, 2, True, False),
    ([1, 1, 1], 3, 7, 5, 1, False, True),
]


def outcome(
    case: tuple[object, ...], dtype: torch.dtype, noise: torch.Generator
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    rows, length, channels, width, outputs, with_adds, silu = case
    packed = isinstance(rows, list)
    batch, tails = (1, len(rows)) if packed else (rows, rows)
    boundaries = torch.tensor([0, *rows]).cumsum(0) if packed else None
    layout = PackedLayout(boundaries, length) if packed else Layout(batch)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise).to(dtype).requires_grad_()

    u, tail = draw(batch, length, channels), draw(tails, width - 1, channels)
    weights, biases = ([draw(channels, width) for _ in range(outputs)], [draw(channels) for _ in range(outputs)])
    adds = [draw(batch, length, channels) for _ in range(outputs)] if with_adds else []
    results = convolve(u, tail, layout, weights, biases, adds, silu=silu)
    cotangents = [torch.randn(r.shape, generator=noise).to(dtype) for r in results]
    return results, torch.autograd.grad(results, [u, tail, *weights, *biases, *adds], cotangents)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_equals_the_twin_in_float64(case: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    monkeypatch.setattr(causal_conv, "cpu_conv", lambda *a: used.append(1) or cpu_conv(*a))
    got, got_gradients = outcome(case, torch.float32, torch.Generator().manual_seed(0))
    assert used, "float32 on a CPU takes the compiled convolution"
    want, want_gradients = outcome(case, torch.float64, torch.Generator().manual_seed(0))
    assert len(used) == 1, "float64 takes the torch twin"
    for a, b in zip([*got, *got_gradients], [*want, *want_gradients], strict=True):
        assert b.numel() == 0 or relative_rms(a.detach(), b.detach()) <= 2e-6


def test_gradients_of_a_long_sequence_are_not_one_running_sum() -> None:
    noise = torch.Generator().manual_seed(0)
    u, tail, dout = torch.randn(1, 65536, 4, generator=noise) + 0.3, torch.zeros(1, 3, 4), 0.5

    def gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
        weight, bias = torch.full((4, 4), 0.3, dtype=dtype), torch.full((4,), 0.1, dtype=dtype)
        parameters = [weight.requires_grad_(), bias.requires_grad_()]
        (out,) = convolve(u.to(dtype), tail.to(dtype), Layout(1), [weight], [bias], silu=True)
        return torch.autograd.grad(out, parameters, torch.full_like(out, dout))

    for got, want in zip(gradients(torch.float32), gradients(torch.float64), strict=True):
        assert relative_rms(got, want) <= 2e-6


def test_a_packed_neighbour_with_nan_changes_nothing() -> None:
    noise = torch.Generator().manual_seed(0)
    u, tail = torch.randn(1, 12, 6, generator=noise), torch.randn(2, 3, 6, generator=noise)
    weight, bias = torch.randn(6, 4, generator=noise), torch.randn(6, generator=noise)
    layout = PackedLayout(torch.tensor([0, 5, 12]), 12)
    (clean,) = convolve(u, tail, layout, [weight], [bias])
    u[:, :5], tail[0] = float("nan"), float("nan")
    (poisoned,) = convolve(u, tail, layout, [weight], [bias])
    assert poisoned[:, :5].isnan().all()
    assert torch.equal(poisoned[:, 5:], clean[:, 5:])


def test_operator_is_well_formed() -> None:
    u, tail = torch.randn(2, 5, 3, requires_grad=True), torch.randn(2, 3, 3, requires_grad=True)
    weight, bias = torch.randn(2, 4, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    adds = [torch.randn(2, 5, 3, requires_grad=True) for _ in range(2)]
    torch.library.opcheck(cpu_conv, (u, tail, weight, bias, adds, None, False))


@pytest.mark.filterwarnings("ignore:.torch.jit.script.* is deprecated:DeprecationWarning")  # torch's forward mode
def test_tangents_are_refused_and_convolve_steps_aside() -> None:
    u, tail, weight, bias = torch.randn(1, 5, 3), torch.zeros(1, 3, 3), torch.randn(3, 4), torch.randn(3)
    add, tangent = torch.randn(1, 5, 3), torch.randn(1, 5, 3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(add, tangent)
        with pytest.raises(RuntimeError, match="forward-mode"):
            cpu_conv(u, tail, weight.t().unsqueeze(0), bias.unsqueeze(0), [dual], None, False)
        (out,) = convolve(u, tail, Layout(1), [weight], [bias], [dual])
        assert torch.equal(forward_ad.unpack_dual(out).tangent, tangent)
