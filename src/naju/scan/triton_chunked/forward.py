"""The forward kernels: where every segment ends, what enters it, and what it puts out."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from naju.scan.triton_chunked.algebra import (
    advance,
    decay_from_start,
    exp2,
    product,
    read_block,
    sigmoid,
    sums,
    token_pairs,
    total,
    unpacked,
    unpacked_gate,
)
from naju.scan.triton_chunked.pieces import (
    LENGTH_ARGUMENTS,
    chunk_of_segment,
    first_row,
    load,
    piece_of_sequence,
    rest_of_sequence,
    rows_of,
    sequence_rows,
    split_program,
    store,
)


@triton.jit(do_not_specialize=LENGTH_ARGUMENTS)
def states(
    log_f,
    f_stride,
    value,
    value_stride,
    gate,
    gate_stride,
    keys,
    keys_stride,
    ends,
    decays,
    boundaries,
    owners,
    firsts,
    length,
    sequences,
    segments,
    segment,
    alpha,
    d_inner,
    d_state,
    BLOCK: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
    ADJOINT: tl.constexpr,
    HAS_GATE: tl.constexpr,
    REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Runs each segment from a zero state; writes where it ends and how much of another start would be left there.

    Adjoint: the same for the gradient of the state, from the segment's end to its start; `value`, `gate` and `keys` are
    then dy, z and C instead of h, log2 of the write gate, and B. Segments whose end nobody needs are skipped.
    """
    index, channels = split_program(d_inner, BD)
    sequence, place = piece_of_sequence(index, owners, firsts, segments, PACKED)
    if sequence >= sequences:
        return
    start, stop = sequence_rows(sequence, boundaries, length, PACKED)
    remaining = stop - start - place.to(tl.int64) * segment
    is_last = place == 0 if ADJOINT else remaining <= segment
    if is_last:
        return
    tokens = tl.minimum(remaining, segment).to(tl.int32)
    origin = first_row(start, stop, place.to(tl.int64) * segment, REVERSE)
    columns = tl.arange(0, BN)
    state = tl.zeros((BD, BN), dtype=tl.float32)
    log_decays = tl.zeros((BD,), dtype=tl.float32)
    steps = tl.cdiv(tokens, BLOCK)
    for step in range(steps):
        rows, inside = rows_of(origin, steps - 1 - step if ADJOINT else step, tokens, BLOCK, REVERSE)
        mask = (channels < d_inner)[:, None] & inside[None, :]
        g = load(log_f, f_stride, rows[None, :], channels[:, None], mask)
        v = load(value, value_stride, rows[None, :], channels[:, None], mask)
        key = load(keys, keys_stride, rows[:, None], columns[None, :], inside[:, None] & (columns < d_state)[None, :])
        if HAS_GATE:
            tile = load(gate, gate_stride, rows[None, :], channels[:, None], mask)
        v = unpacked(v, PRECISION)
        j, t = token_pairs(BLOCK)
        exponent = sums(g, j <= t if ADJOINT else j > t)
        if HAS_GATE:
            if ADJOINT:
                tile = unpacked(tile, PRECISION)
                v *= tile * sigmoid(tile, PRECISION)
            else:
                exponent += unpacked_gate(tile, PRECISION)
        log_decay = total(g, BLOCK)
        state = state * exp2(log_decay, PRECISION)[:, None] + product(v * exp2(exponent, PRECISION), key, PRECISION)
        log_decays += log_decay
    if ADJOINT:
        state *= alpha
    in_state = (index.to(tl.int64) * d_inner + channels[:, None]) * d_state + columns[None, :]
    tl.store(ends + in_state, state, mask=(channels < d_inner)[:, None] & (columns < d_state)[None, :])
    decay = exp2(log_decays, PRECISION)
    tl.store(decays + index.to(tl.int64) * d_inner + channels, decay, mask=channels < d_inner)


