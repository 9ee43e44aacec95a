"""The classifier: one answer a sequence."""

from __future__ import annotations

from torch import Tensor, nn

from naju.models.backbone import Backbone
from naju.models.config import ModelConfig
from naju.models.pooling import pooled


class Classifier(nn.Module):
    """Tokens (b, l) to class logits (b, classes), by a linear head on the last real position or on the mean."""

    def __init__(self, config: ModelConfig, n_classes: int) -> None:
        super().__init__()
        if n_classes < 1:
            raise ValueError(f"n_classes must be a positive integer, but is {n_classes}")
        self.config = config
        self.backbone = Backbone(config, 1.0 if config.embedding_std is None else config.embedding_std)
        self.head = nn.Linear(config.d_model, n_classes)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        features, _ = self.backbone(tokens, attention_mask=attention_mask)
        return self.head(pooled(features, attention_mask, self.config.pooling))  # type: ignore[no-any-return]
