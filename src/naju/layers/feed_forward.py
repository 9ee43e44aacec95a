"""The feed-forward network of a Transformer."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class FeedForward(nn.Module):
    """`W_out gelu(W_in u)` with `expand` times as many hidden channels, token by token."""

    def __init__(self, d_model: int, expand: float) -> None:
        super().__init__()
        self.project_in = nn.Linear(d_model, round(expand * d_model))
        self.project_out = nn.Linear(round(expand * d_model), d_model)

    def forward(self, u: Tensor) -> Tensor:
        return self.project_out(F.gelu(self.project_in(u)))  # type: ignore[no-any-return]
