"""Naju with one gate for both decisions: retention 1 - g and write g, the complementary gate of the paper's bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from naju.layers.gate import Bias, GateLogit
from naju.mixers.naju import NajuMixer


class CoupledMixer(NajuMixer):
    """Everything as in `NajuMixer` except that `f = 1 - g` and `i = g`: what is kept and what is written sum to one.

    `g_bias` = -3 starts it as a layer that holds (f = 0.95) and can still write; see `naju.analysis.gates` for why
    it cannot start where Naju does.
    """

    REFUSED = ("f_bias", "i_bias")

    def __init__(self, d_model: int, *, g_bias: Bias = -3.0, **options: Any) -> None:
        for name in self.REFUSED:
            if name in options:
                raise TypeError(f"the coupled mixer has one gate: give g_bias instead of {name}")
        super().__init__(d_model, i_bias=g_bias, **options)

    def _add_gates(self, width: int, f_bias: Bias, i_bias: Bias, rank: int | None, reparam: bool) -> None:
        self.write = GateLogit(self.d_inner, width, bias=i_bias, rank=rank, reparam=reparam)

    def gates(self) -> tuple[GateLogit, ...]:
        return (self.write,)

    def forget_and_write(self, logits: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        (g_logit,) = logits
        return -g_logit, g_logit
