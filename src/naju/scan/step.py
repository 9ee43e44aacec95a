"""Which kernel runs a decoding step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from naju.scan.cpu_compiled.step import cpu_step, cpu_step_refuses
from naju.scan.step_inputs import StepInputs
from naju.scan.triton_step import step_refuses, triton_step

StepKernel = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


def step_kernel(inputs: StepInputs) -> StepKernel | None:
    """The one that can run this step: y, x, u_tail and h_tail from the fields of the inputs. None: torch has to."""
    if step_refuses(inputs) is None:
        return triton_step
    return cpu_step if cpu_step_refuses(inputs) is None else None
