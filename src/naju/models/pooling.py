"""One vector for a whole sequence, whatever padding stands around it."""

from __future__ import annotations

import torch
from torch import Tensor

from naju.scan.dispatch import other_transform


def pooled(features: Tensor, attention_mask: Tensor | None, how: str) -> Tensor:
    """Features (b, l, m) to (b, m): those of the "last" real position, or the "mean" over all real ones."""
    if attention_mask is not None:
        _check_mask(attention_mask)
    return _mean(features, attention_mask) if how == "mean" else _last(features, attention_mask)


def _last(features: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return features[:, -1]
    place = torch.arange(mask.shape[1], device=mask.device).mul(mask.bool()).argmax(1)
    return features[torch.arange(len(features), device=features.device), place]


def _mean(features: Tensor, mask: Tensor | None) -> Tensor:
    """Summed in float32 at least, as thousands of terms in bfloat16 would lose the small ones."""
    wide = features.to(torch.promote_types(features.dtype, torch.float32))
    if mask is None:
        return wide.mean(1).to(features.dtype)
    real = mask.bool().unsqueeze(-1)
    return (torch.where(real, wide, 0.0).sum(1) / real.sum(1)).to(features.dtype)


def _check_mask(mask: Tensor) -> None:
    """Values are read only where that costs no wait for a device and breaks no graph, and where there are some."""
    readable = mask.device.type == "cpu" and not torch.compiler.is_compiling() and other_transform() is None
    if readable and not mask.bool().any(1).all():
        raise ValueError("attention_mask leaves a row without any real token; every row needs at least one")