@triton.jit(do_not_specialize=LENGTH_ARGUMENTS)
def carry(
    ends,
    decays,
    initial,
    entering,
    firsts,
    segments,
    d_inner,
    d_state,
    BLOCK: tl.constexpr,
    ADJOINT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The state that enters each segment; adjoint: the gradient of that which leaves it. From 0 without `initial`."""
    size = d_inner * d_state
    sequence, element = split_program(size, BLOCK)
    mask = element < size
    if PACKED:
        first = tl.load(firsts + sequence)
        count = tl.load(firsts + sequence + 1) - first
    else:
        first = sequence * segments
        count = segments
    state = tl.zeros((BLOCK,), dtype=tl.float32)
    if initial is not None:
        state = tl.load(initial + sequence.to(tl.int64) * size + element, mask=mask, other=0.0)
    for step in range(count):
        index = (first + (count - 1 - step if ADJOINT else step)).to(tl.int64)
        tl.store(entering + index * size + element, state, mask=mask)
        if step < count - 1:
            decay = tl.load(decays + index * d_inner + element // d_state, mask=mask, other=0.0)
            state = decay * state + tl.load(ends + index * size + element, mask=mask, other=0.0)


@triton.jit(do_not_specialize=LENGTH_ARGUMENTS)
def outputs(
    h,
    h_stride,
    log_f,
    f_stride,
    log_i,
    i_stride,
    z,
    z_stride,
    B,
    B_stride,
    C,
    C_stride,
    D,
    entering,
    y,
    y_stride,
    final,
    kept,
    boundaries,
    owners,
    firsts,
    first_chunks,
    length,
    sequences,
    segments,
    segment,
    chunks,
    carried,
    alpha,
    d_inner,
    d_state,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    LEAF: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr,
    KEEP: tl.constexpr,
    REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """y of one segment, which starts from the state `entering` it if `carried` is 1, from zero if 0; the last
    segment of a sequence writes the final state; KEEP writes it before every block."""
    index, channels = split_program(d_inner, BD)
    sequence, place = piece_of_sequence(index, owners, firsts, segments, PACKED)
    if sequence >= sequences:
        return
    remaining, origin = rest_of_sequence(sequence, place, segment, boundaries, length, REVERSE, PACKED)
    tokens = tl.minimum(remaining, segment).to(tl.int32)
    first_chunk = chunk_of_segment(sequence, place, first_chunks, chunks, segment // CHUNK, PACKED)
    size = d_inner * d_state
    columns = tl.arange(0, BN)
    state_mask = (channels < d_inner)[:, None] & (columns < d_state)[None, :]
    in_state = channels[:, None] * d_state + columns[None, :]
    entering += index.to(tl.int64) * size
    state = tl.load(entering + in_state, mask=state_mask & (columns < carried * d_state)[None, :], other=0.0)
    if HAS_D:
        skip = tl.load(D + channels, mask=channels < d_inner, other=0.0).to(tl.float32)[:, None]
    for block in range(tl.cdiv(tokens, BLOCK)):
        rows, inside = rows_of(origin, block, tokens, BLOCK, REVERSE)
        mask = (channels < d_inner)[:, None] & inside[None, :]
        keys_mask = inside[:, None] & (columns < d_state)[None, :]
        g = load(log_f, f_stride, rows[None, :], channels[:, None], mask)
        i_tile = load(log_i, i_stride, rows[None, :], channels[:, None], mask)
        drive = load(h, h_stride, rows[None, :], channels[:, None], mask)
        key = load(B, B_stride, rows[:, None], columns[None, :], keys_mask)
        query = load(C, C_stride, rows[:, None], columns[None, :], keys_mask)
        if HAS_Z:
            z_tile = load(z, z_stride, rows[None, :], channels[:, None], mask)
        if KEEP:
            before = (first_chunk * (CHUNK // BLOCK) + block) * size
            tl.store(kept + before + in_state, state.to(kept.dtype.element_ty), mask=state_mask)
        drive = unpacked(drive, PRECISION)
        v = drive * exp2(unpacked_gate(i_tile, PRECISION), PRECISION)
        from_start = decay_from_start(g, BLOCK, PRECISION)
        m = from_start * product(state, tl.trans(query), PRECISION)
        m += read_block(g, v, product(key, tl.trans(query), PRECISION), LEAF, LEVELS, BLOCK, PRECISION)
        state = advance(state, g, v, key, BLOCK, PRECISION)
        out = alpha * m
        if HAS_D:
            out += skip * drive
        if HAS_Z:
            z_tile = unpacked(z_tile, PRECISION)
            out *= z_tile * sigmoid(z_tile, PRECISION)
        store(y, y_stride, rows[None, :], channels[:, None], out, mask)
    if remaining <= segment:
        tl.store(final + sequence.to(tl.int64) * size + in_state, state, mask=state_mask)
