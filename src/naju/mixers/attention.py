"""Causal softmax attention with rotary positions: the mixer whose memory is the whole past."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from naju.layers.layout import PackedLayout, layout_of
from naju.layers.rotary import rotate
from naju.mixers.base import Mixer
from naju.mixers.state import State


@dataclass(frozen=True)
class AttentionState(State):
    """Keys and values of every token so far, which of them are real, and how many real ones each sequence has seen."""

    keys: Tensor  # (b, heads, past, c)
    values: Tensor  # (b, heads, past, c)
    real: Tensor  # (b, past), bool
    seen: Tensor  # (b,), int64


torch.export.register_dataclass(AttentionState, serialized_type_name="naju.AttentionState")


class AttentionMixer(Mixer):
    """Multi-head attention; positions count real tokens, so padding does not shift them.

    With `rotary=False` it sees an unordered past, unless its input says where it stands.
    """

    state_kind = AttentionState

    def __init__(self, d_model: int, *, n_heads: int = 4, rotary: bool = True) -> None:
        super().__init__()
        if n_heads < 1 or d_model % (2 * n_heads) != 0:
            raise ValueError(f"d_model must be a multiple of 2 * n_heads = {2 * n_heads}, but is {d_model}")
        self.d_model, self.n_heads, self.rotary = d_model, n_heads, rotary
        self.project_in = nn.Linear(d_model, 3 * d_model, bias=False)
        self.project_out = nn.Linear(d_model, d_model, bias=False)

    def forward(
        self,
        u: Tensor,
        state: AttentionState | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, AttentionState]:
        self.check_input(u, 3)
        layout = layout_of(u, attention_mask, cu_seqlens)
        state = self.fitting_past(state, layout.rows)
        if isinstance(layout, PackedLayout):
            return self._one_by_one(u, state, layout)
        return self._attend(u, state, attention_mask)

    def _attend(self, u: Tensor, state: AttentionState, attention_mask: Tensor | None) -> tuple[Tensor, AttentionState]:
        real = torch.ones(u.shape[:2], dtype=torch.bool, device=u.device)
        real = real if attention_mask is None else attention_mask.bool()
        u = torch.where(real.unsqueeze(-1), u, u.new_zeros(()))
        position = state.seen.unsqueeze(1) + real.cumsum(1) - 1
        query, key, value = self.project_in(u).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        if self.rotary:
            query, key = rotate(query, position), rotate(key, position)
        state = AttentionState(
            torch.cat([state.keys.to(key.dtype), key], dim=2),
            torch.cat([state.values.to(value.dtype), value], dim=2),
            torch.cat([state.real, real], dim=1),
            state.seen + real.sum(1),
        )
        begins = attention_mask is None and bool(state.real.shape[1] == u.shape[1])
        visible = None if begins else _visible(state.real, real)  # torch's fastest kernels take no mask
        mixed = F.scaled_dot_product_attention(query, state.keys, state.values, attn_mask=visible, is_causal=begins)
        out = self.project_out(mixed.transpose(1, 2).flatten(-2))
        return torch.where(real.unsqueeze(-1), out, out.new_zeros(())), state

    def _one_by_one(self, u: Tensor, state: AttentionState, layout: PackedLayout) -> tuple[Tensor, AttentionState]:
        """Packed sequences each see themselves only; their caches are padded on the left to one length."""
        pieces = [u[:, left:right] for left, right in zip(layout.starts.tolist(), layout.ends.tolist(), strict=True)]
        done = [self._attend(piece, state[row], None) for row, piece in enumerate(pieces)]
        longest = max(kept.real.shape[1] for _, kept in done)
        padded = [kept.map(lambda t: _pad_past(t, longest)) for _, kept in done]
        joined = AttentionState(
            *(torch.cat(parts) for parts in zip(*(p.tensors().values() for p in padded), strict=True))
        )
        return torch.cat([out for out, _ in done], dim=1), joined

    def step(self, u: Tensor, state: AttentionState) -> tuple[Tensor, AttentionState]:
        self.check_input(u, 2)
        out, state = self.forward(u.unsqueeze(1), state)
        return out.squeeze(1), state

    def init_state(self, batch: int) -> AttentionState:
        weight = self.project_in.weight
        empty = weight.new_zeros(batch, self.n_heads, 0, self.d_model // self.n_heads)
        real = torch.zeros(batch, 0, dtype=torch.bool, device=weight.device)
        return AttentionState(empty, empty.clone(), real, torch.zeros(batch, dtype=torch.int64, device=weight.device))

    def fitting_past(self, state: AttentionState | None, rows: int) -> AttentionState:
        """Tensors of one past, however long it is."""
        state = self.state_for(state, rows)
        past = state.keys.shape[-2] if state.keys.dim() == 4 else 0
        cache = (self.n_heads, past, self.d_model // self.n_heads)
        fitting: AttentionState = self.fitting(state, rows, keys=cache, values=cache, real=(past,), seen=())
        return fitting

    @property
    def state_size(self) -> None:
        return None


def _visible(past: Tensor, real: Tensor) -> Tensor:
    """(b, 1, queries, keys): real keys up to the query itself; a padded query sees itself, so that no row is empty."""
    queries, keys = real.shape[1], past.shape[1]
    place = torch.arange(keys, device=past.device)
    own = place[keys - queries :].unsqueeze(1)
    return ((place <= own) & past.unsqueeze(1) | (place == own)).unsqueeze(1)


def _pad_past(tensor: Tensor, length: int) -> Tensor:
    if tensor.dim() == 1:
        return tensor
    axis = 2 if tensor.dim() == 4 else 1
    shape = list(tensor.shape)
    shape[axis] = length - shape[axis]
    return torch.cat([tensor.new_zeros(shape), tensor], dim=axis)
