"""One decoding step of a Naju layer: convolution tails, gates, state update and readout. One or two sequences take one
launch, more take two, of which the second begins beside the first where a GPU can do that.

It has no backward: a step that needs a gradient, like every other that is refused here, is the mixer's own torch code.
Products read the weights rounded to the precision of uz, as autocast would hand them over, and sum in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from naju.scan.on_gpu import gpu_refuses, triton_missing_here
from naju.scan.step_operator import StepInputs, StepResult, define_step


class Block(NamedTuple):
    """A program's share of the batch and of the columns: channels, or rows of a weight."""

    rows: int
    columns: int
    warps: int


MOST_WEIGHTS = 2**31 - 1  # in one matrix, whose places the kernels count in 32 bits
PIECE = 64  # entries of the state that a program works on at a time
MOST_ALONE = 2  # sequences; beyond, a second launch costs less than products that many programs make again
ALONE, TOGETHER, PRODUCTS = Block(1, 8, 16), Block(4, 16, 4), Block(16, 64, 8)
PRODUCTS_TILE = 512  # bytes of each row of a weight that are read at a time


def compiled_for(
    batch: int, d_inner: int, d_state: int, d_conv: int, weight_bytes: int, *, overlaps: bool
) -> dict[str, Any]:
    """Sizes and options that the step is compiled for."""
    block = ALONE if batch <= MOST_ALONE else TOGETHER
    overlaps = overlaps and batch > MOST_ALONE
    return {
        **_sizes(d_inner, d_state, d_conv, tile=1024 // weight_bytes),
        "BLOCK_B": block.rows,
        "BLOCK_D": block.columns,
        "BLOCK_N": min(max(_power_of_two(d_state), 16), PIECE),
        "OVERLAPS": overlaps,
        "launch_pdl": overlaps,
        "num_warps": block.warps,
        "num_stages": 3,
        "enable_fp_fusion": True,
    }


def products_compiled_for(
    d_inner: int, d_state: int, d_conv: int, weight_bytes: int, *, overlaps: bool
) -> dict[str, Any]:
    return {
        **_sizes(d_inner, d_state, d_conv, tile=PRODUCTS_TILE // weight_bytes),
        "BLOCK_B": PRODUCTS.rows,
        "BLOCK_R": PRODUCTS.columns,
        "OVERLAPS": overlaps,
        "num_warps": PRODUCTS.warps,
        "num_stages": 2,
        "enable_fp_fusion": True,
    }


def _sizes(d_inner: int, d_state: int, d_conv: int, tile: int) -> dict[str, int]:
    """`tile` channels of h are made at a time: as many as the loads that should be in flight."""
    tile = min(max(_power_of_two(d_inner), 16), tile)
    return {"D_INNER": d_inner, "D_STATE": d_state, "D_CONV": d_conv, "BLOCK_K": tile}


def _power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()


@functools.cache
def _overlaps(device: torch.device) -> bool:
    """Whether a kernel can begin before the one that it waits for has ended (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def step_into(inputs: StepInputs, x: Tensor, u_tail: Tensor, h_tail: Tensor) -> Tensor:
    """y; the next state goes into the three tensors. This x may be the inputs' own, but not the tails, which all
    programs read."""
    from naju.scan.triton_step.kernels import step_kernel

    uz, (batch, d_inner, d_state) = inputs.uz, inputs.x.shape
    inputs = inputs._replace(uz=uz if uz.stride(1) == 1 else uz.contiguous())
    y = uz.new_empty(batch, d_inner)
    d_conv, overlaps = inputs.conv_taps.shape[1], _overlaps(uz.device)
    sizes = compiled_for(batch, d_inner, d_state, d_conv, inputs.W_BC.itemsize, overlaps=overlaps)
    programs = -(-batch // sizes["BLOCK_B"]) * -(-d_inner // sizes["BLOCK_D"])
    with torch.cuda.device_of(uz):
        step_kernel[(programs,)](
            inputs.uz,
            *(tensor.contiguous() for tensor in inputs[1:6]),
            *_contiguous(inputs.gates()),
            inputs.W_BC.contiguous(),
            inputs.D.contiguous(),
            _products(inputs) if batch > MOST_ALONE else None,  # the last launch before, which OVERLAPS waits for
            y,
            x,
            u_tail,
            h_tail,
            batch=batch,
            uz_batch=inputs.uz.stride(0),
            alpha=inputs.alpha,
            gate_scale=inputs.gate_scale,
            **sizes,
        )
    return y


def _products(inputs: StepInputs) -> Tensor:
    """(b, 2n + d times the number of gates), float32: B, C, and h times the gates' weights, the write gate's first."""
    from naju.scan.triton_step.kernels import products_kernel

    uz, (batch, d_inner, d_state) = inputs.uz, inputs.x.shape
    d_conv, overlaps = inputs.conv_taps.shape[1], _overlaps(uz.device)
    sizes = products_compiled_for(d_inner, d_state, d_conv, inputs.W_BC.itemsize, overlaps=overlaps)
    W_f, _, _, W_i, _, _ = inputs.gates()
    weights = _contiguous([W_f, W_i, inputs.W_BC])
    products = uz.new_empty(batch, sum(len(W) for W in weights if W is not None), dtype=torch.float32)
    longest = max(d_inner, 2 * d_state)
    programs = -(-batch // PRODUCTS.rows), -(-longest // PRODUCTS.columns), 1 + len(inputs.gate_weights)
    products_kernel[programs](
        uz,
        inputs.u_tail.contiguous(),
        inputs.conv_taps.contiguous(),
        inputs.conv_bias.contiguous(),
        *weights,
        products,
        batch=batch,
        uz_batch=uz.stride(0),
        **sizes,
    )
    return products


def _contiguous(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _step(inputs: StepInputs) -> StepResult:
    _, *after = inputs.empty_result()
    return step_into(inputs, *after), *after  # type: ignore[return-value]


triton_step = define_step("triton_step", ("cuda", "cpu"), _step)


def step_refuses(inputs: StepInputs) -> str | None:
    """None where the kernel can run this step, or the reason why not as the end of a sentence."""
    uz, tensors = inputs.uz, inputs.tensors()
    reason = gpu_refuses(uz, inputs.x.shape[2]) or triton_missing_here()
    if reason is not None:
        return reason
    if len({W.dtype for W in (*inputs.gate_weights, inputs.W_BC)}) > 1:
        return "its weights are of several precisions"
    if any(tensor.device != uz.device for tensor in tensors):
        return f"uz is on {uz.device} and not everything is there"
    if max(W.numel() for W in (*inputs.gate_weights, inputs.W_BC)) > MOST_WEIGHTS:
        return "a weight has more numbers than it can count"
    if inputs.x.dtype != torch.float32:
        return f"x is {str(inputs.x.dtype).removeprefix('torch.')} and it computes in float32"
    return inputs.misfit() or inputs.needs_gradient()
