"""One decoding step of a Naju layer in one launch: convolution tails, gates, state update and readout.

It has no backward: a step that needs a gradient, like every other that is refused here, is the mixer's own torch code.
Products read the weights rounded to the precision of uz, as autocast would hand them over, and sum in float32.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from naju.scan.on_gpu import gpu_refuses, triton_missing_here
from naju.scan.operator import refusing_tangents

__all__ = ["StepInputs", "step_into", "step_refuses", "triton_step"]


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


class Block(NamedTuple):
    """A program's share of the batch and of the channels."""

    rows: int
    channels: int
    warps: int


PIECE = 64  # entries of the state that a program works on at a time
# By the largest batch they are for. One sequence alone is summed; more are padded to the rows of a matrix product.
BLOCKS = {1: Block(1, 8, 16), 16: Block(16, 8, 8), 64: Block(16, 16, 8)}
LARGEST_BLOCK = Block(16, 32, 8)
SHARED_MEMORY = 99 * 1024  # what every GPU of these years has for a program
MUCH_SHARED_MEMORY = 128 * 1024


def block_for(batch: int, d_state: int) -> Block:
    """As many programs as fill a GPU, but no more: each reads all of W_BC. In pieces the largest block would spill."""
    largest = LARGEST_BLOCK if d_state <= PIECE else BLOCKS[64]
    return next((block for most, block in BLOCKS.items() if batch <= most), largest)


def compiled_for(
    block: Block, d_inner: int, d_state: int, d_conv: int, weight_bytes: int, shared_memory: int
) -> dict[str, Any]:
    """Sizes and options that the kernel is compiled for."""
    alone = block.rows == 1
    much = shared_memory >= MUCH_SHARED_MEMORY and block != LARGEST_BLOCK
    tile = (1024 if alone else 512 if much else 256) // weight_bytes  # loads in flight
    return {
        "D_INNER": d_inner,
        "D_STATE": d_state,
        "D_CONV": d_conv,
        "BLOCK_B": block.rows,
        "BLOCK_D": block.channels,
        "BLOCK_N": min(max(_power_of_two(d_state), 16), PIECE),
        "BLOCK_K": min(max(_power_of_two(d_inner), 16), tile),
        "num_warps": block.warps,
        "num_stages": 3 if alone else 2,
        "enable_fp_fusion": True,
    }


def _power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()


def step_into(inputs: StepInputs, x: Tensor, u_tail: Tensor, h_tail: Tensor) -> Tensor:
    """y; the next state goes into the three tensors. This x may be the inputs' own, but not the tails, which all
    programs read."""
    from naju.scan.triton_step.kernels import step_kernel

    uz, (batch, d_inner, d_state) = inputs.uz, inputs.x.shape
    uz = uz if uz.stride(1) == 1 else uz.contiguous()
    y = uz.new_empty(batch, d_inner)
    block = block_for(batch, d_state)
    d_conv, shared_memory = inputs.conv_taps.shape[1], _shared_memory(uz.device)
    sizes = compiled_for(block, d_inner, d_state, d_conv, inputs.W_BC.itemsize, shared_memory)
    programs = -(-batch // block.rows) * -(-d_inner // block.channels)
    with torch.cuda.device_of(uz):
        step_kernel[(programs,)](
            uz,
            *(tensor.contiguous() for tensor in inputs[1:6]),
            *_gates(inputs),
            inputs.W_BC.contiguous(),
            inputs.D.contiguous(),
            y,
            x,
            u_tail,
            h_tail,
            batch=batch,
            uz_batch=uz.stride(0),
            alpha=inputs.alpha,
            gate_scale=inputs.gate_scale,
            **sizes,
        )
    return y


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that one program may use."""
    if device.type != "cuda":
        return SHARED_MEMORY
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


def _gates(inputs: StepInputs) -> list[Tensor | None]:
    """Weight, taps and bias of the forget gate, which may be absent, and of the write gate."""
    triples = zip(inputs.gate_weights, inputs.gate_taps, inputs.gate_biases, strict=True)
    flat: list[Tensor | None] = [tensor.contiguous() for triple in triples for tensor in triple]
    return [None] * (6 - len(flat)) + flat


def _step(
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
    gates = gate_weights, gate_taps, gate_biases
    inputs = StepInputs(uz, x, u_tail, h_tail, conv_taps, conv_bias, *gates, W_BC, D, alpha, gate_scale)
    _, *after = _empty(*inputs)
    return step_into(inputs, *after), *after  # type: ignore[return-value]


def _empty(uz: Tensor, x: Tensor, u_tail: Tensor, h_tail: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tails come out in the precision of uz, whatever they came in."""
    tails = uz.new_empty(u_tail.shape), uz.new_empty(h_tail.shape)
    return uz.new_empty(x.shape[:2]), x.new_empty(x.shape), *tails


triton_step = torch.library.custom_op(
    "naju::triton_step", refusing_tangents(_step), mutates_args=(), device_types=("cuda", "cpu")
)
triton_step.register_fake(_empty)


def step_refuses(inputs: StepInputs) -> str | None:
    """None where the kernel can run this step, or the reason why not as the end of a sentence."""
    uz, tensors = inputs.uz, inputs.tensors()
    reason = gpu_refuses(uz, inputs.x.shape[2], tensors) or triton_missing_here()
    if reason is not None:
        return reason
    if any(tensor.device != uz.device for tensor in tensors):
        return f"uz is on {uz.device} and not everything is there"
    if inputs.x.dtype != torch.float32:
        return f"x is {str(inputs.x.dtype).removeprefix('torch.')} and it computes in float32"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "a gradient is asked for and it has no backward"
    return None
