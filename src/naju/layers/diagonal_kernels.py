"""The Triton kernels of the diagonal scan. Importing this module imports Triton, so only a scan on a GPU does.

A program owns one sequence and a block of channels and walks the tokens with the state in registers, STEP at a time:
what they need is loaded before any of them is computed, what they give is stored after the last, so that they wait for
memory once. The forward keeps the state that enters every CHUNK tokens; the backward takes the chunks from the last to
the first, walks each forward noting the state that every STEP tokens meet, then takes those back to front, with all
their states and decays in registers. Past a sequence's end are steps of size zero, which change nothing.
Lengths are never specialized on: a new length compiles nothing.

A program's state is KD * KN tiles (GD, GN): tile i has the channels i // KN * GD + g and the entries i % KN * GN + n.
A lane holds four neighbours of GN in every tile, so that the choice of the four numbers says which sums stay within a
lane (over KD, KN and those four) and which go through shuffles (the rest of GN, and GD).
"""

# Triton makes a tuple longer by adding to it and in no other way, which to mypy is a change of its type.
# ruff: noqa: RUF005
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from naju.scan.on_gpu import interpreted
from naju.scan.triton_chunked.algebra import LN2, LOG2E, exp2
from naju.scan.triton_chunked.launch import on_device

MOST_PARTS = 2**28  # numbers that the blocks of channels have for dB together, and as many for dC
# Of a kernel: the warps of a program, the tokens at a time, the cells of the state in a lane, the entries among them
FORWARD = {"WARPS": 1, "STEP": 4, "CELLS": 32, "ENTRIES": 8}
BACKWARD = {"WARPS": 1, "STEP": 4, "CELLS": 16, "ENTRIES": 4}
BACKWARD_OF_FEW = BACKWARD | {"CELLS": 8}  # with few entries the programs would be too few to fill a GPU
FEW = 16


@triton.jit
def place(first, blocks, KD: tl.constexpr, KN: tl.constexpr, GD: tl.constexpr, GN: tl.constexpr):
    """This program's block of channels, of `blocks` from the `first` on, its sequence, and the channels (GD, 1) and
    entries (GD, GN) of its first tile. The entries are as many as the cells: what is loaded by them comes at once to
    the lanes it goes to."""
    block = (tl.program_id(0) % blocks).to(tl.int64)
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    channel = (first + block) * (KD * GD) + tl.arange(0, GD)[:, None]
    entry = tl.arange(0, GN)[None, :] + tl.zeros((GD, 1), dtype=tl.int32)
    return block, sequence, channel, entry


