"""Cross-entropy over a large vocabulary, a chunk of tokens at a time.

With 50,257 tokens of vocabulary the logits of one update of 32,768 tokens would take 6.6 GB in float32, and their
gradient as much again. Here they live for one chunk only. While they do, the gradients they lead to are computed as
well: the backward pass has nothing left but a scaling, and no chunk's logits are computed twice.

On a GPU two things decide the speed: one kernel turns logits into losses and, in place, into their gradient, and the
vocabulary is padded, because products with an odd number of columns take several times as long.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from naju.scan.dispatch import state_dtype
from naju.scan.frame import without_autocast
from naju.scan.on_gpu import gpu_refuses, triton_missing_here

IGNORED = -100
CHUNK_LOGITS = 2**26  # 256 MiB in float32
LARGEST_LOSS = 700.0  # whose exponential is still a number
ALIGNMENT = 64  # of the vocabulary on a GPU


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
) -> Tensor:
    """`F.cross_entropy` of the logits `features @ weight.T`: features (…, m), weight (v, m), targets (…).

    The sum over the targets that are not IGNORED is taken in float32 or better and divided by their number, or by
    `divisor`. Products have the precision of the surrounding autocast; the weight's gradient is summed in the weight's
    own. `chunk` is the number of tokens at a time. A target that is no class is refused on the CPU; on a GPU, where
    nothing waits for the values, it makes the loss NaN.
    """
    if features.shape[:-1] != targets.shape:
        raise ValueError(f"targets must have shape {tuple(features.shape[:-1])}, but have {tuple(targets.shape)}")
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_range(targets, len(weight))
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be a positive integer or None, but is {chunk}")
    kind = features.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else features.dtype
    size = max(1, CHUNK_LOGITS // len(weight)) if chunk is None else chunk
    flat, targets = features.flatten(0, -2).to(dtype), targets.flatten().long()
    with without_autocast(features.device):
        total: Tensor = _SummedLoss.apply(flat, weight, targets, size, torch.is_grad_enabled())
        return total / ((targets != IGNORED).sum() if divisor is None else divisor)


def _check_range(targets: Tensor, classes: int) -> None:
    strangers = targets[(targets != IGNORED) & ((targets < 0) | (targets >= classes))]
    if strangers.numel() > 0:
        raise ValueError(f"targets must lie in [0, {classes}) or be {IGNORED}, but one is {int(strangers[0])}")


class _SummedLoss(torch.autograd.Function):
    """The sum over all tokens, and its gradients, for which nothing but themselves is kept."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, targets: Tensor, size: int, learns: bool) -> Tensor:
        classes = len(weight)
        matrix = _padded(weight.to(features.dtype))
        total = features.new_zeros((), dtype=state_dtype(features.dtype))
        d_features, d_weight = (torch.empty_like(features), torch.zeros_like(weight)) if learns else (None, None)
        for start in range(0, len(targets), size):
            part = slice(start, start + size)
            logits = features[part] @ matrix.t()
            total = total + chunk_loss(logits[:, :classes], targets[part], learns=learns)
            if d_features is not None and d_weight is not None:  # the logits are their gradient now
                torch.mm(logits, matrix, out=d_features[part])
                d_weight += (logits.t() @ features[part])[:classes]
        ctx.save_for_backward(d_features, d_weight)
        return total

    @staticmethod
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:
        d_features, d_weight = ctx.saved_tensors
        return d_features * d_total.to(d_features.dtype), d_weight * d_total.to(d_weight.dtype), None, None, None


def _padded(matrix: Tensor) -> Tensor:
    """With rows of zeros below, whose logits and their gradients are 0."""
    return F.pad(matrix, (0, 0, 0, -len(matrix) % ALIGNMENT)) if matrix.is_cuda else matrix


def chunk_loss(logits: Tensor, targets: Tensor, *, learns: bool) -> Tensor:
    """The summed loss of logits (t, v) in float32 or better; where it `learns`, the logits become their gradient."""
    if gpu_refuses(logits, 1) is None and triton_missing_here() is None:
        return _kernel_loss(logits, targets, learns=learns)
    real = targets != IGNORED
    place = torch.where(real, targets, 0).unsqueeze(-1)
    precise = logits.to(state_dtype(logits.dtype))
    log_sum = precise.logsumexp(-1, keepdim=True)
    losses = (log_sum - precise.gather(-1, place)).squeeze(-1)
    if learns:
        slopes = (precise - log_sum).exp_()
        slopes.scatter_add_(-1, place, -torch.ones_like(place, dtype=slopes.dtype))
        logits.copy_(slopes.mul_(real.unsqueeze(-1)))
    return torch.where(real, losses, 0).sum()


def _kernel_loss(logits: Tensor, targets: Tensor, *, learns: bool) -> Tensor:
    from naju.lm.loss_kernel import BLOCK, WARPS, loss_of_row

    losses = logits.new_empty(len(targets), dtype=torch.float32)
    rows, classes = logits.shape
    with torch.cuda.device_of(logits):
        loss_of_row[(rows,)](
            logits,
            targets,
            losses,
            logits.stride(0),
            classes,
            IGNORED=IGNORED,
            LEARNS=learns,
            BLOCK=BLOCK,
            num_warps=WARPS,
            enable_fp_fusion=True,
        )
    return losses.sum()
