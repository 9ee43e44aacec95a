"""RWKV-6 time mixing: a matrix memory that forgets by key channel, fed by mixtures of a token and the one before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from naju.layers.head_norm import HeadNorm
from naju.layers.layout import layout_of
from naju.layers.matrix_scan import held, matrix_scan
from naju.mixers.matrix import MatrixMixer, divided
from naju.mixers.state import State
from naju.scan.dispatch import state_dtype


@dataclass(frozen=True)
class RWKVState(State):
    """The memory of an RWKV mixer and the token before the next one."""

    x: Tensor  # (b, heads, key, value), float32 or float64
    tail: Tensor  # (b, 1, m)


torch.export.register_dataclass(RWKVState, serialized_type_name="naju.RWKVState")


class TokenShift(nn.Module):
    """Five inputs `u + mix_j * (u_before - u)` whose mixing weights depend on both tokens, through a low rank."""

    INPUTS = 5

    def __init__(self, d_model: int, rank: int) -> None:
        super().__init__()
        ramp = torch.linspace(0, 1, d_model)
        self.first_mix = nn.Parameter(1 - ramp)
        self.mix = nn.Parameter((1 - ramp).repeat(self.INPUTS, 1))
        self.reduce = nn.Linear(d_model, self.INPUTS * rank, bias=False)
        self.expand = nn.Parameter(torch.empty(self.INPUTS, rank, d_model).uniform_(-0.01, 0.01))
        nn.init.zeros_(self.reduce.weight)

    def forward(self, u: Tensor, before: Tensor) -> tuple[Tensor, ...]:
        change = before - u
        low = torch.tanh(self.reduce(u + change * self.first_mix)).unflatten(-1, (self.INPUTS, -1))
        mixes = torch.einsum("blnr,nrm->blnm", low, self.expand.to(low.dtype)) + self.mix
        return (u.unsqueeze(-2) + change.unsqueeze(-2) * mixes).to(u.dtype).unbind(-2)


class RWKVMixer(MatrixMixer):
    """`decay_t = exp(-exp(w_t))` for each key channel; a token reads itself through a bonus; group norm, swish gate.

    Keys are half as wide as the model and values as wide, as in the suite (in RWKV itself both are as wide), so four
    heads at d_model 128 hold 4 × 16 × 32 = 2,048 numbers, and a layer has 119,936 parameters. The decays start between
    w = -6, a memory of 400 tokens, and -1, one of three, over the channels; RWKV's own start also changes with the
    layer's depth, which a mixer does not know. Channel mixing is left out, as the suite's parameter count shows.
    """

    state_kind = RWKVState

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 4,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        shift_rank: int = 32,
        decay_rank: int = 64,
    ) -> None:
        super().__init__()
        self.d_model, self.n_heads = d_model, n_heads
        self.d_key = divided("expand_k * d_model", expand_k * d_model, n_heads)
        self.d_value = divided("expand_v * d_model", expand_v * d_model, n_heads)
        keys, values = n_heads * self.d_key, n_heads * self.d_value
        self.shift = TokenShift(d_model, shift_rank)
        self.project_q, self.project_k = (nn.Linear(d_model, keys, bias=False) for _ in range(2))
        self.project_v, self.project_gate = (nn.Linear(d_model, values, bias=False) for _ in range(2))
        self.decay = nn.Sequential(
            nn.Linear(d_model, decay_rank, bias=False), nn.Tanh(), nn.Linear(decay_rank, keys, bias=False)
        )
        self.decay_bias = nn.Parameter(torch.linspace(-6, -1, keys))
        self.bonus = nn.Parameter(torch.full((n_heads, self.d_key), 0.5))
        self.norm = HeadNorm(n_heads, self.d_value, center=True, bias=True, eps=64e-5)  # RWKV's own
        self.project_out = nn.Linear(values, d_model, bias=False)

    def forward(
        self,
        u: Tensor,
        state: RWKVState | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, RWKVState]:
        self.check_input(u, 3)
        layout = layout_of(u, attention_mask, cu_seqlens)
        memory = (self.n_heads, self.d_key, self.d_value)
        state = self.fitting(state, layout.rows, x=memory, tail=(1, self.d_model))
        u = layout.arrange(u)
        before, _ = layout.past(u, state.tail)
        for_q, for_decay, for_k, for_v, for_gate = self.shift(u, before)
        q, k = self.split_heads(self.project_q(for_q)), self.split_heads(self.project_k(for_k))
        v = self.split_heads(self.project_v(for_v))
        w = self.decay(for_decay)
        log_decay = self.split_heads(-torch.exp(w.to(state_dtype(w.dtype)) + self.decay_bias))
        log_decay, k = held(layout, log_decay, k)
        o, x = matrix_scan(q, k, v, log_decay, state.x, bonus=self.bonus, cu_seqlens=cu_seqlens)
        out = self.gated_output(o, self.project_gate(for_gate))
        return layout.restore(out), RWKVState(x, layout.last(u, state.tail))

    def init_state(self, batch: int) -> RWKVState:
        return RWKVState(self.empty_memory(batch), self.project_out.weight.new_zeros(batch, 1, self.d_model))
