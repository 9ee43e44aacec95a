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

SMALL_START = 0.01  # the largest entry of the maps that widen a low rank


@dataclass(frozen=True)
class RWKVState(State):
    """The memory of an RWKV mixer and the token before the next one."""

    x: Tensor  # (b, heads, key, value), float32 or float64
    tail: Tensor  # (b, 1, m)


torch.export.register_dataclass(RWKVState, serialized_type_name="naju.RWKVState")


class TokenShift(nn.Module):
    """Inputs `u + mix_j * (u_before - u)` of queries, decays, keys, values and gates; the mixing weights depend on both
    tokens, through a low rank."""

    EXPONENTS = (0.5, 1.0, 1.0, 1.0, 0.5)  # how much of the token before each of the five takes at first
    INPUTS = len(EXPONENTS)

    def __init__(self, d_model: int, rank: int) -> None:
        super().__init__()
        ramp = torch.arange(d_model) / d_model
        self.first_mix = nn.Parameter(1 - ramp)
        self.mix = nn.Parameter(torch.stack([1 - ramp**exponent for exponent in self.EXPONENTS]))
        self.reduce = nn.Linear(d_model, self.INPUTS * rank, bias=False)
        self.expand = nn.Parameter(torch.empty(self.INPUTS, rank, d_model).uniform_(-SMALL_START, SMALL_START))
        nn.init.zeros_(self.reduce.weight)

    def forward(self, u: Tensor, before: Tensor) -> tuple[Tensor, ...]:
        change = before - u
        low = torch.tanh(self.reduce(u + change * self.first_mix)).unflatten(-1, (self.INPUTS, -1))
        mixes = torch.einsum("blnr,nrm->blnm", low, self.expand.to(low.dtype)) + self.mix
        return (u.unsqueeze(-2) + change.unsqueeze(-2) * mixes).to(u.dtype).unbind(-2)


class RWKVMixer(MatrixMixer):
    """`decay_t = exp(-exp(w_t))` for each key channel; a token reads itself through a bonus; group norm, swish gate.

    Keys are half as wide as the model and values as wide, as in the suite (in RWKV itself both are as wide), so four
    heads at d_model 128 hold 4 × 16 × 32 = 2,048 numbers, and a layer has 119,936 parameters. Channel mixing is left
    out, as the suite's parameter count shows.

    RWKV's own start changes with the layer's depth, which a mixer does not know: here every layer starts as RWKV's
    first, its linear maps as torch's. The decays then lie between w = -6, a memory of 400 tokens, and -1, one of three,
    over the channels, and do not depend on the token.
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
        if min(shift_rank, decay_rank) < 1:
            raise ValueError(f"shift_rank and decay_rank must be positive, but are {shift_rank} and {decay_rank}")
        self.d_model, self.n_heads = d_model, n_heads
        self.d_key = divided("expand_k * d_model", expand_k * d_model, n_heads)
        self.d_value = divided("expand_v * d_model", expand_v * d_model, n_heads)
        keys, values = n_heads * self.d_key, n_heads * self.d_value
        self.shift = TokenShift(d_model, shift_rank)
        self.project_q, self.project_k = (nn.Linear(d_model, keys, bias=False) for _ in range(2))
        self.project_v, self.project_gate = (nn.Linear(d_model, values, bias=False) for _ in range(2))
        reduce, widen = nn.Linear(d_model, decay_rank, bias=False), nn.Linear(decay_rank, keys, bias=False)
        nn.init.zeros_(reduce.weight)
        nn.init.uniform_(widen.weight, -SMALL_START, SMALL_START)
        self.decay = nn.Sequential(reduce, nn.Tanh(), widen)
        self.decay_bias = nn.Parameter(-6 + 5 * torch.linspace(0, 1, keys) ** 0.7)
        self.bonus = nn.Parameter(0.1 * ((torch.arange(keys) + 1) % 3 - 1.0).view(n_heads, self.d_key))
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
