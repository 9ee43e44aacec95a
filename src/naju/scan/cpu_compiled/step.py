"""One decoding step of a Naju layer by the compiled kernels: float32 on a CPU, one call instead of fifty operations.

It has no backward, and exported or compiled programs do without it: their step is made of torch's operations.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from naju.scan.cpu_compiled.native import StepProblem, call, missing_here
from naju.scan.dispatch import other_transform
from naju.scan.step_operator import StepInputs, StepResult, define_step


def _step(inputs: StepInputs) -> StepResult:
    (batch, d_inner, d_state), width = inputs.x.shape, inputs.conv_taps.shape[1]
    result = inputs.empty_result()
    plain = ("uz", "x", "u_tail", "h_tail", "conv_taps", "conv_bias", "W_BC", "D")
    gates = zip(("W_f", "f_taps", "f_bias", "W_i", "i_taps", "i_bias"), inputs.gates(), strict=True)
    products = inputs.uz.new_empty(batch, len(inputs.gate_weights) * d_inner + 2 * d_state)
    call(
        "naju_step",
        StepProblem(
            batch=batch,
            d_inner=d_inner,
            d_state=d_state,
            width=width,
            alpha=inputs.alpha,
            gate_scale=inputs.gate_scale,
        ),
        {name: getattr(inputs, name) for name in plain}
        | dict(gates)
        | {"h": inputs.uz.new_empty(batch, d_inner), "products": products}
        | dict(zip(("y", "next_x", "next_u_tail", "next_h_tail"), result, strict=True)),
    )
    return result


cpu_step = define_step("cpu_step", "cpu", _step)


def cpu_step_refuses(inputs: StepInputs) -> str | None:
    """None where the kernel can run this step, or the reason why not as the end of a sentence."""
    tensors = inputs.tensors()
    if any(tensor.device.type != "cpu" or tensor.dtype != torch.float32 for tensor in tensors):
        return "not all of it is float32 on the CPU"
    if any(type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided for tensor in tensors):
        return "not all of it is plain tensors, and it reads them by their addresses"
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return "a program is being made of this step"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is active and it computes in float32"
    return missing_here() or inputs.misfit() or inputs.needs_gradient() or other_transform()
