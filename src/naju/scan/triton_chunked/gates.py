"""Kernels around the scan that treat every channel alone: the gates' logarithms, and the layer's short convolutions.

A convolution's tile is (t, d): a token's row of channels lies in one piece of memory, and a delayed tile is the same
loads some rows earlier, which the cache still holds. Rows before a sequence's first are its tail, (rows, width - 1, d),
or zeros where there is none.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from naju.scan.triton_chunked.algebra import LEAST_G, log2_sigmoid, sigmoid, stored_gate
from naju.scan.triton_chunked.pieces import (
    LENGTH_ARGUMENTS,
    load,
    piece_of_sequence,
    sequence_rows,
    split_program,
    store,
)


@triton.jit(do_not_specialize=LENGTH_ARGUMENTS)
def gates(
    f_logit,
    f_stride,
    i_logit,
    i_stride,
    log_f,
    log_i,
    rows_in_all,
    d_inner,
    BLOCK: tl.constexpr,
    BD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """log2 of both gates."""
    block, channels = split_program(d_inner, BD)
    rows = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    mask = (rows < rows_in_all) & (channels < d_inner)[None, :]
    f_tile = load(f_logit, f_stride, rows, channels[None, :], mask).to(tl.float32)
    i_tile = load(i_logit, i_stride, rows, channels[None, :], mask).to(tl.float32)
    f_tile, i_tile = log2_sigmoid(f_tile, PRECISION), log2_sigmoid(i_tile, PRECISION)
    store(log_f, d_inner, rows, channels[None, :], stored_gate(f_tile, log_f.dtype.element_ty), mask)
    store(log_i, d_inner, rows, channels[None, :], stored_gate(i_tile, log_i.dtype.element_ty), mask)


@triton.jit
def delayed(u, u_stride, tail, start, tokens, place, t, channels, d_inner, DELAY: tl.constexpr, WIDTH: tl.constexpr):
    """u (t, d) as it was DELAY tokens ago, in float32; t counts in the sequence, of which this is chunk `place`."""
    before = t - DELAY
    known = (channels < d_inner)[None, :]
    inside = ((before >= 0) & (before < tokens))[:, None] & known
    tile = load(u, u_stride, (start + before)[:, None], channels[None, :], inside).to(tl.float32)
    if DELAY > 0 and tail is not None:  # noqa: SIM102 (a constant and a value of the device)
        if place == 0:
            row = before + WIDTH - 1
            tile += load(tail, d_inner, row[:, None], channels[None, :], (before < 0)[:, None] & known).to(tl.float32)
    return tile


@triton.jit
def tap(weight, channels, d_inner, DELAY: tl.constexpr, WIDTH: tl.constexpr):
    """The weight (1, d) of what was DELAY tokens ago."""
    taps = tl.load(weight + channels * WIDTH + (WIDTH - 1 - DELAY), mask=channels < d_inner, other=0.0)
    return taps.to(tl.float32)[None, :]


@triton.jit
def channel_vector(pointer, channels, d_inner):
    return tl.load(pointer + channels, mask=channels < d_inner, other=0.0).to(tl.float32)[None, :]


@triton.jit
def convolved(u, u_stride, tail, weight, bias, start, tokens, place, t, channels, d_inner, WIDTH: tl.constexpr):
    """`sum_j weight_j u_{t-j} + bias`"""
    result = tl.zeros((t.shape[0], channels.shape[0]), dtype=tl.float32) + channel_vector(bias, channels, d_inner)
    for delay in tl.static_range(WIDTH):
        past = delayed(u, u_stride, tail, start, tokens, place, t, channels, d_inner, delay, WIDTH)
        result += tap(weight, channels, d_inner, delay, WIDTH) * past
    return result


@triton.jit
def in_tails(sequence, d_inner, WIDTH: tl.constexpr):
    """Where a sequence's tail begins."""
    return sequence.to(tl.int64) * (WIDTH - 1) * d_inner


@triton.jit(do_not_specialize=LENGTH_ARGUMENTS)
def convolve_silu(
    u,
    u_stride,
    tail,
    weight,
    bias,
    out,
    boundaries,
    chunk_owners,
    first_chunks,
    length,
    sequences,
    chunks,
    d_inner,
    BLOCK: tl.constexpr,
    BD: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
):
    """`silu(conv(u))` of one chunk of tokens."""
    chunk, channels = split_program(d_inner, BD)
    sequence, place = piece_of_sequence(chunk, chunk_owners, first_chunks, chunks, PACKED)
    if sequence >= sequences:
        return
    start, stop = sequence_rows(sequence, boundaries, length, PACKED)
    t = place.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if tail is not None:
        tail += in_tails(sequence, d_inner, WIDTH)
    total = convolved(u, u_stride, tail, weight, bias, start, stop - start, place, t, channels, d_inner, WIDTH)
    mask = (t < stop - start)[:, None] & (channels < d_inner)[None, :]
    store(out, d_inner, (start + t)[:, None], channels[None, :], total * sigmoid(total, PRECISION), mask)


