"""The Triton kernels of the diagonal scan. Importing this module imports Triton, so only a scan on a GPU does.

A program is one warp. It owns one sequence and a block of channels and walks the tokens one by one with the state,
(channels, entries), in registers. The forward keeps the state that enters every CHUNK tokens; the backward takes the
chunks from the last to the first, walks each forward noting the state that every token meets, then back over those.
Lengths are never specialized on: a new length compiles nothing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from naju.scan.on_gpu import interpreted
from naju.scan.triton_chunked.algebra import LN2, LOG2E, exp2
from naju.scan.triton_chunked.launch import on_device

CELLS = 512  # of the state, in one program
MOST_PARTS = 2**28  # numbers that the blocks of channels have for dB together, and as many for dC
OPTIONS: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": True}  # Triton 3.9 warns where the second is not said


@triton.jit
def place(first, blocks, d_inner, d_state, BD: tl.constexpr, BN: tl.constexpr):
    """This program's block of channels, of `blocks` from the `first` on, its sequence, its channels and entries, and
    where its cells are in a state."""
    block = (tl.program_id(0) % blocks).to(tl.int64)
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    channel = (first + block) * BD + tl.arange(0, BD)
    entry = tl.arange(0, BN)
    is_cell = (channel < d_inner)[:, None] & (entry < d_state)[None, :]
    return block, sequence, channel, entry, channel[:, None] * d_state + entry[None, :], is_cell


@triton.jit
def load_row(matrix, row, column, columns):
    return tl.load(matrix + row * columns + column, mask=column < columns, other=0.0)


@triton.jit
def load_token(h, dt, B, row, channel, entry, d_inner, d_state):
    return (
        load_row(h, row, channel, d_inner),
        load_row(dt, row, channel, d_inner),
        load_row(B, row, entry, d_state),
    )


@triton.jit
def advance(x, decay, h_t, dt_t, B_t):
    return decay * x + (dt_t * h_t)[:, None] * B_t[None, :]


@triton.jit(do_not_specialize=["length"])
def forward_kernel(
    h,
    dt,
    A,
    B,
    C,
    initial,
    y,
    final,
    entering,
    length,
    d_inner,
    d_state,
    CHUNK: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    _, sequence, channel, entry, cell, is_cell = place(0, tl.cdiv(d_inner, BD), d_inner, d_state, BD, BN)
    size = d_inner * d_state
    rates = tl.load(A + cell, mask=is_cell, other=0.0) * LOG2E
    x = tl.load(initial + sequence * size + cell, mask=is_cell, other=0.0)
    chunks = tl.cdiv(length, CHUNK)
    for chunk in range(chunks):
        tl.store(entering + (sequence * chunks + chunk) * size + cell, x, mask=is_cell)
        for t in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, length)):
            row = sequence * length + t
            h_t, dt_t, B_t = load_token(h, dt, B, row, channel, entry, d_inner, d_state)
            x = advance(x, exp2(dt_t[:, None] * rates, PRECISION), h_t, dt_t, B_t)
            y_t = tl.sum(x * load_row(C, row, entry, d_state)[None, :], axis=1)
            tl.store(y + row * d_inner + channel, y_t, mask=channel < d_inner)
    tl.store(final + sequence * size + cell, x, mask=is_cell)


@triton.jit(do_not_specialize=["length", "rows", "first", "blocks"])
def backward_kernel(
    dy,
    dfinal,
    entering,
    h,
    dt,
    A,
    B,
    C,
    noted,
    dh,
    ddt,
    dA,
    dB,
    dC,
    dinitial,
    length,
    rows,
    first,
    blocks,
    d_inner,
    d_state,
    CHUNK: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dA has a row for each sequence, dB and dC for each block of channels: no two programs share an element."""
    block, sequence, channel, entry, cell, is_cell = place(first, blocks, d_inner, d_state, BD, BN)
    size = d_inner * d_state
    rates = tl.load(A + cell, mask=is_cell, other=0.0) * LOG2E
    adjoint = tl.load(dfinal + sequence * size + cell, mask=is_cell, other=0.0)
    dA_here = tl.zeros((BD, BN), dtype=tl.float32)
    own = noted + tl.program_id(0).to(tl.int64) * CHUNK * BD * BN
    own += tl.arange(0, BD)[:, None] * BN + entry[None, :]
    chunks = tl.cdiv(length, CHUNK)
    for step in range(chunks):
        chunk = chunks - 1 - step
        start, stop = chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, length)
        x = tl.load(entering + (sequence * chunks + chunk) * size + cell, mask=is_cell, other=0.0)
        for t in range(start, stop):
            tl.store(own + (t - start) * BD * BN, x)
            row = sequence * length + t
            h_t, dt_t, B_t = load_token(h, dt, B, row, channel, entry, d_inner, d_state)
            x = advance(x, exp2(dt_t[:, None] * rates, PRECISION), h_t, dt_t, B_t)
        tl.debug_barrier()
        dA_of_chunk = tl.zeros((BD, BN), dtype=tl.float32)  # a sum over all tokens would lose the small terms
        for back in range(stop - start):
            t = stop - 1 - back
            row = sequence * length + t
            h_t, dt_t, B_t = load_token(h, dt, B, row, channel, entry, d_inner, d_state)
            C_t, dy_t = load_row(C, row, entry, d_state), load_row(dy, row, channel, d_inner)
            met = tl.load(own + (t - start) * BD * BN)
            decay = exp2(dt_t[:, None] * rates, PRECISION)
            x = advance(met, decay, h_t, dt_t, B_t)
            adjoint += dy_t[:, None] * C_t[None, :]
            dwrite = tl.sum(adjoint * B_t[None, :], axis=1)  # of dt h
            share = block * rows + row
            dB_t, dC_t = tl.sum(adjoint * (dt_t * h_t)[:, None], axis=0), tl.sum(x * dy_t[:, None], axis=0)
            tl.store(dB + share * d_state + entry, dB_t, mask=entry < d_state)
            tl.store(dC + share * d_state + entry, dC_t, mask=entry < d_state)
            adjoint *= decay
            dexponent = adjoint * met  # of dt A
            dA_of_chunk += dexponent * dt_t[:, None]
            ddt_t = dwrite * h_t + LN2 * tl.sum(dexponent * rates, axis=1)
            tl.store(dh + row * d_inner + channel, dwrite * dt_t, mask=channel < d_inner)
            tl.store(ddt + row * d_inner + channel, ddt_t, mask=channel < d_inner)
        dA_here += dA_of_chunk
        tl.debug_barrier()
    tl.store(dA + sequence * size + cell, dA_here, mask=is_cell)
    tl.store(dinitial + sequence * size + cell, adjoint, mask=is_cell)


