"""One decoding step of a Naju layer by the compiled kernels: float32 on a CPU, one call instead of fifty operations.

It has no backward, and exported or compiled programs do without it: their step is made of torch's operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from naju.scan.cpu_compiled.native import StepProblem, call, missing_here
from naju.scan.dispatch import other_transform
from naju.scan.operator import refusing_tangents
from naju.scan.step_inputs import StepInputs

GATES = ("W_f", "f_taps", "f_bias", "W_i", "i_taps", "i_bias")


@torch.library.custom_op("naju::cpu_step", mutates_args=(), device_types="cpu")
@refusing_tangents
def cpu_step(
    uz: Tensor,
    x: Tensor,
    u_tail: Tensor,
    h_tail: Tensor,
    conv_taps: Tensor,
    conv_bias: Tensor,
    gate_weights: list[Tensor],
    gate_taps: list[Tensor],
    gate_biases: list[Tensor],
    W_BC: Tensor,
    D: Tensor,
    alpha: float,
    gate_scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y and the next x, u_tail and h_tail; the arguments are the fields of `StepInputs`."""
    gates = gate_weights, gate_taps, gate_biases
    inputs = StepInputs(uz, x, u_tail, h_tail, conv_taps, conv_bias, *gates, W_BC, D, alpha, gate_scale)
    (batch, d_inner, d_state), width = x.shape, conv_taps.shape[1]
    h, y = uz.new_empty(batch, d_inner), uz.new_empty(batch, d_inner)
    products = uz.new_empty(batch, len(gate_weights) * d_inner + 2 * d_state)
    after = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (x, u_tail, h_tail)]
    next_x, next_u_tail, next_h_tail = after
    call(
        "naju_step",
        StepProblem(batch=batch, d_inner=d_inner, d_state=d_state, width=width, alpha=alpha, gate_scale=gate_scale),
        {"uz": uz, "x": x, "u_tail": u_tail, "h_tail": h_tail, "conv_taps": conv_taps, "conv_bias": conv_bias}
        | dict(zip(GATES, inputs.gates(), strict=True))
        | {"W_BC": W_BC, "D": D, "h": h, "products": products, "y": y}
        | {"next_x": next_x, "next_u_tail": next_u_tail, "next_h_tail": next_h_tail},
    )
    return y, next_x, next_u_tail, next_h_tail


@cpu_step.register_fake
def _(uz, x, u_tail, h_tail, *rest):  # type: ignore[no-untyped-def]
    return uz.new_empty(x.shape[:2]), *(tensor.new_empty(tensor.shape) for tensor in (x, u_tail, h_tail))


def cpu_step_refuses(inputs: StepInputs) -> str | None:
    """None where the kernel can run this step, or the reason why not as the end of a sentence."""
    tensors = inputs.tensors()
    if any(tensor.device.type != "cpu" or tensor.dtype != torch.float32 for tensor in tensors):
        return "not all of it is float32 on the CPU"
    if torch.compiler.is_compiling():
        return "a program is being made of this step"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is active and it computes in float32"
    return missing_here() or inputs.needs_gradient() or other_transform(tensors)
