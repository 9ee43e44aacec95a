"""The short convolution with SiLU as an operator of its own, for the mixers whose scan is another's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from naju.scan.operator import refuse_second_derivative, refusing_tangents
from naju.scan.triton_chunked import launch
from naju.scan.triton_chunked.layer import layer_refuses

NO_STATE = 1  # the d_state that plans are made for: a convolution has no state, and its tiles do not depend on one
_OPTIONS: dict[str, Any] = {"mutates_args": (), "device_types": ("cuda", "cpu")}


# u (b, l, d), tail (rows, width - 1, d), weight (d, width), bias (d,)
@torch.library.custom_op("naju::triton_conv_silu", **_OPTIONS)
@refusing_tangents
def triton_conv_silu(u: Tensor, tail: Tensor, weight: Tensor, bias: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    out = u.new_empty(u.shape)
    with launch.on_device(u.device):
        launch.convolve_silu(launch.plan(u, NO_STATE, cu_seqlens), u, tail, weight, bias, out)
    return out


@torch.library.custom_op("naju::triton_conv_silu_backward", **_OPTIONS)
@refusing_tangents
def triton_conv_silu_backward(
    dout: Tensor, u: Tensor, tail: Tensor, weight: Tensor, bias: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of u, tail, weight and bias."""
    du = u.new_empty(u.shape)
    with launch.on_device(u.device):
        plan = launch.plan(u, NO_STATE, cu_seqlens)
        dtail, dbias, dweight = launch.convolve_silu_backward(plan, dout.contiguous(), u, tail, weight, bias, du)
    assert dtail is not None
    return du, dtail, dweight.to(weight.dtype), dbias.to(bias.dtype)


@triton_conv_silu.register_fake
def _(u: Tensor, *rest: Any) -> Tensor:
    return u.new_empty(u.shape)


@triton_conv_silu_backward.register_fake
def _(dout: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in inputs[:4])


def _save(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    return *triton_conv_silu_backward(dout, *ctx.saved_tensors), None


triton_conv_silu.register_autograd(_differentiate, setup_context=_save)
triton_conv_silu_backward.register_autograd(refuse_second_derivative)


def conv_refuses(u: Tensor, width: int) -> str | None:
    """The reason why the operator cannot run on u, or None where it can: the layer's, whose kernels it has."""
    return layer_refuses(u, NO_STATE, width)
