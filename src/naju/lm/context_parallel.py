"""One sequence on several processes, each with a stretch of it.

A layer's state after one stretch is all that the next stretch needs of it, so process r reads layer k as soon as
process r-1 has, and hands its own state on. While one process reads a stretch with layer k, the one before it is at
layer k+1: with K layers and P processes a pass takes K + P - 1 layer times of a stretch, where one process would take
K P. Gradients of states travel the other way, layer by layer, in the backward pass. Nothing is approximated, for any
mixer; what travels is its state, which for attention is the whole past.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from naju.lm.batches import Packing
from naju.lm.distributed import Place
from naju.mixers.state import State
from naju.models.backbone import Backbone, ModelState

CPU = torch.device("cpu")


def read_stretch(
    backbone: Backbone, tokens: Tensor, packing: Packing | None, empty: ModelState, place: Place
) -> Tensor:
    """Features (b, l, m) of this process's stretch of every row, as if the backbone had read the whole rows.

    With a packing the batch is read as one row, (1, b l, m).
    """
    u = backbone.embedding(tokens if packing is None else tokens.reshape(1, -1))
    cu_seqlens = None if packing is None else packing.cu_seqlens
    for block, blank in zip(backbone.blocks, empty.layers, strict=True):
        before = _receive(u, blank, place)
        if before is not None and packing is not None:
            before = packing.open(before, blank)
        u, after = block(u, before, None, cu_seqlens)
        u = _hand_on(u, after if packing is None else packing.close(after), place)
    return backbone.norm(u)  # type: ignore[no-any-return]


def _receive(u: Tensor, like: State, place: Place) -> State | None:
    """The state that the process before hands on, of the kind of `like`; None on the first one of a sequence."""
    source = place.context_neighbour(-1)
    if source is None:
        return None
    about: list[Any] = [None]
    dist.recv_object_list(about, src=source, device=CPU)
    tensors = iter(_Receive.apply(u, source, *about[0]))
    return like.map(lambda blank: next(tensors))


def _hand_on(u: Tensor, state: State, place: Place) -> Tensor:
    """u itself; in its backward pass the gradient of the state comes back from the process after this one."""
    target = place.context_neighbour(+1)
    if target is None:
        return u
    tensors = [tensor.contiguous() for tensor in state.tensors().values()]
    dist.send_object_list([[(tuple(t.shape), t.dtype) for t in tensors]], dst=target, device=CPU)
    return _HandOn.apply(u, target, *tensors)  # type: ignore[no-any-return]


class _Receive(torch.autograd.Function):
    """u takes part so that the graph knows of this even where nothing else before it has a gradient."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, source: int, *about: tuple[tuple[int, ...], torch.dtype]) -> tuple[Tensor, ...]:
        ctx.source = source
        tensors = tuple(torch.empty(shape, dtype=dtype, device=u.device) for shape, dtype in about)
        for tensor in tensors:
            _recv(tensor, source)
        ctx.mark_non_differentiable(*(tensor for tensor in tensors if not tensor.is_floating_point()))
        ctx.differentiable = [tensor.is_floating_point() for tensor in tensors]
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        for gradient, differentiable in zip(gradients, ctx.differentiable, strict=True):
            if differentiable:
                _send(gradient.contiguous(), ctx.source)
        return (None,) * (2 + len(gradients))


class _HandOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, target: int, *tensors: Tensor) -> Tensor:
        ctx.target = target
        ctx.about = [(t.shape, t.dtype, t.device) if t.is_floating_point() else None for t in tensors]
        for tensor in tensors:
            _send(tensor, target)
        return u.view_as(u)

    @staticmethod
    def backward(ctx: Any, d_u: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = []
        for about in ctx.about:
            if about is None:
                gradients.append(None)
            else:
                shape, dtype, device = about
                gradients.append(_recv(torch.empty(shape, dtype=dtype, device=device), ctx.target))
        return d_u, None, *gradients


def _send(tensor: Tensor, target: int) -> None:
    """Empty tensors (an attention layer's past at its start) are no message; bools travel as bytes."""
    if tensor.numel() > 0:
        dist.send(tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor, target)


def _recv(tensor: Tensor, source: int) -> Tensor:
    if tensor.numel() > 0:
        dist.recv(tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor, source)
    return tensor