def _constants(d_state: int, chunk: int) -> dict[str, Any]:
    entries = triton.next_power_of_2(d_state)
    precision = "ieee" if interpreted() else "tf32"  # the hardware's own exponential
    return {"CHUNK": chunk, "BD": min(64, CELLS // entries), "BN": entries, "PRECISION": precision}


def forward(
    h: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, x: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the final state, and the state that enters each chunk, (b, chunks, d, n)."""
    (batch, length, d_inner), d_state = h.shape, A.shape[1]
    constants = _constants(d_state, chunk)
    y, final = torch.empty_like(h, memory_format=torch.contiguous_format), x.new_empty(x.shape)
    entering = x.new_empty(batch, -(-length // chunk), *A.shape)
    inputs = (tensor.contiguous() for tensor in (h, dt, A, B, C, x))
    programs = batch * -(-d_inner // constants["BD"])
    if programs:
        with on_device(h.device):
            forward_kernel[(programs,)](*inputs, y, final, entering, length, d_inner, d_state, **constants, **OPTIONS)
    return y, final, entering


def backward(
    dy: Tensor, dx: Tensor, entering: Tensor, h: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of h, dt, A, B, C and the initial state. Every block of channels has dB and dC of its own, so that they
    are taken a few at a time."""
    (batch, length, d_inner), d_state = h.shape, A.shape[1]
    constants = _constants(d_state, chunk)
    blocks = -(-d_inner // constants["BD"])
    at_once = min(blocks, max(1, MOST_PARTS // max(1, B.numel())))
    dh, ddt = (torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (h, dt))
    dA, dinitial = (h.new_empty(batch, *A.shape) for _ in range(2))
    parts = h.new_empty(2, at_once, *B.shape)
    dB, dC = torch.zeros_like(B), torch.zeros_like(C)
    noted = h.new_empty(batch * at_once, chunk, constants["BD"], constants["BN"])
    inputs = [tensor.contiguous() for tensor in (dy, dx, entering, h, dt, A, B, C)]
    for first in range(0, blocks if batch else 0, at_once):
        count = min(at_once, blocks - first)
        outputs = (noted, dh, ddt, dA, *parts, dinitial)
        sizes = (length, batch * length, first, count, d_inner, d_state)
        with on_device(h.device):
            backward_kernel[(batch * count,)](*inputs, *outputs, *sizes, **constants, **OPTIONS)
        dB, dC = dB + parts[0, :count].sum(0), dC + parts[1, :count].sum(0)
    return dh, ddt, dA.sum(0), dB, dC, dinitial
