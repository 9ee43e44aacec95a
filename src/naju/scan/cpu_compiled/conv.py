"""The compiled short convolution as a torch operator: float32 on a CPU, one or two of them on one input at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from naju.scan.cpu_compiled.native import ConvProblem, call, sequences_of
from naju.scan.operator import refuse_second_derivative, refusing_tangents

# u (b, l, d), tail (rows, width - 1, d), weight (outputs, width, d), bias (outputs, d); adds: none, or (b, l, d) for
# each output, and then no silu


@torch.library.custom_op("naju::cpu_conv", mutates_args=(), device_types="cpu")
@refusing_tangents
def cpu_conv(
    u: Tensor, tail: Tensor, weight: Tensor, bias: Tensor, adds: list[Tensor], cu_seqlens: Tensor | None, silu: bool
) -> list[Tensor]:
    outputs = [u.new_empty(u.shape) for _ in weight]
    tensors = {"u": u, "tail": tail, "weight": weight, "bias": bias, "add": adds, "out": outputs}
    call("naju_conv_forward", *_problem(u, weight, cu_seqlens, silu, tensors))
    return outputs


@torch.library.custom_op("naju::cpu_conv_backward", mutates_args=(), device_types="cpu")
@refusing_tangents
def cpu_conv_backward(
    douts: list[Tensor],
    u: Tensor,
    tail: Tensor,
    weight: Tensor,
    bias: Tensor,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of u, tail, weight and bias."""
    gradients = {"du": u.new_empty(u.shape), "dtail": u.new_empty(tail.shape)}
    partial = {"dweight": u.new_empty(len(tail), *weight.shape), "dbias": u.new_empty(len(tail), *bias.shape)}
    tensors = {"u": u, "tail": tail, "weight": weight, "bias": bias, "dout": douts}
    call("naju_conv_backward", *_problem(u, weight, cu_seqlens, silu, tensors | gradients | partial))
    return *gradients.values(), *(tensor.sum(0) for tensor in partial.values())  # type: ignore[return-value]


def _problem(
    u: Tensor, weight: Tensor, cu_seqlens: Tensor | None, silu: bool, tensors: dict[str, Any]
) -> tuple[ConvProblem, dict[str, Any]]:
    sequences = sequences_of(cu_seqlens, u.shape[0], u.shape[1])
    outputs, width, channels = weight.shape
    problem = ConvProblem(n_sequences=len(sequences), channels=channels, width=width, outputs=outputs, silu=silu)
    return problem, tensors | {"sequences": sequences}


@cpu_conv.register_fake
def _(u, tail, weight, bias, adds, cu_seqlens, silu):  # type: ignore[no-untyped-def]
    return [u.new_empty(u.shape) for _ in range(weight.shape[0])]


@cpu_conv_backward.register_fake
def _(douts, u, tail, weight, bias, cu_seqlens, silu):  # type: ignore[no-untyped-def]
    return tuple(tensor.new_empty(tensor.shape) for tensor in (u, tail, weight, bias))


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    u, tail, weight, bias, adds, cu_seqlens, ctx.silu = inputs
    ctx.save_for_backward(u, tail, weight, bias, cu_seqlens)
    ctx.adds = len(adds)


def _differentiate(ctx: Any, douts: list[Tensor]) -> tuple[Any, ...]:
    gradients = cpu_conv_backward(douts, *ctx.saved_tensors, ctx.silu)
    return *gradients, list(douts) if ctx.adds else [], None, None


cpu_conv.register_autograd(_differentiate, setup_context=_save_inputs)
cpu_conv_backward.register_autograd(refuse_second_derivative)
