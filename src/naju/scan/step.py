"""Which kernel runs a decoding step."""

from __future__ import annotations

from naju.scan.cpu_compiled.step import cpu_step, cpu_step_refuses
from naju.scan.step_operator import StepInputs, StepKernel
from naju.scan.triton_step import step_refuses, triton_step


def step_kernel(inputs: StepInputs) -> StepKernel | None:
    """The one that can run this step, or None: then torch has to."""
    if step_refuses(inputs) is None:
        return triton_step
    return cpu_step if cpu_step_refuses(inputs) is None else None
