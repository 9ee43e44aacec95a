"""Depthwise causal convolution over a handful of tokens: fused on a CPU and on a GPU, and in torch's own operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from naju.layers.layout import Layout
from naju.scan.cpu_compiled.conv import cpu_conv
from naju.scan.cpu_compiled.native import MOST_OUTPUTS, missing_here
from naju.scan.dispatch import other_transform, state_dtype
from naju.scan.triton_chunked.conv import conv_refuses, triton_conv_silu


class DepthwiseConv(nn.Module):
    """Weight (channels, width) and bias of one convolution, initialised as torch does with `width` inputs."""

    def __init__(self, channels: int, width: int, *, bias: bool) -> None:
        super().__init__()
        bound = width**-0.5
        self.weight = nn.Parameter(torch.empty(channels, width).uniform_(-bound, bound))
        if bias:
            self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound))


def convolve(
    u: Tensor,
    tail: Tensor,
    layout: Layout,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    adds: Sequence[Tensor] = (),
    *,
    silu: bool = False,
    plain: bool = False,
) -> list[Tensor]:
    """Several convolutions of one input: `act(sum_j weight[:, j] u_{t-width+1+j} + bias + add)`.

    u (b, l, d); tail (rows, width - 1, d) is what came before; weights (d, width); biases (d,); adds (b, l, d), one for
    each weight or none at all. The activation is for convolutions without them. All is done in float32 or better; so is
    what comes out, but after the activation it has the precision of u. `plain`: by torch's operations alone, which can
    be differentiated twice.
    """
    if silu and adds:
        raise ValueError("convolve takes either adds or silu=True, but was given both")
    _check_sizes(u, tail, weights, biases, adds)
    tensors = (u, tail, *weights, *biases, *adds)
    if not plain and _compiled_can(tensors, len(weights)):
        stacked = torch.stack([weight.t() for weight in weights]), torch.stack(list(biases))
        return cpu_conv(u, tail, *stacked, list(adds), layout.cu_seqlens, silu)  # type: ignore[no-any-return]
    if silu and not plain and conv_refuses(u, tail.shape[1] + 1) is None:
        pairs = zip(weights, biases, strict=True)
        return [triton_conv_silu(u, tail, weight, bias, layout.cu_seqlens) for weight, bias in pairs]
    past = layout.past(u, tail)
    sums = [weighted_sum(past, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    if adds:
        sums = [add + total for add, total in zip(adds, sums, strict=True)]
    return [F.silu(total).to(u.dtype) for total in sums] if silu else sums


def weighted_sum(past: Sequence[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    """`sum_j weight[:, j] * past[j] + bias` in float32 or better; the past comes oldest first."""
    dtype = state_dtype(past[0].dtype)
    total = bias.to(dtype)
    for tap, u in zip(weight.to(dtype).unbind(-1), past, strict=True):
        total = torch.addcmul(total, u.to(dtype), tap)
    return total


def _check_sizes(
    u: Tensor, tail: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], adds: Sequence[Tensor]
) -> None:
    """The compiled kernel reads them by address, and torch would broadcast some."""
    channels, width = u.shape[-1], tail.shape[-2] + 1
    expected = {"weight": (weights, (channels, width)), "bias": (biases, (channels,)), "addend": (adds, u.shape)}
    for name, (tensors, shape) in expected.items():
        for tensor in tensors:
            if tensor.shape != shape:
                raise ValueError(
                    f"the {name} of a convolution of {channels} channels and {width} taps must have shape "
                    f"{tuple(shape)}, but has shape {tuple(tensor.shape)}"
                )
    if tail.shape[-1] != channels:
        raise ValueError(f"tail must have the {channels} channels of u, but has shape {tuple(tail.shape)}")


def _compiled_can(tensors: Sequence[Tensor], outputs: int) -> bool:
    plain = all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in tensors)
    return plain and outputs <= MOST_OUTPUTS and missing_here() is None and other_transform() is None
