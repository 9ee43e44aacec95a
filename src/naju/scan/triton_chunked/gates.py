"""Kernels around the scan that treat every channel alone: the gates' logarithms, and the layer's short convolutions.

A convolution walks time. A program has a block of channels and some chunks of tokens, its walk: it loads every token's
row (d,) once, STEP rows before it stores any, and the last rows slide on in registers. Chunks that follow each other
in one sequence are one run, and only where a run begins are the rows before it loaded. Rows before a sequence's first
are its tail, (rows, width - 1, d), or zeros where there is none. Gradients of parameters add up in registers too.

Rows, and taps, are tuples of (d,) in float32, the oldest first.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl

from naju.scan.triton_chunked.algebra import G_SCALE, LEAST_G, LOG2E, exp2, log2, sigmoid
from naju.scan.triton_chunked.pieces import (
    LENGTH_ARGUMENTS,
    load,
    piece_of_sequence,
    sequence_rows,
    split_program,
    store,
)

WALK_ARGUMENTS = [*LENGTH_ARGUMENTS, "walk"]
# Of the two bfloat16 in a register: each is the upper half of a float32.
TO_FLOAT32 = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")


@triton.jit
def stored_gates(exponents, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """log2 of sigmoid(x), at most 0, as it is kept in memory, from -x log2(e).

    Exact to rounding near 0 too, where 1 + u has lost the digits of u.
    """
    SCALE: tl.constexpr = G_SCALE * LOG2E
    result = ()
    for k in tl.static_range(len(exponents)):
        u = exp2(exponents[k], PRECISION)
        log = log2(1.0 + u, PRECISION)
        if tl.float16 == DTYPE:
            log = tl.where(u < 0.0078125, u * (0.5 * SCALE * u - SCALE), log * -G_SCALE)
            result += (at_least(log.to(tl.float16), PRECISION),)
        else:
            series = u * (LOG2E - u * (0.5 * LOG2E - u * (0.3333333333 * LOG2E - u * (0.25 * LOG2E))))
            log = -tl.where(u < 0.015625, series, log)
            result += (tl.maximum(log, LEAST_G, propagate_nan=tl.PropagateNan.ALL),)
    return result


@triton.jit
def at_least(gate, PRECISION: tl.constexpr):
    """A float16 gate of at least LEAST_G; two of them at once where there is such an instruction."""
    least = tl.full(gate.shape, LEAST_G * G_SCALE, tl.float16)
    if PRECISION == "bf16" or PRECISION == "tf32":
        gate = tl.inline_asm_elementwise(
            "max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [gate, least], tl.float16, is_pure=True, pack=2
        )
    else:
        gate = tl.maximum(gate, least, propagate_nan=tl.PropagateNan.ALL)
    return gate


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
    DTYPE: tl.constexpr = log_f.dtype.element_ty
    f_tile, i_tile = stored_gates((f_tile * -LOG2E, i_tile * -LOG2E), DTYPE, PRECISION)
    store(log_f, d_inner, rows, channels[None, :], f_tile, mask)
    store(log_i, d_inner, rows, channels[None, :], i_tile, mask)


@triton.jit
def chunks_of_program(piece, first_chunks, sequences, chunks, walk, PACKED: tl.constexpr):
    """A program's first chunk, and the end of its chunks, at most `walk` of them."""
    in_all = tl.load(first_chunks + sequences).to(tl.int32) if PACKED else sequences * chunks
    return piece * walk, tl.minimum((piece + 1) * walk, in_all)


@triton.jit
def run_from(
    chunk, end, boundaries, chunk_owners, first_chunks, length, chunks, CHUNK: tl.constexpr, PACKED: tl.constexpr
):
    """The run that starts with a chunk: its sequence, this one's first row and number of tokens, the run's first token
    and the end of its tokens, and the chunk after it."""
    sequence, place = piece_of_sequence(chunk, chunk_owners, first_chunks, chunks, PACKED)
    start, stop = sequence_rows(sequence, boundaries, length, PACKED)
    tokens, first = (stop - start).to(tl.int32), place.to(tl.int32) * CHUNK
    last = tl.minimum(tokens, first + (end - chunk) * CHUNK)
    return sequence, start, tokens, first, last, chunk + tl.cdiv(last - first, CHUNK)


