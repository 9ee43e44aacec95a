"""Retention: a matrix memory whose heads forget at fixed rates, with rotary positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from naju.layers.head_norm import HeadNorm
from naju.layers.layout import Layout, PackedLayout, PaddedLayout, layout_of
from naju.layers.matrix_scan import held, matrix_scan
from naju.layers.rotary import rotate
from naju.mixers.matrix import MatrixMixer, divided
from naju.mixers.state import State
from naju.scan.dispatch import state_dtype


@dataclass(frozen=True)
class RetNetState(State):
    """The memory of a RetNet mixer and the number of tokens each sequence has seen."""

    x: Tensor  # (b, heads, key, value), float32 or float64
    seen: Tensor  # (b,), int64


torch.export.register_dataclass(RetNetState, serialized_type_name="naju.RetNetState")


class RetNetMixer(MatrixMixer):
    """Head j keeps `1 - 2^(-5-j)` of its memory a token; RMS norm and a swish gate on each head.

    Queries and keys turn with their position; xPos also scales them by it, which the fixed decays make unnecessary.
    Keys are as wide as the model and values twice as wide, so four heads at d_model 128 hold 4 × 32 × 64 = 8,192
    numbers, and a layer has 131,136 parameters. The norm's weight is shared by the heads.
    """

    state_kind = RetNetState

    def __init__(self, d_model: int, *, n_heads: int = 4, expand_k: float = 1.0, expand_v: float = 2.0) -> None:
        super().__init__()
        self.d_model, self.n_heads = d_model, n_heads
        self.d_key = 2 * divided("expand_k * d_model / 2", expand_k * d_model / 2, n_heads)  # rotary turns pairs
        self.d_value = divided("expand_v * d_model", expand_v * d_model, n_heads)
        keys, values = n_heads * self.d_key, n_heads * self.d_value
        self.widths = (keys, keys, values, values)
        self.project_in = nn.Linear(d_model, sum(self.widths), bias=False)
        self.norm = HeadNorm(self.d_value)
        self.project_out = nn.Linear(values, d_model, bias=False)

    def forward(
        self,
        u: Tensor,
        state: RetNetState | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, RetNetState]:
        self.check_input(u, 3)
        layout = layout_of(u, attention_mask, cu_seqlens)
        state = self.fitting(state, layout.rows, x=(self.n_heads, self.d_key, self.d_value))
        position, seen = _positions(layout, state.seen, u.shape[1])
        *parts, gate = self.project_in(layout.arrange(u)).split(self.widths, dim=-1)
        q, k, v = map(self.split_heads, parts)
        q, k = (rotate(tensor.transpose(1, 2), position).transpose(1, 2) for tensor in (q, k))
        log_decay, k = held(layout, self.log_decay(v), k)
        o, x = matrix_scan(q * self.d_key**-0.5, k, v, log_decay, state.x, cu_seqlens=cu_seqlens)
        return layout.restore(self.gated_output(o, gate)), RetNetState(x, seen)

    def log_decay(self, v: Tensor) -> Tensor:
        """(b, l, heads, 1) for values v; made anew each time, because a half-precision model would round a buffer."""
        head = torch.arange(self.n_heads, device=v.device, dtype=state_dtype(v.dtype))
        return torch.log1p(-torch.exp2(-5 - head)).unsqueeze(-1).expand(*v.shape[:3], 1)

    def init_state(self, batch: int) -> RetNetState:
        seen = torch.zeros(batch, dtype=torch.int64, device=self.project_out.weight.device)
        return RetNetState(self.empty_memory(batch), seen)


def _positions(layout: Layout, seen: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Each token's position (b, l) in its sequence, whose first `seen` tokens came before, and the new count."""
    if isinstance(layout, PackedLayout):
        before = seen - layout.starts
        return (layout.place + before[layout.sequence]).unsqueeze(0), before + layout.ends
    place = torch.arange(length, device=seen.device)
    return seen.unsqueeze(1) + place, seen + (layout.lengths if isinstance(layout, PaddedLayout) else length)
