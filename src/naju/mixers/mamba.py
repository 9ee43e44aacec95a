"""Mamba: one step size decides both how much is kept and how much is written.

| here        | Mamba                                   | shape     |
| ----------- | --------------------------------------- | --------- |
| u_tilde, z  | in_proj u                               | (b, l, d) |
| h           | SiLU(conv1d(u_tilde))                   | (b, l, d) |
| dt          | softplus(dt_proj δ + bias), the step Δ  | (b, l, d) |
| B, C        | with δ: x_proj h                        | (b, l, n) |
| A           | -exp(A_log)                             | (d, n)    |
| x           | exp(dt A) x + (dt h) B^T                | (b, d, n) |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from naju.layers.causal_conv import DepthwiseConv, convolve, weighted_sum
from naju.layers.diagonal_scan import check_backend, diagonal_scan, diagonal_step
from naju.layers.layout import layout_of
from naju.mixers.base import Mixer
from naju.mixers.state import State
from naju.scan.dispatch import state_dtype

SMALLEST_STEP, LARGEST_STEP = 1e-3, 1e-1


@dataclass(frozen=True)
class MambaState(State):
    """The memory and what the short convolution still has to see."""

    x: Tensor  # (b, d, n), float32 or float64
    u_tail: Tensor  # (b, d_conv - 1, d)


torch.export.register_dataclass(MambaState, serialized_type_name="naju.MambaState")


class MambaMixer(Mixer):
    """`y = x_t C_t + D h_t`, modulated by silu(z) and projected; step sizes start between 0.001 and 0.1.

    With `dt_rank` at its default, ceil(d_model / 16), four layers at d_model 128 and a state of 16 have 0.47M
    parameters; the paper's 0.55M adds 544 tokens and a head of one hidden layer to them. At d_model 256 they have
    1.75M, and its 1.84M is met with 64 tokens and that head.
    """

    state_kind = MambaState

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 16,
        expand: float = 2,
        d_conv: int = 4,
        dt_rank: int | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.d_model, self.d_inner, self.d_state = d_model, round(expand * d_model), d_state
        self.dt_rank = math.ceil(d_model / 16) if dt_rank is None else dt_rank
        if min(d_model, self.d_inner, d_state, d_conv, self.dt_rank) < 1:
            raise ValueError(
                f"d_model {d_model}, d_state {d_state}, expand {expand}, d_conv {d_conv} and dt_rank {dt_rank} "
                "give no layer: every size must be at least 1"
            )
        self.tail_length, self.backend = d_conv - 1, check_backend(backend)
        self.project_in = nn.Linear(d_model, 2 * self.d_inner, bias=False)
        self.conv = DepthwiseConv(self.d_inner, d_conv, bias=True)
        self.project_dtBC = nn.Linear(self.d_inner, self.dt_rank + 2 * d_state, bias=False)
        self.project_dt = nn.Linear(self.dt_rank, self.d_inner)
        self.A_log = nn.Parameter(torch.arange(1.0, d_state + 1).log().repeat(self.d_inner, 1))
        self.D = nn.Parameter(torch.ones(self.d_inner))
        self.project_out = nn.Linear(self.d_inner, d_model, bias=False)
        self._spread_steps()

    @torch.no_grad()
    def _spread_steps(self) -> None:
        """Step sizes uniform in their logarithm: the bias is what softplus turns into them."""
        bound = self.dt_rank**-0.5
        self.project_dt.weight.uniform_(-bound, bound)
        dt = self.project_dt.bias.uniform_(math.log(SMALLEST_STEP), math.log(LARGEST_STEP)).exp()
        self.project_dt.bias.copy_(dt + torch.log(-torch.expm1(-dt)))

    def forward(
        self,
        u: Tensor,
        state: MambaState | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, MambaState]:
        self.check_input(u, 3)
        layout = layout_of(u, attention_mask, cu_seqlens)
        fresh, state = state is None, self._fitting(state, layout.rows)
        u_tilde, z = self.project_in(layout.arrange(u)).chunk(2, dim=-1)  # (b, l, d) each
        (h,) = convolve(u_tilde, state.u_tail, layout, [self.conv.weight], [self.conv.bias], silu=True)
        dt_logit, B, C = self._select(h)
        _, dt_logit = layout.hold(dt_logit, dt_logit)  # a step of size 0 keeps everything and writes nothing
        y, x = diagonal_scan(
            h,
            F.softplus(dt_logit),
            self._A(),
            B,
            C,
            initial_state=None if fresh else state.x,  # the fused kernel starts from nothing only
            cu_seqlens=cu_seqlens,
            backend=self.backend,
        )
        return layout.restore(self._read(y, h, z)), MambaState(x, layout.last(u_tilde, state.u_tail))

    def step(self, u: Tensor, state: MambaState) -> tuple[Tensor, MambaState]:
        self.check_input(u, 2)
        state = self._fitting(state, u.shape[0])
        u_tilde, z = self.project_in(u).chunk(2, dim=-1)  # (b, d) each
        past = [*state.u_tail.to(u_tilde.dtype).unbind(1), u_tilde]
        h = F.silu(weighted_sum(past, self.conv.weight, self.conv.bias)).to(u_tilde.dtype)
        dt_logit, B, C = self._select(h)
        y, x = diagonal_step(state.x, h, F.softplus(dt_logit), self._A(), B, C)
        return self._read(y, h, z), MambaState(x, torch.stack(past, dim=1)[:, 1:])

    def _select(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The step's logit in float32 or better, B and C."""
        delta, B, C = self.project_dtBC(h).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        dtype = state_dtype(h.dtype)
        return F.linear(delta, self.project_dt.weight).to(dtype) + self.project_dt.bias.to(dtype), B, C

    def _A(self) -> Tensor:  # noqa: N802
        return -torch.exp(self.A_log.to(state_dtype(self.A_log.dtype)))

    def _read(self, y: Tensor, h: Tensor, z: Tensor) -> Tensor:
        y = (y + self.D.to(y.dtype) * h.to(y.dtype)) * F.silu(z.to(y.dtype))
        return self.project_out(y.to(h.dtype))  # type: ignore[no-any-return]

    def init_state(self, batch: int) -> MambaState:
        weight = self.conv.weight  # a quantised projection has none
        x = weight.new_zeros(batch, self.d_inner, self.d_state, dtype=state_dtype(weight.dtype))
        return MambaState(x, weight.new_zeros(batch, self.tail_length, self.d_inner))

    @property
    def state_size(self) -> int:
        return self.d_inner * self.d_state

    def _fitting(self, state: MambaState | None, rows: int) -> MambaState:
        tail = (self.tail_length, self.d_inner)
        fitting: MambaState = self.fitting(state, rows, x=(self.d_inner, self.d_state), u_tail=tail)
        return fitting
