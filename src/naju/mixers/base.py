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
    state_kind: type[State] = State  # what `init_state` makes
    longest: int | None = None  # the most tokens that a sequence may have, where positions come to an end
    worth_compiling = True  # whether torch.compile makes it faster on a GPU: not where nearly all of it is one operator

    @abstractmethod
    def forward(
        self,
        u: Tensor,
        state: Any = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """A stretch of tokens (b, l, m). `attention_mask` (b, l) is 1 at tokens and 0 at padding, anywhere in a row;
        outputs there are 0. `cu_seqlens` packs sequences along a batch of 1; states then have one row a sequence."""

    @abstractmethod
    def step(self, u: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One token a sequence, (b, m)."""

    @abstractmethod
    def init_state(self, batch: int) -> State:
        """The state before the first token."""

    def check_input(self, u: Tensor, axes: int) -> None:
        expected = "(batch, length, d_model)" if axes == 3 else "(batch, d_model)"
        if not isinstance(u, Tensor):
            raise TypeError(f"u must be a tensor, but is a {type(u).__name__}")
        if u.dim() != axes or u.shape[-1] != self.d_model or 0 in u.shape:
            raise ValueError(
                f"u must have shape {expected} with d_model {self.d_model} and not be empty, but has {tuple(u.shape)}"
            )

    def state_for(self, state: Any, rows: int) -> Any:
        """The given state after checking its kind and that it has a row for each sequence, or the one before the first
        token."""
        if state is None:
            return self.init_state(rows)
        if not isinstance(state, self.state_kind):
            raise TypeError(f"state must be a {self.state_kind.__name__}, but is a {type(state).__name__}")
        if state.batch != rows:
            raise ValueError(f"state holds {state.batch} sequences, but the input has {rows}")
        return state

    def fitting(self, state: Any, rows: int, **shapes: tuple[int, ...]) -> Any:
        """`state_for`, after checking each named tensor's shape, batch aside: kernels read some by their address."""
        state = self.state_for(state, rows)
        for name, shape in shapes.items():
            found = tuple(getattr(state, name).shape)
            if found != (rows, *shape):
                raise ValueError(
                    f"state does not fit this mixer: {name} must have shape {(rows, *shape)}, but has {found}"
                )
        return state

    @property
    @abstractmethod
    def state_size(self) -> int | None:
        """Numbers in the recurrent memory of one sequence (the paper's "State/layer"); None if it grows with length."""
