"""How much every layer of a model adds to what it reads, and where Naju's layers take that from."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from naju.analysis.memory_kernel import tau_e_from_logit
from naju.mixers.naju import NajuMixer
from naju.models.backbone import Backbone, unbroken
from naju.scan import naju_scan


class Sources(NamedTuple):
    """Of a Naju layer's output before it is modulated by z and projected; sizes are root mean squares."""

    memory: float  # tokens until 1/e of a write is left, at the median forget gate
    write: float  # mean write gate
    read: float  # alpha * x C
    fed_through: float  # D * h


class LayerSizes(NamedTuple):
    """Root mean squares of what a layer reads and of what it adds to that."""

    reads: float
    adds: float
    sources: Sources | None


@torch.no_grad()
def layer_sizes(backbone: Backbone, tokens: Tensor) -> list[LayerSizes]:
    """On tokens (b, l), each row read from an empty state."""
    found: list[LayerSizes] = []

    def look(block: Any, arguments: tuple[Any, ...], results: tuple[Tensor, Any]) -> None:
        before, after = arguments[0], results[0]
        sources = _sources(block.mixer, block.norm(before)) if isinstance(block.mixer, NajuMixer) else None
        found.append(LayerSizes(_size(before), _size(after - before), sources))

    hooks = [block.register_forward_hook(look) for block in backbone.blocks]
    try:
        with unbroken():
            backbone(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _sources(mixer: NajuMixer, u: Tensor) -> Sources:
    h, f_logit, i_logit, B, C, _ = mixer.scan_arguments(u)
    read, _ = naju_scan(h, f_logit, i_logit, B, C, alpha=mixer.alpha)
    memory = tau_e_from_logit(f_logit.double().cpu()).median()
    return Sources(float(memory), float(i_logit.sigmoid().mean()), _size(read), _size(mixer.D * h))


def _size(tensor: Tensor) -> float:
    return float(tensor.float().square().mean().sqrt())