@triton.jit(do_not_specialize=LENGTH_ARGUMENTS)
def convolved_gates(
    h,
    tail,
    f_logit,
    f_stride,
    i_logit,
    i_stride,
    f_taps,
    i_taps,
    f_bias,
    i_bias,
    log_f,
    log_i,
    lengths,
    boundaries,
    chunk_owners,
    first_chunks,
    length,
    sequences,
    chunks,
    d_inner,
    BLOCK: tl.constexpr,
    BD: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    HELD: tl.constexpr,
    PACKED: tl.constexpr,
):
    """log2 of both gates of one chunk from their projections, which it may overwrite: `W h + conv(h) + bias`.

    HELD: beyond its real length, `lengths`, a sequence holds its state.
    """
    chunk, channels = split_program(d_inner, BD)
    sequence, place = piece_of_sequence(chunk, chunk_owners, first_chunks, chunks, PACKED)
    if sequence >= sequences:
        return
    start, stop = sequence_rows(sequence, boundaries, length, PACKED)
    t = place.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = (t < stop - start)[:, None] & (channels < d_inner)[None, :]
    rows = (start + t)[:, None]
    if tail is not None:
        tail += in_tails(sequence, d_inner, WIDTH)
    f_tile = load(f_logit, f_stride, rows, channels[None, :], mask).to(tl.float32)
    i_tile = load(i_logit, i_stride, rows, channels[None, :], mask).to(tl.float32)
    f_tile += channel_vector(f_bias, channels, d_inner)
    i_tile += channel_vector(i_bias, channels, d_inner)
    for delay in tl.static_range(WIDTH):
        past = delayed(h, d_inner, tail, start, stop - start, place, t, channels, d_inner, delay, WIDTH)
        f_tile += tap(f_taps, channels, d_inner, delay, WIDTH) * past
        i_tile += tap(i_taps, channels, d_inner, delay, WIDTH) * past
    f_tile, i_tile = log2_sigmoid(f_tile, PRECISION), log2_sigmoid(i_tile, PRECISION)
    if HELD:
        real = (t < tl.load(lengths + sequence))[:, None]
        f_tile, i_tile = tl.where(real, f_tile, 0.0), tl.where(real, i_tile, LEAST_G)
    store(log_f, f_stride, rows, channels[None, :], stored_gate(f_tile, log_f.dtype.element_ty), mask)
    store(log_i, i_stride, rows, channels[None, :], stored_gate(i_tile, log_i.dtype.element_ty), mask)


@triton.jit
def ahead(d, d_stride, start, tokens, t, channels, d_inner, DELAY: tl.constexpr):
    """A gradient (t, d) as it will be DELAY tokens later, in float32."""
    after = t + DELAY
    mask = ((after >= 0) & (after < tokens))[:, None] & (channels < d_inner)[None, :]
    return load(d, d_stride, (start + after)[:, None], channels[None, :], mask).to(tl.float32)


@triton.jit
def store_sum(partial, row, tile, channels, d_inner):
    """The sum over tokens, this program's part of a parameter's gradient (d,)."""
    tl.store(partial + row * d_inner + channels, tl.sum(tile, axis=0), mask=channels < d_inner)


@triton.jit
def store_before_start(dtail, t, tile, channels, d_inner, WIDTH: tl.constexpr):
    """Rows of the tail from a tile whose t are negative."""
    mask = (t >= 1 - WIDTH)[:, None] & (channels < d_inner)[None, :]
    store(dtail, d_inner, (t + WIDTH - 1)[:, None], channels[None, :], tile, mask)


@triton.jit
def pulled_by_gates(df, di, d_stride, f_taps, i_taps, start, tokens, t, channels, d_inner, WIDTH: tl.constexpr):
    """The gradient of h (t, d) through both convolutions."""
    result = tl.zeros((t.shape[0], channels.shape[0]), dtype=tl.float32)
    for delay in tl.static_range(WIDTH):
        later_f = ahead(df, d_stride, start, tokens, t, channels, d_inner, delay)
        later_i = ahead(di, d_stride, start, tokens, t, channels, d_inner, delay)
        result += tap(f_taps, channels, d_inner, delay, WIDTH) * later_f
        result += tap(i_taps, channels, d_inner, delay, WIDTH) * later_i
    return result


