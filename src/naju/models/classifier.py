"""The classifier: one answer a sequence, read at its last token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from naju.models.backbone import Backbone
from naju.models.config import ModelConfig


class Classifier(nn.Module):
    """Tokens (b, l) to class logits (b, classes), by a linear head on the last real position."""

    def __init__(self, config: ModelConfig, n_classes: int) -> None:
        super().__init__()
        if n_classes < 1:
            raise ValueError(f"n_classes must be a positive integer, but is {n_classes}")
        self.config = config
        self.backbone = Backbone(config, 1.0 if config.embedding_std is None else config.embedding_std)
        self.head = nn.Linear(config.d_model, n_classes)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is not None:
            _check_mask(attention_mask)
        features, _ = self.backbone(tokens, attention_mask=attention_mask)
        if attention_mask is None:
            return self.head(features[:, -1])  # type: ignore[no-any-return]
        place = torch.arange(tokens.shape[1], device=tokens.device).mul(attention_mask.bool()).argmax(1)
        return self.head(features[torch.arange(len(features), device=tokens.device), place])  # type: ignore[no-any-return]


def _check_mask(mask: Tensor) -> None:
    """Values are read only where that costs no wait for a device and breaks no graph."""
    if mask.device.type == "cpu" and not torch.compiler.is_compiling() and not mask.bool().any(1).all():
        raise ValueError("attention_mask leaves a row without any real token; every row needs at least one")
