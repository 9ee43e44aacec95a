"""A decoding step as the kernels see it, and how one of them becomes a torch operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from naju.scan.operator import refusing_tangents

# y (b, d) and the next x, u_tail and h_tail
StepResult = tuple[Tensor, Tensor, Tensor, Tensor]
StepKernel = Callable[..., StepResult]  # takes the fields of StepInputs


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

    def empty_result(self) -> StepResult:
        """Memory for y and the next state; tails come out in the precision of uz, whatever they came in."""
        uz, x = self.uz, self.x
        tails = uz.new_empty(self.u_tail.shape), uz.new_empty(self.h_tail.shape)
        return uz.new_empty(x.shape[:2]), x.new_empty(x.shape), *tails

    def misfit(self) -> str | None:
        """The reason against every kernel: they read by address, which no other size may have."""
        (batch, d, n), kept = self.x.shape, self.u_tail.shape[1]
        fits = self.uz.shape == (batch, 2 * d) and self.W_BC.shape == (2 * n, d) and self.D.shape == (d,)
        fits = fits and self.u_tail.shape == self.h_tail.shape == (batch, kept, d)
        fits = fits and all(weight.shape == (d, d) for weight in self.gate_weights)
        fits = fits and all(taps.shape == (d, kept + 1) for taps in (self.conv_taps, *self.gate_taps))
        fits = fits and all(bias.shape == (d,) for bias in (self.conv_bias, *self.gate_biases))
        return None if fits else "its parts do not have the sizes that go with the state"

    def needs_gradient(self) -> str | None:
        """The reason against every kernel: none of them has a backward."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors()):
            return "a gradient is asked for and it has no backward"
        return None


_SCHEMA = (
    "(Tensor uz, Tensor x, Tensor u_tail, Tensor h_tail, Tensor conv_taps, Tensor conv_bias, Tensor[] gate_weights, "
    "Tensor[] gate_taps, Tensor[] gate_biases, Tensor W_BC, Tensor D, float alpha, float gate_scale) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def define_step(name: str, device_types: str | tuple[str, ...], run: Callable[[StepInputs], StepResult]) -> StepKernel:
    """Register `naju::name`, a step without a backward."""

    def kernel(*fields: Any) -> StepResult:
        return run(StepInputs(*fields))

    step = torch.library.custom_op(
        f"naju::{name}", refusing_tangents(kernel), mutates_args=(), device_types=device_types, schema=_SCHEMA
    )
    step.register_fake(lambda *fields: StepInputs(*fields).empty_result())
    return step
