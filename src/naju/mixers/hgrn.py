"""HGRN: an elementwise recurrence in which what is kept and what is written sum to one.

| here     | HGRN                                        | shape     |
| -------- | ------------------------------------------- | --------- |
| h        | SiLU(W_i u), the candidate                  | (b, l, d) |
| f        | lower_bound + (1 - lower_bound) σ(W_f u)    | (b, l, d) |
| z        | W_g u, the output gate                      | (b, l, d) |
| x        | f_t x_{t-1} + (1 - f_t) h_t                 | (b, d)    |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from naju.layers.elementwise_scan import elementwise_scan, elementwise_step
from naju.layers.layout import layout_of
from naju.mixers.base import Mixer
from naju.mixers.state import State
from naju.scan.dispatch import state_dtype


@dataclass(frozen=True)
class HGRNState(State):
    """One number a channel."""

    x: Tensor  # (b, d), float32 or float64


torch.export.register_dataclass(HGRNState, serialized_type_name="naju.HGRNState")


class HGRNMixer(Mixer):
    """The first HGRN, with real numbers and without a short convolution: four square matrices and a gated norm.

    The original learns its lower bounds for all layers together, rising with depth from 0. A mixer knows one layer, so
    here the bound is a constant of it; 0, the original's bound in its first layer, is the default. At d_model 128 and
    four layers a classifier with 91 tokens, 16 classes and a linear head has 0.28M parameters; the paper's 0.29M is
    met with its head of one hidden layer, 16,512 more.
    """

    state_kind = HGRNState

    def __init__(self, d_model: int, *, expand: float = 1, lower_bound: float = 0.0) -> None:
        super().__init__()
        if not 0 <= lower_bound < 1:
            raise ValueError(f"lower_bound must lie in [0, 1), but is {lower_bound}")
        self.d_model, self.d_inner = d_model, round(expand * d_model)
        if min(d_model, self.d_inner) < 1:
            raise ValueError(f"d_model and expand must give at least one channel, but are {d_model} and {expand}")
        self.lower_bound = lower_bound
        self.project_in = nn.Linear(d_model, 3 * self.d_inner, bias=False)
        self.norm = nn.RMSNorm(self.d_inner, eps=1e-5)
        self.project_out = nn.Linear(self.d_inner, d_model, bias=False)

    def forward(
        self,
        u: Tensor,
        state: HGRNState | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, HGRNState]:
        self.check_input(u, 3)
        layout = layout_of(u, attention_mask, cu_seqlens)
        state = self.fitting(state, layout.rows, x=(self.d_inner,))
        h, f_logit, z = self._drive(layout.arrange(u))
        f_logit, i_logit = layout.hold(f_logit, -f_logit)
        y, x = elementwise_scan(h, f_logit, i_logit, initial_state=state.x, cu_seqlens=cu_seqlens)
        return layout.restore(self._read(y, z)), HGRNState(x)

    def step(self, u: Tensor, state: HGRNState) -> tuple[Tensor, HGRNState]:
        self.check_input(u, 2)
        state = self.fitting(state, u.shape[0], x=(self.d_inner,))
        h, f_logit, z = self._drive(u)
        y, x = elementwise_step(state.x, h, f_logit, -f_logit)
        return self._read(y, z), HGRNState(x)

    def _drive(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h, the logit of f in float32 or better, and z.

        The bounded gate has a logit too: f / (1 - f) = e^a + (1 + e^a) lower_bound / (1 - lower_bound), a = W_f u.
        """
        h, f_logit, z = self.project_in(u).chunk(3, dim=-1)  # (b, l, d) each
        f_logit = f_logit.to(state_dtype(f_logit.dtype))
        if self.lower_bound > 0:
            odds = math.log(self.lower_bound) - math.log1p(-self.lower_bound)
            f_logit = torch.logaddexp(f_logit, F.softplus(f_logit) + odds)
        return F.silu(h), f_logit, z

    def _read(self, y: Tensor, z: Tensor) -> Tensor:
        return self.project_out(self.norm(y.to(self.norm.weight.dtype)) * F.silu(z))  # type: ignore[no-any-return]

    def init_state(self, batch: int) -> HGRNState:
        weight = self.project_in.weight
        return HGRNState(weight.new_zeros(batch, self.d_inner, dtype=state_dtype(weight.dtype)))

    @property
    def state_size(self) -> int:
        return self.d_inner
