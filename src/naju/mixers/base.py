"""The protocol that every mixer obeys, so that every model and harness takes any of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from naju.mixers.state import State


class Mixer(nn.Module, ABC):
    """Maps (batch, length, d_model) to the same shape, causally, and carries a state from call to call.

    Any way of cutting a sequence (whole, in chunks, token by token) gives the same outputs and the same final state.
    """

    d_model: int
    norms_itself = False  # whether it wants the residual stream as it is, without the norm of its block

    @abstractmethod
    def forward(
        self,
        u: Tensor,
        state: Any = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """A stretch of tokens (b, l, m). `attention_mask` (b, l) is 0 at padding, anywhere in a row; outputs there are
        0. `cu_seqlens` packs sequences along a batch of 1; states then have one row a sequence."""

    @abstractmethod
    def step(self, u: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One token a sequence, (b, m)."""

    @abstractmethod
    def init_state(self, batch: int) -> State:
        """The state before the first token."""

    def check_input(self, u: Tensor, axes: int) -> None:
        expected = "(batch, length, d_model)" if axes == 3 else "(batch, d_model)"
        if u.dim() != axes or u.shape[-1] != self.d_model:
            raise ValueError(f"u must have shape {expected} with d_model {self.d_model}, but has {tuple(u.shape)}")

    def state_for(self, state: Any, rows: int) -> Any:
        """The given state after checking that it has a row for each sequence, or the one before the first token."""
        if state is None:
            return self.init_state(rows)
        if state.batch != rows:
            raise ValueError(f"state holds {state.batch} sequences, but the input has {rows}")
        return state

    @property
    @abstractmethod
    def state_size(self) -> int | None:
        """Numbers in the recurrent memory of one sequence (the paper's "State/layer"); None if it grows with length."""
