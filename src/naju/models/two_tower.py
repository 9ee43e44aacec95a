"""The classifier of pairs: both sequences go through one backbone, and a small head compares what comes out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from naju.models.backbone import Backbone
from naju.models.config import ModelConfig
from naju.models.pooling import pooled


class TwoTower(nn.Module):
    """Pairs of sequences (b, 2, l) to class logits (b, classes).

    The head sees both vectors, their product and their difference, and has one hidden layer of d_model units.
    """

    def __init__(self, config: ModelConfig, n_classes: int) -> None:
        super().__init__()
        if n_classes < 1:
            raise ValueError(f"n_classes must be a positive integer, but is {n_classes}")
        self.config = config
        self.backbone = Backbone(config, 1.0 if config.embedding_std is None else config.embedding_std)
        width = config.d_model
        self.head = nn.Sequential(nn.Linear(4 * width, width), nn.GELU(), nn.Linear(width, n_classes))

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        for name, given in (("tokens", tokens), ("attention_mask", attention_mask)):
            if given is not None and (given.dim() != 3 or given.shape[1] != 2):
                raise ValueError(f"{name} must have shape (batch, 2, length), but has {tuple(given.shape)}")
        mask = None if attention_mask is None else attention_mask.flatten(0, 1)  # (2b, l)
        features, _ = self.backbone(tokens.flatten(0, 1), attention_mask=mask)
        one, other = pooled(features, mask, self.config.pooling).unflatten(0, (-1, 2)).unbind(1)  # (b, m) each
        return self.head(torch.cat([one, other, one * other, one - other], dim=-1))  # type: ignore[no-any-return]
