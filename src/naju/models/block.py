"""The pre-norm block: `u + mixer(norm(u))`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from naju.mixers.base import Mixer
from naju.mixers.state import State


class Block(nn.Module):
    """A mixer with its norm and residual; every other argument is the mixer's."""

    def __init__(self, mixer: Mixer, norm_eps: float) -> None:
        super().__init__()
        self.norm: nn.Module = nn.Identity() if mixer.norms_itself else nn.RMSNorm(mixer.d_model, eps=norm_eps)
        self.mixer = mixer

    def forward(
        self, u: Tensor, state: State | None, attention_mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Any]:
        mixed, state = self.mixer(self.norm(u), state, attention_mask, cu_seqlens)
        return u + mixed, state

    def step(self, u: Tensor, state: State) -> tuple[Tensor, Any]:
        mixed, state = self.mixer.step(self.norm(u), state)
        return u + mixed, state