@triton.jit
def load_cells(
    matrix,
    channel,
    entry,
    d_inner,
    d_state,
    KD: tl.constexpr,
    KN: tl.constexpr,
    GD: tl.constexpr,
    GN: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The tiles of a matrix (d_inner, d_state)."""
    tiles = ()
    for i in tl.static_range(KD * KN):
        d, n = channel + i // KN * GD, entry + i % KN * GN
        if WHOLE:
            tile = tl.load(matrix + d * d_state + n)
        else:
            tile = tl.load(matrix + d * d_state + n, mask=(d < d_inner) & (n < d_state), other=0.0)
        tiles = tiles + (tile,)
    return tiles


@triton.jit
def store_cells(
    matrix,
    tiles,
    channel,
    entry,
    d_inner,
    d_state,
    KD: tl.constexpr,
    KN: tl.constexpr,
    GD: tl.constexpr,
    GN: tl.constexpr,
    WHOLE: tl.constexpr,
):
    for i in tl.static_range(KD * KN):
        d, n = channel + i // KN * GD, entry + i % KN * GN
        if WHOLE:
            tl.store(matrix + d * d_state + n, tiles[i])
        else:
            tl.store(matrix + d * d_state + n, tiles[i], mask=(d < d_inner) & (n < d_state))


@triton.jit
def load_tokens(
    matrix,
    row,
    left,
    column,
    columns,
    STEP: tl.constexpr,
    COUNT: tl.constexpr,
    STRIDE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """For each of STEP tokens from `row` on, of which `left` exist, COUNT tiles, STRIDE columns apart; else zeros."""
    tokens = ()
    for u in tl.static_range(STEP):
        tiles = ()
        for i in tl.static_range(COUNT):
            here = column + i * STRIDE
            is_here = tl.full(column.shape, u, tl.int32) < left
            if not WHOLE:
                is_here &= here < columns
            tiles = tiles + (tl.load(matrix + (row + u) * columns + here, mask=is_here, other=0.0),)
        tokens = tokens + (tiles,)
    return tokens


@triton.jit
def zeros(COUNT: tl.constexpr, GD: tl.constexpr, GN: tl.constexpr):
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = tiles + (tl.zeros((GD, GN), dtype=tl.float32),)
    return tiles


@triton.jit
def plus(left, right, COUNT: tl.constexpr):
    tiles = ()
    for i in tl.static_range(COUNT):
        tiles = tiles + (left[i] + right[i],)
    return tiles


@triton.jit
def scaled(tiles, factor, COUNT: tl.constexpr):
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (tiles[i] * factor,)
    return found


@triton.jit
def over_entries(tiles, weights, KD: tl.constexpr, KN: tl.constexpr, PER_CHANNEL: tl.constexpr):
    """The weighted sums over a state's entries, KD tiles (GD,). A weight is for each entry, or for each cell."""
    sums = ()
    for k in tl.static_range(KD):
        kept = tiles[k * KN] * weights[k * KN if PER_CHANNEL else 0]
        for j in tl.static_range(1, KN):
            kept += tiles[k * KN + j] * weights[k * KN + j if PER_CHANNEL else j]
        sums = sums + (tl.sum(kept, axis=1),)
    return sums


@triton.jit
def within_lanes(tiles, weights, KD: tl.constexpr, KN: tl.constexpr):
    """The weighted sums over the channels of a state that share a lane, KN tiles (GD, GN)."""
    sums = ()
    for j in tl.static_range(KN):
        kept = tiles[j] * weights[0]
        for k in tl.static_range(1, KD):
            kept += tiles[k * KN + j] * weights[k]
        sums = sums + (kept,)
    return sums


@triton.jit
def joined(tiles, COUNT: tl.constexpr):
    """COUNT = 2^k tiles as one, with a last axis over them."""
    for level in tl.static_range(1, 10):
        if COUNT >> level > 0:
            pairs = ()
            for i in tl.static_range(COUNT >> level):
                pairs = pairs + (tl.join(tiles[i], tiles[i + (COUNT >> level)]),)
            tiles = pairs
    return tiles[0]


@triton.jit
def advance(x, h, dt, B, rates, KD: tl.constexpr, KN: tl.constexpr, PRECISION: tl.constexpr):
    """A token's decays and the state after it."""
    decays, after = (), ()
    for i in tl.static_range(KD * KN):
        decay = exp2(dt[i // KN] * rates[i], PRECISION)
        decays = decays + (decay,)
        after = after + (decay * x[i] + (dt[i // KN] * h[i // KN]) * B[i % KN],)
    return decays, after


@triton.jit
def where_read(row, left, channel, d_inner, STEP: tl.constexpr, KD: tl.constexpr, GD: tl.constexpr):
    """Where the numbers that STEP tokens have for each channel are, (GD, STEP * KD), and which of them exist."""
    i = tl.arange(0, STEP * KD)[None, :]
    column = channel + i % KD * GD
    return (row + i // KD) * d_inner + column, (i // KD < left) & (column < d_inner)


@triton.jit
def as_read(sums, STEP: tl.constexpr, KD: tl.constexpr):
    """The sums over entries of STEP tokens, as `where_read` places them."""
    return tl.reshape(joined(sums, STEP * KD), (sums[0].shape[0], STEP * KD))


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
    STEP: tl.constexpr,
    KD: tl.constexpr,
    KN: tl.constexpr,
    GD: tl.constexpr,
    GN: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    _, sequence, channel, entry = place(0, tl.cdiv(d_inner, KD * GD), KD, KN, GD, GN)
    size = d_inner * d_state
    A_here = load_cells(A, channel, entry, d_inner, d_state, KD, KN, GD, GN, WHOLE)
    rates = scaled(A_here, LOG2E, KD * KN)
    x = load_cells(initial + sequence * size, channel, entry, d_inner, d_state, KD, KN, GD, GN, WHOLE)
    chunks = tl.cdiv(length, CHUNK)
    for chunk in range(chunks):
        kept = entering + (sequence * chunks + chunk) * size
        store_cells(kept, x, channel, entry, d_inner, d_state, KD, KN, GD, GN, WHOLE)
        for t in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, length), STEP):
            row, left = sequence * length + t, length - t
            h_t = load_tokens(h, row, left, channel, d_inner, STEP, KD, GD, WHOLE)
            dt_t = load_tokens(dt, row, left, channel, d_inner, STEP, KD, GD, WHOLE)
            B_t = load_tokens(B, row, left, entry, d_state, STEP, KN, GN, WHOLE)
            C_t = load_tokens(C, row, left, entry, d_state, STEP, KN, GN, WHOLE)
            y_t = ()
            for u in tl.static_range(STEP):
                x = advance(x, h_t[u], dt_t[u], B_t[u], rates, KD, KN, PRECISION)[1]
                y_t = y_t + over_entries(x, C_t[u], KD, KN, False)
            here, is_here = where_read(row, left, channel, d_inner, STEP, KD, GD)
            tl.store(y + here, as_read(y_t, STEP, KD), mask=is_here)
    store_cells(final + sequence * size, x, channel, entry, d_inner, d_state, KD, KN, GD, GN, WHOLE)


@triton.jit
def read_back(adjoint, dy, C, h, dt, KD: tl.constexpr, KN: tl.constexpr):
    """The adjoint of the state after a token, given that of the next; and what the token writes for each channel."""
    after, writes = (), ()
    for i in tl.static_range(KD * KN):
        after = after + (adjoint[i] + dy[i // KN] * C[i % KN],)
    for k in tl.static_range(KD):
        writes = writes + (dt[k] * h[k],)
    return after, writes


@triton.jit
def decay_back(adjoint, decay, met, dt, dA, KD: tl.constexpr, KN: tl.constexpr):
    """The adjoint of the state that a token meets, that of its exponents dt A, and dA with the token's."""
    before, of_exponent, dA_with = (), (), ()
    for i in tl.static_range(KD * KN):
        kept = adjoint[i] * decay[i]
        before, of_exponent = before + (kept,), of_exponent + (kept * met[i],)
        dA_with = dA_with + (dA[i] + of_exponent[i] * dt[i // KN],)
    return before, of_exponent, dA_with


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
    parts,
    dinitial,
    length,
    rows,
    first,
    blocks,
    d_inner,
    d_state,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    KD: tl.constexpr,
    KN: tl.constexpr,
    GD: tl.constexpr,
    GN: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dA has a row for each sequence; `parts` are dB and dC of each block of channels, (2, blocks, rows, d_state): no
    two programs share an element."""
    CELLS: tl.constexpr = KD * KN
    block, sequence, channel, entry = place(first, blocks, KD, KN, GD, GN)
    size = d_inner * d_state
    rates = scaled(load_cells(A, channel, entry, d_inner, d_state, KD, KN, GD, GN, WHOLE), LOG2E, CELLS)
    adjoint = load_cells(dfinal + sequence * size, channel, entry, d_inner, d_state, KD, KN, GD, GN, WHOLE)
    dA_here = zeros(CELLS, GD, GN)
    # A program's notes: a state (KD * GD, KN * GN) for each step of a chunk.
    own = noted + tl.program_id(0).to(tl.int64) * (CHUNK // STEP * CELLS * GD * GN)
    cell = tl.arange(0, GD)[:, None]
    # A token's shares: of dB and of dC, the entries of each of KN tiles.
    i = tl.arange(0, 2 * STEP * KN)[None, :]
    is_dC, later, column = i // (STEP * KN), i // KN % STEP, i % KN * GN + tl.arange(0, GN)[:, None]
    full = tl.full((), STEP, tl.int32)
    chunks = tl.cdiv(length, CHUNK)
    for back in range(chunks):
        chunk = chunks - 1 - back
        start = chunk * CHUNK
        steps = tl.cdiv(tl.minimum(CHUNK, length - start), STEP)
        kept = entering + (sequence * chunks + chunk) * size
        x = load_cells(kept, channel, entry, d_inner, d_state, KD, KN, GD, GN, WHOLE)
        for step in range(steps - 1):
            row = sequence * length + start + step * STEP
            h_t = load_tokens(h, row, full, channel, d_inner, STEP, KD, GD, WHOLE)
            dt_t = load_tokens(dt, row, full, channel, d_inner, STEP, KD, GD, WHOLE)
            B_t = load_tokens(B, row, full, entry, d_state, STEP, KN, GN, WHOLE)
            note = own + step * (CELLS * GD * GN)
            store_cells(note, x, cell, entry, KD * GD, KN * GN, KD, KN, GD, GN, True)
            for u in tl.static_range(STEP):
                x = advance(x, h_t[u], dt_t[u], B_t[u], rates, KD, KN, PRECISION)[1]
        note = own + (steps - 1) * (CELLS * GD * GN)
        store_cells(note, x, cell, entry, KD * GD, KN * GN, KD, KN, GD, GN, True)
        tl.debug_barrier()
        dA_of_chunk = zeros(CELLS, GD, GN)  # a sum over all tokens would lose the small terms
        for step_back in range(steps):
            step = steps - 1 - step_back
            row, left = sequence * length + start + step * STEP, length - start - step * STEP
            note = own + step * (CELLS * GD * GN)
            h_t = load_tokens(h, row, left, channel, d_inner, STEP, KD, GD, WHOLE)
            dt_t = load_tokens(dt, row, left, channel, d_inner, STEP, KD, GD, WHOLE)
            B_t = load_tokens(B, row, left, entry, d_state, STEP, KN, GN, WHOLE)
            met = load_cells(note, cell, entry, KD * GD, KN * GN, KD, KN, GD, GN, True)
            C_t = load_tokens(C, row, left, entry, d_state, STEP, KN, GN, WHOLE)
            dy_t = load_tokens(dy, row, left, channel, d_inner, STEP, KD, GD, WHOLE)
            here, is_here = where_read(row, left, channel, d_inner, STEP, KD, GD)
            h_here, dt_here = tl.load(h + here, mask=is_here), tl.load(dt + here, mask=is_here)
            states, decays = (met,), ()
            for u in tl.static_range(STEP):
                decay, met = advance(met, h_t[u], dt_t[u], B_t[u], rates, KD, KN, PRECISION)
                states, decays = states + (met,), decays + (decay,)
            dwrite, dexponent, dB, dC = (), (), (), ()
            for u in tl.static_range(STEP - 1, -1, -1):
                adjoint, writes = read_back(adjoint, dy_t[u], C_t[u], h_t[u], dt_t[u], KD, KN)
                dwrite = over_entries(adjoint, B_t[u], KD, KN, False) + dwrite  # of dt h
                dB = within_lanes(adjoint, writes, KD, KN) + dB
                dC = within_lanes(states[u + 1], dy_t[u], KD, KN) + dC
                adjoint, of_exponent, dA_of_chunk = decay_back(
                    adjoint, decays[u], states[u], dt_t[u], dA_of_chunk, KD, KN
                )
                dexponent = over_entries(of_exponent, rates, KD, KN, True) + dexponent
            shares = tl.reshape(joined(dB + dC, 2 * STEP * KN), (GD, GN, 2 * STEP * KN))
            share = ((is_dC * blocks + block) * rows + row + later) * d_state + column
            tl.store(parts + share, tl.sum(shares, axis=0), mask=(later < left) & (column < d_state))
            written, decayed = as_read(dwrite, STEP, KD), as_read(dexponent, STEP, KD)
            tl.store(dh + here, written * dt_here, mask=is_here)
            tl.store(ddt + here, written * h_here + LN2 * decayed, mask=is_here)
        dA_here = plus(dA_here, dA_of_chunk, CELLS)
        tl.debug_barrier()
    store_cells(dA + sequence * size, dA_here, channel, entry, d_inner, d_state, KD, KN, GD, GN, WHOLE)
    store_cells(dinitial + sequence * size, adjoint, channel, entry, d_inner, d_state, KD, KN, GD, GN, WHOLE)


def _constants(way: dict[str, int], d_inner: int, d_state: int, chunk: int) -> dict[str, Any]:
    """A kernel's shape. GN is a multiple of four where there are as many entries: a lane loads them at once."""
    entries = triton.next_power_of_2(d_state)
    KN = max(1, min(way["ENTRIES"], entries) // 4, entries // 128)
    GN = entries // KN
    GD = 32 * way["WARPS"] // max(1, GN // 4)
    KD = max(1, min(way["CELLS"] // (4 * KN), triton.next_power_of_2(triton.cdiv(d_inner, GD))))
    step = min(way["STEP"], chunk)
    return {
        "CHUNK": chunk,
        "STEP": step,
        "KD": KD,
        "KN": KN,
        "GD": GD,
        "GN": GN,
        "WHOLE": d_inner % (KD * GD) == 0 and d_state == entries,
        "PRECISION": "ieee" if interpreted() else "tf32",  # the hardware's own exponential
    }


def backward_way(d_state: int) -> dict[str, int]:
    return BACKWARD_OF_FEW if d_state <= FEW else BACKWARD


def _options(way: dict[str, int]) -> dict[str, Any]:
    return {"num_warps": way["WARPS"], "enable_fp_fusion": True}  # Triton 3.9 warns where the second is not said


def forward(
    h: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, x: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the final state, and the state that enters each chunk, (b, chunks, d, n)."""
    (batch, length, d_inner), d_state = h.shape, A.shape[1]
    constants = _constants(FORWARD, d_inner, d_state, chunk)
    y, final = torch.empty_like(h, memory_format=torch.contiguous_format), x.new_empty(x.shape)
    entering = x.new_empty(batch, -(-length // chunk), *A.shape)
    inputs = (tensor.contiguous() for tensor in (h, dt, A, B, C, x))
    programs = batch * -(-d_inner // (constants["KD"] * constants["GD"]))
    if programs:
        sizes = (length, d_inner, d_state)
        with on_device(h.device):
            forward_kernel[(programs,)](*inputs, y, final, entering, *sizes, **constants, **_options(FORWARD))
    return y, final, entering


def backward(
    dy: Tensor, dx: Tensor, entering: Tensor, h: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of h, dt, A, B, C and the initial state. Every block of channels has dB and dC of its own, so that they
    are taken a few at a time."""
    (batch, length, d_inner), d_state = h.shape, A.shape[1]
    way = backward_way(d_state)
    constants = _constants(way, d_inner, d_state, chunk)
    channels, entries = constants["KD"] * constants["GD"], constants["KN"] * constants["GN"]
    blocks = -(-d_inner // channels)
    at_once = min(blocks, max(1, MOST_PARTS // max(1, B.numel())))
    dh, ddt = (torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (h, dt))
    dA, dinitial = (h.new_empty(batch, *A.shape) for _ in range(2))
    dB, dC = torch.zeros_like(B), torch.zeros_like(C)
    noted = h.new_empty(batch * at_once, chunk // constants["STEP"], channels, entries)
    inputs = [tensor.contiguous() for tensor in (dy, dx, entering, h, dt, A, B, C)]
    for first in range(0, blocks if batch else 0, at_once):
        count = min(at_once, blocks - first)
        parts = h.new_empty(2, count, *B.shape)
        outputs = (noted, dh, ddt, dA, parts, dinitial)
        sizes = (length, batch * length, first, count, d_inner, d_state)
        with on_device(h.device):
            backward_kernel[(batch * count,)](*inputs, *outputs, *sizes, **constants, **_options(way))
        dB, dC = dB + parts[0].sum(0), dC + parts[1].sum(0)
    return dh, ddt, dA.sum(0), dB, dC, dinitial
