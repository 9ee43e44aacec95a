"""Gated linear attention: a matrix memory that forgets by key channel, as much as the token says."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from naju.layers.causal_conv import DepthwiseConv, convolve
from naju.layers.head_norm import HeadNorm
from naju.layers.layout import layout_of
from naju.layers.matrix_scan import held, matrix_scan
from naju.mixers.matrix import MatrixMixer, divided
from naju.mixers.state import State
from naju.scan.dispatch import state_dtype


@dataclass(frozen=True)
class GLAState(State):
    """The memory of a GLA mixer, and what its short convolution, if it has one, still has to see."""

    x: Tensor  # (b, heads, key, value), float32 or float64
    tail: Tensor  # (b, d_conv - 1 or 0, queries, keys and values)


torch.export.register_dataclass(GLAState, serialized_type_name="naju.GLAState")


class GLAMixer(MatrixMixer):
    """`decay_t = sigmoid(W u_t)^(1/16)` for each key channel, W of rank 16; RMS norm and a swish gate on each head.

    Keys are half and values as wide as the model, so four heads at d_model 128 hold 4 × 16 × 32 = 2,048 numbers, and a
    layer has 68,704 parameters. The norm's weight is shared by the heads.

    The published layer sees one token at a time. With `d_conv`, usually 4, queries, keys and values go through a causal
    convolution of that width and SiLU, an option of fla's layer too (there without a bias): what stands on neighbouring
    tokens can then be bound in one layer.
    """

    state_kind = GLAState

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 4,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        gate_rank: int = 16,
        gate_temperature: float = 16.0,
        d_conv: int = 0,
    ) -> None:
        super().__init__()
        self.d_model, self.n_heads, self.gate_temperature = d_model, n_heads, gate_temperature
        self.d_key = divided("expand_k * d_model", expand_k * d_model, n_heads)
        self.d_value = divided("expand_v * d_model", expand_v * d_model, n_heads)
        keys, values = n_heads * self.d_key, n_heads * self.d_value
        self.widths = (keys, keys, values, values)
        if gate_rank < 1 or not 0 < gate_temperature < math.inf:
            raise ValueError(f"gate_rank {gate_rank} and gate_temperature {gate_temperature} must be positive")
        if d_conv < 0:
            raise ValueError(f"d_conv must be positive, or 0 for no convolution, but is {d_conv}")
        self.project_in = nn.Linear(d_model, sum(self.widths), bias=False)
        self.tail_shape = (max(d_conv - 1, 0), 2 * keys + values)
        self.conv = DepthwiseConv(2 * keys + values, d_conv, bias=True) if d_conv else None
        self.forget = nn.Sequential(nn.Linear(d_model, gate_rank, bias=False), nn.Linear(gate_rank, keys))
        self.norm = HeadNorm(self.d_value)
        self.project_out = nn.Linear(values, d_model, bias=False)

    def forward(
        self,
        u: Tensor,
        state: GLAState | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, GLAState]:
        self.check_input(u, 3)
        layout = layout_of(u, attention_mask, cu_seqlens)
        state = self.fitting(state, layout.rows, x=(self.n_heads, self.d_key, self.d_value), tail=self.tail_shape)
        u = layout.arrange(u)
        qkv, gate = self.project_in(u).split((self.tail_shape[1], self.widths[-1]), dim=-1)
        tail = layout.last(qkv, state.tail)
        if self.conv is not None:
            (qkv,) = convolve(qkv, state.tail, layout, [self.conv.weight], [self.conv.bias], silu=True)
        q, k, v = map(self.split_heads, qkv.split(self.widths[:-1], dim=-1))
        logit = self.forget(u)
        log_decay = self.split_heads(F.logsigmoid(logit.to(state_dtype(logit.dtype))) / self.gate_temperature)
        log_decay, k = held(layout, log_decay, k)
        o, x = matrix_scan(q * self.d_key**-0.5, k, v, log_decay, state.x, cu_seqlens=cu_seqlens)
        return layout.restore(self.gated_output(o, gate)), GLAState(x, tail)

    def init_state(self, batch: int) -> GLAState:
        tail = self.project_out.weight.new_zeros(batch, *self.tail_shape)
        return GLAState(self.empty_memory(batch), tail)
