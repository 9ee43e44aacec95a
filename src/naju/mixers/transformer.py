"""The Transformer of the diagnostic suite: attention and a feed-forward network as one residual branch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from naju.layers.feed_forward import FeedForward
from naju.layers.layout import Layout, PackedLayout, PaddedLayout, layout_of
from naju.mixers.attention import AttentionMixer, AttentionState
from naju.mixers.base import Mixer

POSITIONS = ("learned", "rotary")


class TransformerMixer(Mixer):
    """`a + feed_forward(norm(u + a))` with `a = attention(norm(u))`: the usual pre-norm pair; the block adds u.

    `positions="learned"` adds a vector for each of `max_length` positions. The paper has one table, of 4096 × 256 at
    its parameter count, under the whole stack. A mixer knows one layer, so here each layer has a table as wide as a
    head and a map to the full width: four layers with four heads hold as many numbers. That makes 4.29M parameters at
    d_model 256, as in the paper (91 tokens, 16 classes). `positions="rotary"` has neither table nor limit.

    Positions count real tokens from 0, and one beyond the table is refused. In compiled code, where values cannot be
    read, padding counts towards this limit too.
    """

    norms_itself = True
    state_kind = AttentionState

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 4,
        feed_forward: float = 4,
        positions: str = "learned",
        max_length: int = 4096,
    ) -> None:
        super().__init__()
        if positions not in POSITIONS:
            raise ValueError(f"positions must be 'learned' or 'rotary', but is {positions!r}")
        if min(max_length, round(feed_forward * d_model)) < 1:
            raise ValueError(
                f"max_length and feed_forward must leave at least one position and one hidden channel, "
                f"but are {max_length} and {feed_forward}"
            )
        self.d_model, self.positions, self.max_length = d_model, positions, max_length
        self.attention = AttentionMixer(d_model, n_heads=n_heads, rotary=positions == "rotary")
        self.attention_norm, self.feed_forward_norm = (nn.RMSNorm(d_model, eps=1e-5) for _ in range(2))
        self.feed_forward = FeedForward(d_model, feed_forward)
        if positions == "learned":
            self.longest = max_length
            self.position = nn.Embedding(max_length, d_model // n_heads)
            self.project_position = nn.Linear(d_model // n_heads, d_model, bias=False)

    def forward(
        self,
        u: Tensor,
        state: AttentionState | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, AttentionState]:
        self.check_input(u, 3)
        layout = layout_of(u, attention_mask, cu_seqlens)
        state = self.attention.fitting_past(state, layout.rows)
        u = _without_padding(u, layout)
        v = self._placed(_normed(self.attention_norm, u), state, layout)
        a, state = self.attention(v, state, attention_mask, cu_seqlens)
        out = a + self.feed_forward(_normed(self.feed_forward_norm, u + a))
        return _without_padding(out, layout), state

    def _placed(self, u: Tensor, state: AttentionState, layout: Layout) -> Tensor:
        if self.positions == "rotary":
            return u
        position = _positions(u, state.seen, layout)
        if state.real.shape[1] + u.shape[1] > self.max_length:
            self._check_room(position, state.real.shape[1] + u.shape[1])
        try:
            return u + self.project_position(self.position(position))  # type: ignore[no-any-return]
        except IndexError as error:  # a state that counts more tokens than it holds
            raise ValueError(f"state has seen more tokens than the {self.max_length} learned positions") from error

    def _check_room(self, position: Tensor, places: int) -> None:
        """More places than positions, padding included: values decide, where they can be read."""
        reached = places if torch.compiler.is_compiling() else int(position.max()) + 1
        if reached > self.max_length:
            raise ValueError(
                f"learned positions end at max_length {self.max_length}, but the sequence has {reached} tokens; "
                "use a larger max_length or positions='rotary'"
            )

    def step(self, u: Tensor, state: AttentionState) -> tuple[Tensor, AttentionState]:
        self.check_input(u, 2)
        out, state = self.forward(u.unsqueeze(1), state)
        return out.squeeze(1), state

    def init_state(self, batch: int) -> AttentionState:
        return self.attention.init_state(batch)

    @property
    def state_size(self) -> None:
        return None


def _normed(norm: nn.RMSNorm, u: Tensor) -> Tensor:
    return norm(u.to(norm.weight.dtype))  # type: ignore[no-any-return]


def _positions(u: Tensor, seen: Tensor, layout: Layout) -> Tensor:
    """(b, l): how many real tokens of its own sequence stand before each token; padding gets any position."""
    if isinstance(layout, PackedLayout):
        return (seen - layout.starts)[layout.sequence].add(layout.place).unsqueeze(0)
    real = layout.mask if isinstance(layout, PaddedLayout) else u.new_ones(u.shape[:2], dtype=torch.bool)
    return (seen.unsqueeze(1) + real.cumsum(1) - 1).clamp_min(0)


def _without_padding(u: Tensor, layout: Layout) -> Tensor:
    """Selected, not multiplied: whatever stands in the padding, NaN included, goes no further."""
    return torch.where(layout.mask.unsqueeze(-1), u, u.new_zeros(())) if isinstance(layout, PaddedLayout) else u