@triton.jit(do_not_specialize=LENGTH_ARGUMENTS)
def convolved_gates_backward(
    df,
    di,
    d_stride,
    h,
    tail,
    f_taps,
    i_taps,
    dh,
    dtail,
    partial,
    boundaries,
    chunk_owners,
    first_chunks,
    length,
    sequences,
    chunks,
    d_inner,
    BLOCK: tl.constexpr,
    BD: tl.constexpr,
    WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Adds to dh what came through both gates; `partial` (chunk, 2, 1 + width, d): bias and taps, newest first."""
    chunk, channels = split_program(d_inner, BD)
    sequence, place = piece_of_sequence(chunk, chunk_owners, first_chunks, chunks, PACKED)
    if sequence >= sequences:
        return
    start, stop = sequence_rows(sequence, boundaries, length, PACKED)
    tokens = stop - start
    t = place.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if tail is not None:
        tail += in_tails(sequence, d_inner, WIDTH)
    mask = (t < tokens)[:, None] & (channels < d_inner)[None, :]
    rows = (start + t)[:, None]
    direct = load(dh, d_inner, rows, channels[None, :], mask).to(tl.float32)
    direct += pulled_by_gates(df, di, d_stride, f_taps, i_taps, start, tokens, t, channels, d_inner, WIDTH)
    store(dh, d_inner, rows, channels[None, :], direct, mask)
    df_here = ahead(df, d_stride, start, tokens, t, channels, d_inner, 0)
    di_here = ahead(di, d_stride, start, tokens, t, channels, d_inner, 0)
    row = chunk.to(tl.int64) * 2 * (1 + WIDTH)
    store_sum(partial, row, df_here, channels, d_inner)
    store_sum(partial, row + 1 + WIDTH, di_here, channels, d_inner)
    for delay in tl.static_range(WIDTH):
        past = delayed(h, d_inner, tail, start, tokens, place, t, channels, d_inner, delay, WIDTH)
        store_sum(partial, row + 1 + delay, df_here * past, channels, d_inner)
        store_sum(partial, row + 2 + WIDTH + delay, di_here * past, channels, d_inner)
    if dtail is not None:  # noqa: SIM102 (a constant and a value of the device)
        if place == 0:
            before = t - BLOCK
            tile = pulled_by_gates(df, di, d_stride, f_taps, i_taps, start, tokens, before, channels, d_inner, WIDTH)
            store_before_start(dtail + in_tails(sequence, d_inner, WIDTH), before, tile, channels, d_inner, WIDTH)


@triton.jit(do_not_specialize=LENGTH_ARGUMENTS)
def silu_backward(
    dout,
    u,
    u_stride,
    tail,
    weight,
    bias,
    partial,
    boundaries,
    chunk_owners,
    first_chunks,
    length,
    sequences,
    chunks,
    d_inner,
    BLOCK: tl.constexpr,
    BD: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Overwrites dout by the gradient of the convolution's sum; `partial` (chunk, 1 + width, d): bias and taps."""
    chunk, channels = split_program(d_inner, BD)
    sequence, place = piece_of_sequence(chunk, chunk_owners, first_chunks, chunks, PACKED)
    if sequence >= sequences:
        return
    start, stop = sequence_rows(sequence, boundaries, length, PACKED)
    tokens = stop - start
    t = place.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if tail is not None:
        tail += in_tails(sequence, d_inner, WIDTH)
    total = convolved(u, u_stride, tail, weight, bias, start, tokens, place, t, channels, d_inner, WIDTH)
    opened = sigmoid(total, PRECISION)
    slope = opened * (1.0 + total * (1.0 - opened))
    dtotal = slope * ahead(dout, d_inner, start, tokens, t, channels, d_inner, 0)
    mask = (t < tokens)[:, None] & (channels < d_inner)[None, :]
    store(dout, d_inner, (start + t)[:, None], channels[None, :], dtotal, mask)
    row = chunk.to(tl.int64) * (1 + WIDTH)
    store_sum(partial, row, dtotal, channels, d_inner)
    for delay in tl.static_range(WIDTH):
        past = delayed(u, u_stride, tail, start, tokens, place, t, channels, d_inner, delay, WIDTH)
        store_sum(partial, row + 1 + delay, dtotal * past, channels, d_inner)


@triton.jit
def pulled(dtotal, weight, start, tokens, t, channels, d_inner, WIDTH: tl.constexpr):
    """The gradient of a convolution's input (t, d)."""
    result = tl.zeros((t.shape[0], channels.shape[0]), dtype=tl.float32)
    for delay in tl.static_range(WIDTH):
        later = ahead(dtotal, d_inner, start, tokens, t, channels, d_inner, delay)
        result += tap(weight, channels, d_inner, delay, WIDTH) * later
    return result


@triton.jit(do_not_specialize=LENGTH_ARGUMENTS)
def convolve_backward(
    dtotal,
    weight,
    du,
    du_stride,
    dtail,
    boundaries,
    chunk_owners,
    first_chunks,
    length,
    sequences,
    chunks,
    d_inner,
    BLOCK: tl.constexpr,
    BD: tl.constexpr,
    WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
):
    """du of one chunk from the gradient of the convolution's sum."""
    chunk, channels = split_program(d_inner, BD)
    sequence, place = piece_of_sequence(chunk, chunk_owners, first_chunks, chunks, PACKED)
    if sequence >= sequences:
        return
    start, stop = sequence_rows(sequence, boundaries, length, PACKED)
    tokens = stop - start
    t = place.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = (t < tokens)[:, None] & (channels < d_inner)[None, :]
    tile = pulled(dtotal, weight, start, tokens, t, channels, d_inner, WIDTH)
    store(du, du_stride, (start + t)[:, None], channels[None, :], tile, mask)
    if dtail is not None:  # noqa: SIM102 (a constant and a value of the device)
        if place == 0:
            before = t - BLOCK
            tile = pulled(dtotal, weight, start, tokens, before, channels, d_inner, WIDTH)
            store_before_start(dtail + in_tails(sequence, d_inner, WIDTH), before, tile, channels, d_inner, WIDTH)
