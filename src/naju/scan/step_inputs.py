"""What the kernels of a decoding step read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class StepInputs(NamedTuple):
    """What a step reads between the two outer projections. Gates are forget and write, or one g: f_logit = -g_logit."""

    uz: Tensor  # (b, 2d): u_tilde and z
    x: Tensor  # (b, d, n), float32
    u_tail: Tensor  # (b, d_conv - 1, d)
    h_tail: Tensor  # (b, d_conv - 1, d)
    conv_taps: Tensor  # (d, d_conv)
    conv_bias: Tensor  # (d,)
    gate_weights: list[Tensor]  # (d, d) each
    gate_taps: list[Tensor]  # (d, d_conv) each
    gate_biases: list[Tensor]  # (d,) each
    W_BC: Tensor  # (2n, d)
    D: Tensor  # (d,)
    alpha: float
    gate_scale: float

    def tensors(self) -> list[Tensor]:
        single = [value for value in self if isinstance(value, Tensor)]
        return [*single, *self.gate_weights, *self.gate_taps, *self.gate_biases]

    def gates(self) -> list[Tensor | None]:
        """Weight, taps and bias of the forget gate, which may be absent, and of the write gate."""
        triples = zip(self.gate_weights, self.gate_taps, self.gate_biases, strict=True)
        flat: list[Tensor | None] = [tensor for triple in triples for tensor in triple]
        return [None] * (6 - len(flat)) + flat

    def needs_gradient(self) -> str | None:
        """The reason against every kernel of a step."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors()):
            return "a gradient is asked for and it has no backward"
        return None