@triton.jit
def vector(pointer, channels, d_inner):
    """(d,) of a parameter."""
    return tl.load(pointer + channels, mask=channels < d_inner, other=0.0).to(tl.float32)


@triton.jit
def taps_of(weight, channels, d_inner, WIDTH: tl.constexpr):
    taps = ()
    for j in tl.static_range(WIDTH):
        taps += (tl.load(weight + channels * WIDTH + j, mask=channels < d_inner, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def zeros(channels, ROWS: tl.constexpr):
    rows = ()
    for _ in tl.static_range(ROWS):
        rows += (tl.zeros(channels.shape, tl.float32),)
    return rows


@triton.jit
def scaled(rows, factor):
    result = ()
    for j in tl.static_range(len(rows)):
        result += (rows[j] * factor,)
    return result


@triton.jit
def rows_from(at, stride, t, end, channels, d_inner, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """Tokens t, t + 1, …, of which t is at the pointers; zeros from token `end` on."""
    rows = ()
    for k in tl.static_range(ROWS):
        row = tl.load(at + k * stride, mask=channels < tl.where(t + k < end, d_inner, 0), other=0.0)
        if PRECISION == "bf16" and row.dtype == tl.bfloat16:
            rows += (tl.inline_asm_elementwise(TO_FLOAT32, "=r,=r,r", [row], tl.float32, is_pure=True, pack=2),)
        else:
            rows += (row.to(tl.float32),)
    return rows


@triton.jit
def store_rows(at, stride, rows, t, end, channels, d_inner):
    """Tokens t, t + 1, … as far as they are before `end`."""
    for k in tl.static_range(len(rows)):
        mask = channels < tl.where(t + k < end, d_inner, 0)
        tl.store(at + k * stride, rows[k].to(at.dtype.element_ty), mask=mask)


@triton.jit
def in_tails(sequence, d_inner, WIDTH: tl.constexpr):
    """Where a sequence's tail begins."""
    return sequence.to(tl.int64) * (WIDTH - 1) * d_inner


@triton.jit
def rows_before(at, stride, tail, sequence, t, channels, d_inner, WIDTH: tl.constexpr):
    """The width - 1 tokens before t, which is at the pointers; the tail's where the sequence has not yet begun."""
    rows = ()
    for k in tl.static_range(WIDTH - 1):
        begun = t + k >= WIDTH - 1
        row = tl.load(at + (k - (WIDTH - 1)) * stride, mask=channels < tl.where(begun, d_inner, 0), other=0.0)
        row = row.to(tl.float32)
        if tail is not None:
            past = tail + in_tails(sequence, d_inner, WIDTH) + (t + k) * d_inner
            row += tl.load(past + channels, mask=channels < tl.where(begun, 0, d_inner), other=0.0).to(tl.float32)
        rows += (row,)
    return rows


@triton.jit
def convolved(totals, taps, rows):
    """`totals_k + sum_j taps_j rows_{k + j}`; taps in reverse take gradients back to a convolution's input."""
    result = ()
    for k in tl.static_range(len(totals)):
        total = totals[k]
        for j in tl.static_range(len(taps)):
            total += taps[j] * rows[k + j]
        result += (total,)
    return result


@triton.jit
def pulled_before(totals, taps, gradients):
    """`convolved` with taps in reverse for the tokens before a sequence, whose first gradients these are."""
    result = ()
    for k in tl.static_range(len(totals)):
        total = totals[k]
        for j in tl.static_range(k + 1):
            total += taps[len(totals) - k + j] * gradients[j]
        result += (total,)
    return result


@triton.jit
def summed(sums, gradients, rows):
    """sums, the gradients of a bias and of taps, and what the gradients of a convolution of rows add to them."""
    for k in tl.static_range(len(gradients)):
        result = (sums[0] + gradients[k],)
        for j in tl.static_range(len(sums) - 1):
            result += (sums[1 + j] + gradients[k] * rows[k + j],)
        sums = result
    return sums


@triton.jit
def store_sums(partial, sums, channels, d_inner):
    for j in tl.static_range(len(sums)):
        tl.store(partial + j * d_inner + channels, sums[j], mask=channels < d_inner)


@triton.jit
def silu(rows, PRECISION: tl.constexpr):
    result = ()
    for k in tl.static_range(len(rows)):
        result += (rows[k] * sigmoid(rows[k], PRECISION),)
    return result


@triton.jit
def silu_pulled(rows, gradients, PRECISION: tl.constexpr):
    """The gradients of rows from those of `silu(rows)`."""
    result = ()
    for k in tl.static_range(len(rows)):
        opened = sigmoid(rows[k], PRECISION)
        result += (gradients[k] * opened * (1.0 + rows[k] * (1.0 - opened)),)
    return result


@triton.jit
def exponents(rows, offset):
    """`-log2(e)` times rows, and an offset."""
    result = ()
    for k in tl.static_range(len(rows)):
        result += (offset - rows[k] * LOG2E,)
    return result


@triton.jit
def held(rows, t, end, value):
    """Tokens t, t + 1, …; a value from token `end` on."""
    result = ()
    for k in tl.static_range(len(rows)):
        result += (tl.where(t + k < end, rows[k], value),)
    return result


@triton.jit(do_not_specialize=WALK_ARGUMENTS)
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
    walk,
    d_inner,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    BD: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
):
    """`silu(conv(u))`"""
    piece, channels = split_program(d_inner, BD)
    taps, offset = taps_of(weight, channels, d_inner, WIDTH), vector(bias, channels, d_inner)
    chunk, end = chunks_of_program(piece, first_chunks, sequences, chunks, walk, PACKED)
    while chunk < end:
        sequence, start, _, first, last, chunk = run_from(
            chunk, end, boundaries, chunk_owners, first_chunks, length, chunks, CHUNK, PACKED
        )
        u_at, out_at = u + (start + first) * u_stride + channels, out + (start + first) * d_inner + channels
        before = rows_before(u_at, u_stride, tail, sequence, first, channels, d_inner, WIDTH)
        for t in range(first, last, STEP):
            rows = before + rows_from(u_at, u_stride, t, last, channels, d_inner, STEP, PRECISION)
            totals = convolved((offset,) * STEP, taps, rows)
            store_rows(out_at, d_inner, silu(totals, PRECISION), t, last, channels, d_inner)
            before = rows[STEP:]
            u_at += STEP * u_stride
            out_at += STEP * d_inner


@triton.jit(do_not_specialize=WALK_ARGUMENTS)
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
    lengths,
    boundaries,
    chunk_owners,
    first_chunks,
    length,
    sequences,
    chunks,
    walk,
    d_inner,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    BD: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    HELD: tl.constexpr,
    PACKED: tl.constexpr,
):
    """log2 of both gates, of `W h + conv(h) + bias`, in place of their projections and in as many bytes.

    HELD: beyond its real length, `lengths`, a sequence holds its state.
    """
    DTYPE: tl.constexpr = tl.float32 if f_logit.dtype.element_ty == tl.float32 else tl.float16
    POINTER: tl.constexpr = tl.pointer_type(DTYPE)
    piece, channels = split_program(d_inner, BD)
    f_weights = scaled(taps_of(f_taps, channels, d_inner, WIDTH), -LOG2E)
    i_weights = scaled(taps_of(i_taps, channels, d_inner, WIDTH), -LOG2E)
    f_offset, i_offset = vector(f_bias, channels, d_inner) * -LOG2E, vector(i_bias, channels, d_inner) * -LOG2E
    chunk, end = chunks_of_program(piece, first_chunks, sequences, chunks, walk, PACKED)
    while chunk < end:
        sequence, start, _, first, last, chunk = run_from(
            chunk, end, boundaries, chunk_owners, first_chunks, length, chunks, CHUNK, PACKED
        )
        real = tl.load(lengths + sequence) if HELD else last
        h_at = h + (start + first) * d_inner + channels
        f_at, i_at = f_logit + (start + first) * f_stride + channels, i_logit + (start + first) * i_stride + channels
        before = rows_before(h_at, d_inner, tail, sequence, first, channels, d_inner, WIDTH)
        for t in range(first, last, STEP):
            rows = before + rows_from(h_at, d_inner, t, last, channels, d_inner, STEP, PRECISION)
            f_rows = rows_from(f_at, f_stride, t, last, channels, d_inner, STEP, PRECISION)
            i_rows = rows_from(i_at, i_stride, t, last, channels, d_inner, STEP, PRECISION)
            f_rows = convolved(exponents(f_rows, f_offset), f_weights, rows)
            i_rows = convolved(exponents(i_rows, i_offset), i_weights, rows)
            if HELD:
                f_rows, i_rows = held(f_rows, t, real, -float("inf")), held(i_rows, t, real, float("inf"))
            log_f, log_i = stored_gates(f_rows, DTYPE, PRECISION), stored_gates(i_rows, DTYPE, PRECISION)
            store_rows(f_at.to(POINTER, bitcast=True), f_stride, log_f, t, last, channels, d_inner)
            store_rows(i_at.to(POINTER, bitcast=True), i_stride, log_i, t, last, channels, d_inner)
            before = rows[STEP:]
            h_at += STEP * d_inner
            f_at += STEP * f_stride
            i_at += STEP * i_stride


@triton.jit(do_not_specialize=WALK_ARGUMENTS)
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
    walk,
    d_inner,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    BD: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Adds to dh what came through both gates; `partial` (program, 2, 1 + width, d): bias and taps."""
    piece, channels = split_program(d_inner, BD)
    f_back = taps_of(f_taps, channels, d_inner, WIDTH)[::-1]
    i_back = taps_of(i_taps, channels, d_inner, WIDTH)[::-1]
    f_sums, i_sums = zeros(channels, 1 + WIDTH), zeros(channels, 1 + WIDTH)
    chunk, end = chunks_of_program(piece, first_chunks, sequences, chunks, walk, PACKED)
    while chunk < end:
        sequence, start, tokens, first, last, chunk = run_from(
            chunk, end, boundaries, chunk_owners, first_chunks, length, chunks, CHUNK, PACKED
        )
        h_at, dh_at = h + (start + first) * d_inner + channels, dh + (start + first) * d_inner + channels
        f_at, i_at = df + (start + first) * d_stride + channels, di + (start + first) * d_stride + channels
        before = rows_before(h_at, d_inner, tail, sequence, first, channels, d_inner, WIDTH)
        f_rows = rows_from(f_at, d_stride, first, tokens, channels, d_inner, WIDTH - 1, PRECISION)
        i_rows = rows_from(i_at, d_stride, first, tokens, channels, d_inner, WIDTH - 1, PRECISION)
        if dtail is not None:
            dtails = pulled_before(zeros(channels, WIDTH - 1), f_back, f_rows)
            dtails = pulled_before(dtails, i_back, i_rows)
            dtail_at = dtail + in_tails(sequence, d_inner, WIDTH) + channels
            store_rows(dtail_at, d_inner, dtails, first, WIDTH - 1, channels, d_inner)
        f_at += (WIDTH - 1) * d_stride
        i_at += (WIDTH - 1) * d_stride
        for t in range(first, last, STEP):
            rows = before + rows_from(h_at, d_inner, t, last, channels, d_inner, STEP, PRECISION)
            f_rows += rows_from(f_at, d_stride, t + WIDTH - 1, tokens, channels, d_inner, STEP, PRECISION)
            i_rows += rows_from(i_at, d_stride, t + WIDTH - 1, tokens, channels, d_inner, STEP, PRECISION)
            direct = rows_from(dh_at, d_inner, t, last, channels, d_inner, STEP, PRECISION)
            dh_rows = convolved(convolved(direct, f_back, f_rows), i_back, i_rows)
            store_rows(dh_at, d_inner, dh_rows, t, last, channels, d_inner)
            f_sums, i_sums = summed(f_sums, f_rows[:STEP], rows), summed(i_sums, i_rows[:STEP], rows)
            before, f_rows, i_rows = rows[STEP:], f_rows[STEP:], i_rows[STEP:]
            h_at += STEP * d_inner
            dh_at += STEP * d_inner
            f_at += STEP * d_stride
            i_at += STEP * d_stride
    store_sums(partial + piece.to(tl.int64) * 2 * (1 + WIDTH) * d_inner, f_sums + i_sums, channels, d_inner)


@triton.jit(do_not_specialize=WALK_ARGUMENTS)
def convolve_silu_backward(
    dout,
    u,
    u_stride,
    tail,
    weight,
    bias,
    du,
    du_stride,
    dtail,
    partial,
    boundaries,
    chunk_owners,
    first_chunks,
    length,
    sequences,
    chunks,
    walk,
    d_inner,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    BD: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
):
    """du, and `partial` (program, 1 + width, d): bias and taps.

    The gradient of the convolution's sum, dtotal, is made width - 1 tokens ahead of du.
    """
    piece, channels = split_program(d_inner, BD)
    taps, offset = taps_of(weight, channels, d_inner, WIDTH), vector(bias, channels, d_inner)
    sums = zeros(channels, 1 + WIDTH)
    chunk, end = chunks_of_program(piece, first_chunks, sequences, chunks, walk, PACKED)
    while chunk < end:
        sequence, start, tokens, first, last, chunk = run_from(
            chunk, end, boundaries, chunk_owners, first_chunks, length, chunks, CHUNK, PACKED
        )
        u_at, du_at = u + (start + first) * u_stride + channels, du + (start + first) * du_stride + channels
        dout_at = dout + (start + first) * d_inner + channels
        before = rows_before(u_at, u_stride, tail, sequence, first, channels, d_inner, WIDTH)
        before += rows_from(u_at, u_stride, first, tokens, channels, d_inner, WIDTH - 1, PRECISION)
        dtotals = rows_from(dout_at, d_inner, first, tokens, channels, d_inner, WIDTH - 1, PRECISION)
        dtotals = silu_pulled(convolved((offset,) * (WIDTH - 1), taps, before), dtotals, PRECISION)
        sums = summed(sums, dtotals, before)
        if dtail is not None:
            dtails = pulled_before(zeros(channels, WIDTH - 1), taps[::-1], dtotals)
            dtail_at = dtail + in_tails(sequence, d_inner, WIDTH) + channels
            store_rows(dtail_at, d_inner, dtails, first, WIDTH - 1, channels, d_inner)
        before = before[WIDTH - 1 :]
        u_at += (WIDTH - 1) * u_stride
        dout_at += (WIDTH - 1) * d_inner
        for t in range(first, last, STEP):
            rows = before + rows_from(u_at, u_stride, t + WIDTH - 1, tokens, channels, d_inner, STEP, PRECISION)
            dout_rows = rows_from(dout_at, d_inner, t + WIDTH - 1, tokens, channels, d_inner, STEP, PRECISION)
            new = silu_pulled(convolved((offset,) * STEP, taps, rows), dout_rows, PRECISION)
            sums = summed(sums, held(new, t + WIDTH - 1, last, 0.0), rows)
            dtotals += new
            du_rows = convolved(zeros(channels, STEP), taps[::-1], dtotals)
            store_rows(du_at, du_stride, du_rows, t, last, channels, d_inner)
            before, dtotals = rows[STEP:], dtotals[STEP:]
            u_at += STEP * u_stride
            dout_at += STEP * d_inner
            du_at += STEP * du_stride
    store_sums(partial + piece.to(tl.int64) * (1 + WIDTH) * d_inner, sums, channels, d_inner)
