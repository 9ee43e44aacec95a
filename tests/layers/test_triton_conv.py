"""The short convolution with SiLU by its Triton kernels against float64: interpreted without a GPU, on it with one."""

from __future__ import annotations

import importlib.util
from itertools import pairwise

import pytest
import torch

from interpreter import passes_under_the_interpreter
from naju.layers.causal_conv import convolve
from naju.layers.layout import Layout, PackedLayout
from naju.mixers import build_mixer
from naju.scan.on_gpu import interpreted
from naju.scan.triton_chunked.conv import triton_conv_silu
from numerics import TOLERANCE, relative_rms

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() and not interpreted() else "cpu"
runs_kernel = pytest.mark.skipif(DEVICE == "cpu" and not interpreted(), reason="test_under_the_interpreter runs it")
SIZES = [(1, 3, 4), (2, 5, 4), (16, 3, 1), (33, 70, 3), (40, 9, 5)]  # length, channels, width
SIZES += [(1000, 520, 4), (4097, 96, 4)] if DEVICE == "cuda" else []


@pytest.mark.skipif(interpreted() or DEVICE == "cuda", reason="the kernels run here as they are")
def test_under_the_interpreter() -> None:
    passes_under_the_interpreter(__file__, "-k", "kernel_")


@pytest.fixture(autouse=True)
def _not_compiled_for_the_cpu(monkeypatch):
    monkeypatch.setattr("naju.layers.causal_conv._compiled_can", lambda *_: False)


def draw(length, channels, width, dtype=torch.float32, rows=2, batch=2):
    """u, tail, weight and bias."""
    generator = torch.Generator().manual_seed(length)
    shapes = (batch, length, channels), (rows, width - 1, channels), (channels, width), (channels,)
    drawn = (torch.randn(shape, generator=generator) for shape in shapes)
    return [tensor.to(DEVICE, dtype).requires_grad_() for tensor in drawn]


def outcome(arguments, cotangent, layout=None, plain=False):
    """The output and the gradient of every argument that has elements."""
    u, tail, weight, bias = arguments
    (out,) = convolve(u, tail, layout or Layout(len(u)), [weight], [bias], silu=True, plain=plain)
    inputs = [tensor for tensor in arguments if tensor.numel() > 0]
    return out, *torch.autograd.grad(out, inputs, cotangent.to(out))


def check(arguments, layout=None):
    exact = [tensor.detach().double().requires_grad_() for tensor in arguments]
    cotangent = torch.randn(arguments[0].shape, generator=torch.Generator().manual_seed(1))
    got, want = outcome(arguments, cotangent, layout), outcome(exact, cotangent, layout, plain=True)
    for place, (mine, truth) in enumerate(zip(got, want, strict=True)):
        tolerance = TOLERANCE[arguments[0].dtype, "gradient" if place else "forward"]
        assert mine.dtype == arguments[max(place - 1, 0)].dtype
        assert relative_rms(mine.detach(), truth.detach()) <= tolerance, place


@runs_kernel
@pytest.mark.parametrize(("length", "channels", "width"), SIZES)
def test_kernel_gives_values_and_every_gradient_of_float64(length, channels, width):
    check(draw(length, channels, width))


@runs_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernel_takes_half_precision(dtype):
    check(draw(37, 12, 4, dtype))
    u, *parameters = draw(37, 12, 4)  # as under autocast
    check([u.detach().to(dtype).requires_grad_(), *parameters])


@runs_kernel
def test_kernel_convolves_packed_sequences_apart():
    boundaries = torch.tensor([0, 0, 7, 8, 40], device=DEVICE)
    u, tail, weight, bias = draw(40, 6, 4, rows=4, batch=1)
    check([u, tail, weight, bias], PackedLayout(boundaries, 40))
    (packed,) = convolve(u, tail, PackedLayout(boundaries, 40), [weight], [bias], silu=True)
    for row, (start, stop) in enumerate(pairwise(boundaries.tolist())):
        if start < stop:
            alone = convolve(u[:, start:stop], tail[row : row + 1], Layout(1), [weight], [bias], silu=True)
            assert torch.equal(packed[:, start:stop], alone[0])


@runs_kernel
def test_kernel_reads_strided_inputs_as_they_lie():
    u, tail, weight, bias = draw(21, 6, 4)
    (want,) = convolve(u, tail, Layout(2), [weight], [bias], silu=True)
    for strided in (torch.cat([u, u], dim=-1)[..., 6:], u.transpose(1, 2).contiguous().transpose(1, 2)):
        (got,) = convolve(strided, tail, Layout(2), [weight], [bias], silu=True)
        assert torch.equal(got, want)


@runs_kernel
def test_kernel_is_an_operator_of_torch():
    for arguments in (draw(9, 4, 3), draw(9, 4, 1)):
        torch.library.opcheck(triton_conv_silu, (*arguments, None))
    u, *rest = draw(9, 4, 3)
    (gradient,) = torch.autograd.grad(triton_conv_silu(u, *rest, None).square().sum(), u, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated"):
        gradient.sum().backward()


@runs_kernel
@pytest.mark.parametrize("name", ["mamba", "mamba2", "mlstm", "gla"])
def test_kernel_serves_the_mixers(name, monkeypatch):
    widths = []

    def counted(u, tail, weight, bias, cu_seqlens):
        widths.append(weight.shape[1])
        return triton_conv_silu(u, tail, weight, bias, cu_seqlens)

    monkeypatch.setattr("naju.layers.causal_conv.triton_conv_silu", counted)
    mixer = build_mixer(name, 16, **({"d_conv": 4} if name == "gla" else {})).to(DEVICE)
    mixer(torch.randn(2, 9, 16, device=DEVICE))
    assert widths == [4]
