"""Mamba-2: a matrix memory with one decay a head, whose step size the token chooses."""

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
from naju.mixers.matrix import MatrixMixer
from naju.mixers.state import State
from naju.scan.dispatch import state_dtype


@dataclass(frozen=True)
class Mamba2State(State):
    """The memory of a Mamba-2 mixer and what its short convolution still has to see."""

    x: Tensor  # (b, heads, n, d_head), float32 or float64
    tail: Tensor  # (b, d_conv - 1, d + 2n)


torch.export.register_dataclass(Mamba2State, serialized_type_name="naju.Mamba2State")


class Mamba2Mixer(MatrixMixer):
    """`x_t = exp(-A dt_t) x_{t-1} + dt_t B_t h_t^T`, `y_t = x_t^T C_t + D h_t`, with A and D one number a head.

    h, B and C come out of one short convolution, all heads share B and C, and the reading, modulated by silu(z), passes
    an RMS norm over all channels. The memory holds expand * d_model * d_state = 256 × 64 = 16,384 numbers at d_model
    128, where a layer has 117,388 parameters. A layer narrower than `d_head` has one head.
    """

    state_kind = Mamba2State

    def __init__(
        self, d_model: int, *, d_state: int = 64, expand: float = 2, d_head: int = 64, d_conv: int = 4
    ) -> None:
        super().__init__()
        self.d_model, self.d_inner, self.d_key = d_model, round(expand * d_model), d_state
        self.d_value = min(d_head, self.d_inner)
        if min(d_state, d_head, d_conv, self.d_inner) < 1 or self.d_inner % self.d_value != 0:
            raise ValueError(
                f"expand * d_model must be a positive multiple of d_head, and d_state and d_conv positive, "
                f"but they are {self.d_inner}, {d_head}, {d_state} and {d_conv}"
            )
        self.n_heads = self.d_inner // self.d_value
        self.widths = (self.d_inner, self.d_inner + 2 * d_state, self.n_heads)
        self.tail_shape = (d_conv - 1, self.d_inner + 2 * d_state)
        self.project_in = nn.Linear(d_model, sum(self.widths), bias=False)
        self.conv = DepthwiseConv(self.d_inner + 2 * d_state, d_conv, bias=True)
        self.dt_bias = nn.Parameter(_inverse_softplus(torch.empty(self.n_heads).uniform_(*map(math.log, (1e-3, 0.1)))))
        self.A_log = nn.Parameter(torch.empty(self.n_heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(self.n_heads))
        self.norm = HeadNorm(self.d_inner)
        self.project_out = nn.Linear(self.d_inner, d_model, bias=False)

    def forward(
        self,
        u: Tensor,
        state: Mamba2State | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Mamba2State]:
        self.check_input(u, 3)
        layout = layout_of(u, attention_mask, cu_seqlens)
        memory = (self.n_heads, self.d_key, self.d_value)
        state = self.fitting(state, layout.rows, x=memory, tail=self.tail_shape)
        z, u_tilde, dt = self.project_in(layout.arrange(u)).split(self.widths, dim=-1)
        (hBC,) = convolve(u_tilde, state.tail, layout, [self.conv.weight], [self.conv.bias], silu=True)
        h, B, C = hBC.split((self.d_inner, self.d_key, self.d_key), dim=-1)
        dtype = state_dtype(h.dtype)
        dt = F.softplus(dt.to(dtype) + self.dt_bias).unsqueeze(-1)  # (b, l, heads, 1)
        h = self.split_heads(h)
        log_decay, B = held(layout, -dt * self.A_log.to(dtype).exp().unsqueeze(-1), B.unsqueeze(2))
        y, x = matrix_scan(C.unsqueeze(2), B, (dt * h).to(h.dtype), log_decay, state.x, cu_seqlens=cu_seqlens)
        y = (y + self.D.to(dtype).unsqueeze(-1) * h).flatten(-2) * F.silu(z)
        out = self.project_out(self.norm(y).to(h.dtype))
        return layout.restore(out), Mamba2State(x, layout.last(u_tilde, state.tail))

    def init_state(self, batch: int) -> Mamba2State:
        return Mamba2State(self.empty_memory(batch), self.project_out.weight.new_zeros(batch, *self.tail_shape))


def _inverse_softplus(log_dt: Tensor) -> Tensor:
    """The bias that makes softplus give dt, for the logarithm of dt."""
    dt = log_dt.exp()
    return dt + torch.log(-torch.expm1(-dt))
