"""Cross-entropy over a large vocabulary, a chunk of tokens at a time.

With 50,257 tokens of vocabulary the logits of one update of 32,768 tokens would take 6.6 GB in float32, and their
gradient as much again. Here they live for one chunk only. While they do, the gradients they lead to are computed as
well: the backward pass has nothing left but a scaling, and no chunk's logits are computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from naju.scan.dispatch import state_dtype
from naju.scan.frame import without_autocast

IGNORED = -100
CHUNK_LOGITS = 2**26  # 256 MiB in float32
LARGEST_LOSS = 700.0  # whose exponential is still a number

Chunk = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]


def perplexity(loss: float) -> float:
    """A number however large the loss; e^700 stands for all that is beyond."""
    return math.exp(min(loss, LARGEST_LOSS))


def chunked_cross_entropy(
    features: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    divisor: float | None = None,
    chunk: int | None = None,
    compiled: bool = False,
) -> Tensor:
    """`F.cross_entropy` of the logits `features @ weight.T`: features (…, m), weight (v, m), targets (…).

    The sum over the targets that are not IGNORED is taken in float32 or better and divided by their number, or by
    `divisor`. Products have the precision of the surrounding autocast; the weight's gradient is summed in the weight's
    own. `chunk` is the number of tokens at a time; `compiled` fuses what happens to a chunk's logits.
    """
    if features.shape[:-1] != targets.shape:
        raise ValueError(f"targets must have shape {tuple(features.shape[:-1])}, but have {tuple(targets.shape)}")
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():  # a GPU's own lookup refuses a stranger
        _check_range(targets, len(weight))
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be a positive integer or None, but is {chunk}")
    kind = features.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else features.dtype
    size = max(1, CHUNK_LOGITS // len(weight)) if chunk is None else chunk
    one_chunk = _compiled_chunk() if compiled else _chunk_loss
    flat, targets = features.flatten(0, -2).to(dtype), targets.flatten().long()
    with without_autocast(features.device):
        total: Tensor = _SummedLoss.apply(flat, weight, targets, size, one_chunk, torch.is_grad_enabled())
        return total / ((targets != IGNORED).sum() if divisor is None else divisor)


def _check_range(targets: Tensor, classes: int) -> None:
    strangers = targets[(targets != IGNORED) & ((targets < 0) | (targets >= classes))]
    if strangers.numel() > 0:
        raise ValueError(f"targets must lie in [0, {classes}) or be {IGNORED}, but one is {int(strangers[0])}")


class _SummedLoss(torch.autograd.Function):
    """The sum over all tokens, and its gradients, for which nothing but themselves is kept."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, targets: Tensor, size: int, one_chunk: Chunk, learns: bool
    ) -> Tensor:
        matrix = weight.to(features.dtype)
        total = features.new_zeros((), dtype=state_dtype(features.dtype))
        d_features, d_weight = (torch.empty_like(features), torch.zeros_like(weight)) if learns else (None, None)
        for start in range(0, len(targets), size):
            part = slice(start, start + size)
            loss, d_logits = one_chunk(features[part] @ matrix.t(), targets[part], total, learns)
            total = total + loss
            if d_logits is not None and d_features is not None and d_weight is not None:
                torch.mm(d_logits, matrix, out=d_features[part])
                d_weight += d_logits.t() @ features[part]
        ctx.save_for_backward(d_features, d_weight)
        return total

    @staticmethod
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:
        d_features, d_weight = ctx.saved_tensors
        return d_features * d_total.to(d_features.dtype), d_weight * d_total.to(d_weight.dtype), None, None, None, None


def _chunk_loss(logits: Tensor, targets: Tensor, like: Tensor, learns: bool) -> tuple[Tensor, Tensor | None]:
    """The summed loss of one chunk, in the precision of `like`, and its gradient in that of the logits (t, v)."""
    real = targets != IGNORED
    place = torch.where(real, targets, 0).unsqueeze(-1)
    precise = logits.to(like.dtype)
    log_sum = precise.logsumexp(-1, keepdim=True)
    losses = (log_sum - precise.gather(-1, place)).squeeze(-1)
    loss = torch.where(real, losses, 0).sum()
    if not learns:
        return loss, None
    d_logits = (precise - log_sum).exp_()
    d_logits.scatter_add_(-1, place, -torch.ones_like(place, dtype=d_logits.dtype))
    return loss, d_logits.mul_(real.unsqueeze(-1)).to(logits.dtype)


@cache
def _compiled_chunk() -> Chunk:
    return torch.compile(_chunk_loss)
