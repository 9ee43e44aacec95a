"""The short convolution with SiLU as an operator of its own, for the mixers whose scan is another's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from naju.scan.operator import refuse_second_derivative, refusing_tangents
from naju.scan.triton_chunked import launch

_OPTIONS: dict[str, Any] = {"mutates_args": (), "device_types": ("cuda", "cpu")}


# u (b, l, d), tail (rows, width - 1, d) or none, weight (d, width), bias (d,)
@torch.library.custom_op("naju::triton_conv_silu", **_OPTIONS)
@refusing_tangents
def triton_conv_silu(u: Tensor, tail: Tensor | None, weight: Tensor, bias: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    out = u.new_empty(u.shape)
    with launch.on_device(u.device):
        launch.convolve_silu(launch.plan(u, 1, cu_seqlens), u, tail, weight, bias, out)
    return out


@torch.library.custom_op("naju::triton_conv_silu_backward", **_OPTIONS)
@refusing_tangents
def triton_conv_silu_backward(
    dout: Tensor, u: Tensor, tail: Tensor | None, weight: Tensor, bias: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of u, tail (empty without one), weight and bias."""
    du = u.new_empty(u.shape)
    with launch.on_device(u.device):
        plan = launch.plan(u, 1, cu_seqlens)
        dtail, dbias, dweight = launch.convolve_silu_backward(plan, dout.contiguous(), u, tail, weight, bias, du)
    return du, u.new_empty(0) if dtail is None else dtail, dweight.to(weight.dtype), dbias.to(bias.dtype)


@triton_conv_silu.register_fake
def _(u: Tensor, *rest: Tensor | None) -> Tensor:
    return u.new_empty(u.shape)


@triton_conv_silu_backward.register_fake
def _(dout: Tensor, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(dout.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape) for tensor in inputs[:4])


def _save(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    du, dtail, dweight, dbias = triton_conv_silu_backward(dout, *ctx.saved_tensors)
    return du, None if ctx.saved_tensors[1] is None else dtail, dweight, dbias, None


triton_conv_silu.register_autograd(_differentiate, setup_context=_save)
triton_conv_silu_backward.register_autograd(refuse_second_derivative)
