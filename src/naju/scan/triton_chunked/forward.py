"""The forward kernels, and the algebra of one block of tokens that the backward shares.

Tiles are channel-major, (d, t): channels are the rows of every matrix product, the state (d, n) never leaves registers,
and one table of scores (B_s · C_t) serves all channels of a block. `g` is log2 of the forget gate.

A pair of tokens s < t needs the decay 2^(g_{s+1} + … + g_t). A block is a binary tree over its tokens, and the pair
belongs to the smallest node that holds both, s in its left half and t in its right: the decay is then what s keeps on
its way to the node's middle times what t keeps from there on. Both factors are products of gates, at most 1, and sums
of g never leave a node, so nothing overflows and no two long sums are subtracted, however strongly a gate forgets.
Level k of the tree has nodes of 2^(k+1) tokens; each level is one matrix product. Half precision replaces the levels
below `LEAF` tokens by one product around the leaf's middle, with g floored so that neither factor overflows.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# 2^-1000 is 0, sixty-four of them still sum in float32, and 64 times it is within float16.
LEAST_G = tl.constexpr(-1000.0)
# In a leaf of 16 tokens the largest factor is then 2^115; a gate of 2^-14.4 is 0 to half precision.
LEAF_LEAST_G = tl.constexpr(-14.4)
# `sums` adds g as float16: scaled up by 64, gates near 1 stay clear of its subnormal numbers.
G_SCALE = tl.constexpr(64.0)


@triton.jit
def exp2(x, PRECISION: tl.constexpr):
    """The hardware's instruction, without the care for subnormal results that surrounds it in `tl.exp2`."""
    if PRECISION == "bf16" or PRECISION == "tf32":
        result = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1)
    else:
        result = tl.exp2(x)
    return result


@triton.jit
def log2(x, PRECISION: tl.constexpr):
    """Declared impure, like `reciprocal`, so that a gate is not computed once for every layout that wants it."""
    if PRECISION == "bf16" or PRECISION == "tf32":
        result = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, False, 1)
    else:
        result = tl.log2(x)
    return result


@triton.jit
def reciprocal(x, PRECISION: tl.constexpr):
    if PRECISION == "bf16" or PRECISION == "tf32":
        result = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, False, 1)
    else:
        result = 1.0 / x
    return result


@triton.jit
def log2_sigmoid(x, PRECISION: tl.constexpr):
    """At most 0, and exact to rounding near 0 too, where 1 + u has lost the digits of u."""
    u = exp2(-x * LOG2E, PRECISION)
    series = u * (LOG2E - u * (0.5 * LOG2E - u * (0.3333333333 * LOG2E)))
    if PRECISION == "ieee":
        series += u * u * u * u * (-0.25 * LOG2E)
    log = tl.where(u < 0.015625, series, log2(1.0 + u, PRECISION))
    return tl.maximum(-log, LEAST_G, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sigmoid(x, PRECISION: tl.constexpr):
    return reciprocal(1.0 + exp2(-x * LOG2E, PRECISION), PRECISION)


@triton.jit
def rounded_to_bfloat16(x):
    """To the nearest, as a GPU does it, in integers: the interpreter cuts the digits off."""
    bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a @ b in float32; PRECISION is "bf16" for rounded operands, else the input_precision of `tl.dot`.

    "rounded" is "bf16" for the interpreter, which cannot multiply bfloat16.
    """
    if PRECISION == "bf16":
        result = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    elif PRECISION == "rounded":
        result = tl.dot(rounded_to_bfloat16(a), rounded_to_bfloat16(b), input_precision="ieee")
    else:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
    return result


@triton.jit
def rounded(x, PRECISION: tl.constexpr):
    """x as `product` sees it."""
    if PRECISION == "bf16":
        x = x.to(tl.bfloat16).to(tl.float32)
    elif PRECISION == "rounded":
        x = rounded_to_bfloat16(x)
    return x


@triton.jit
def sums(g, weights, PRECISION: tl.constexpr, TOKEN_MAJOR: tl.constexpr = False):
    """(d, t) of the sums of g over the tokens j, each with its weight[j, t]; token-major: g and the sums are (t, d)."""
    weights = weights.to(tl.float32)
    if TOKEN_MAJOR:
        weights = tl.trans(weights)
    if PRECISION != "ieee":
        g = (g * G_SCALE).to(tl.float16)
        weights = (weights / G_SCALE).to(tl.float16)
    left, right = (weights, g) if TOKEN_MAJOR else (g, weights)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def token_pairs(BLOCK: tl.constexpr):
    """Token numbers as a column and as a row."""
    t = tl.arange(0, BLOCK)
    return t[:, None], t[None, :]


@triton.jit
def decay_from_start(g, BLOCK: tl.constexpr, PRECISION: tl.constexpr, TOKEN_MAJOR: tl.constexpr = False):
    """What is left at each token of the state that enters the block."""
    j, t = token_pairs(BLOCK)
    return exp2(sums(g, j <= t, PRECISION, TOKEN_MAJOR), PRECISION)


@triton.jit
def decay_to_end(g, BLOCK: tl.constexpr, PRECISION: tl.constexpr, TOKEN_MAJOR: tl.constexpr = False):
    """What is left at the block's end of the write at each token."""
    j, t = token_pairs(BLOCK)
    return exp2(sums(g, j > t, PRECISION, TOKEN_MAJOR), PRECISION)


@triton.jit
def at_last(tile, BLOCK: tl.constexpr):
    """The last token's column (d,)."""
    _, t = token_pairs(BLOCK)
    return tl.sum(tl.where(t == BLOCK - 1, tile, 0.0), axis=1)


@triton.jit
def total(g, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """The sum of g over the block (d,): by a product like all others, lest g be computed again in another layout."""
    j, t = token_pairs(BLOCK)
    return tl.sum(tl.where(t == 0, sums(g, j >= t, PRECISION), 0.0), axis=1)


@triton.jit
def decay_to_middle(
    g, LEVEL: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, TOKEN_MAJOR: tl.constexpr = False
):
    """Left halves: what the write has left at the node's middle. Right halves: what a token keeps from there on."""
    j, t = token_pairs(BLOCK)
    if LEVEL == 0:
        token = j if TOKEN_MAJOR else t
        exponent = tl.where((token & 1) == 1, g, 0.0)
    else:
        same_half = (j >> LEVEL) == (t >> LEVEL)
        on_the_way = tl.where(((t >> LEVEL) & 1) == 1, j <= t, j > t)
        exponent = sums(g, same_half & on_the_way, PRECISION, TOKEN_MAJOR)
    return exp2(exponent, PRECISION)


@triton.jit
def crosses(s, t, LEVEL: tl.constexpr):
    """Whether s is in the left and t in the right half of one node of this level."""
    return ((s >> LEVEL) + 1 == (t >> LEVEL)) & (((t >> LEVEL) & 1) == 1)


@triton.jit
def leaf_exponent(
    g, LEAF: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, TOKEN_MAJOR: tl.constexpr = False
):
    """The sum of floored g from the leaf's middle to each token; counted negative to the middle's left."""
    j, t = token_pairs(BLOCK)
    HALF: tl.constexpr = LEAF // 2
    right = ((t // HALF) & 1) == 1
    sign = tl.where(right, tl.where(j <= t, 1.0, 0.0), tl.where(j > t, -1.0, 0.0))
    weights = tl.where((j // HALF) == (t // HALF), sign, 0.0)
    return sums(tl.maximum(g, LEAF_LEAST_G, propagate_nan=tl.PropagateNan.ALL), weights, PRECISION, TOKEN_MAJOR)


@triton.jit
def read_block(g, v, scores, LEAF: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """What each token reads (d, t) of the writes of its own block, its own included; scores[s, t] = B_s · C_t."""
    s, t = token_pairs(BLOCK)
    if LEAF == 1:
        m = v * tl.sum(tl.where(s == t, scores, 0.0), axis=0)[None, :]
    else:
        exponent = leaf_exponent(g, LEAF, BLOCK, PRECISION)
        within = tl.where((s // LEAF == t // LEAF) & (s <= t), scores, 0.0)
        m = exp2(exponent, PRECISION) * product(v * exp2(-exponent, PRECISION), within, PRECISION)
    for level in tl.static_range(LEVELS):
        if (2 << level) > LEAF:
            decay = decay_to_middle(g, level, BLOCK, PRECISION)
            m += decay * product(v * decay, tl.where(crosses(s, t, level), scores, 0.0), PRECISION)
    return m


@triton.jit
def split_program(size, BLOCK: tl.constexpr):
    """A program's piece, and its block of `size` channels: blocks that read the same tokens are neighbours."""
    blocks = tl.cdiv(size, BLOCK)
    block = tl.program_id(0) % blocks
    return tl.program_id(0) // blocks, block * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def sequence_rows(sequence, boundaries, length, PACKED: tl.constexpr):
    """First and end row of a sequence in the flattened (b · l, ·) tensors."""
    if PACKED:
        start = tl.load(boundaries + sequence).to(tl.int64)
        stop = tl.load(boundaries + sequence + 1).to(tl.int64)
    else:
        start = sequence.to(tl.int64) * length
        stop = start + length
    return start, stop


@triton.jit
def piece_of_sequence(piece, owners, firsts, pieces, PACKED: tl.constexpr):
    """Which sequence a segment or chunk belongs to, and its place in it.

    Packed sequences have `owners` (the sequence of each piece; their number for pieces beyond the last) and `firsts`
    (the first piece of each sequence); otherwise every sequence has `pieces` of them.
    """
    if PACKED:
        sequence = tl.load(owners + piece)
        place = piece - tl.load(firsts + sequence)
    else:
        sequence = piece // pieces
        place = piece % pieces
    return sequence, place


@triton.jit
def chunk_of_segment(sequence, place, first_chunks, chunks, chunks_in_segment, PACKED: tl.constexpr):
    """The number of a segment's first chunk among all chunks of all sequences."""
    first = tl.load(first_chunks + sequence).to(tl.int64) if PACKED else sequence.to(tl.int64) * chunks
    return first + place * chunks_in_segment


@triton.jit
def first_row(start, stop, token, REVERSE: tl.constexpr):
    """The row of a sequence's token, counted in the direction of the scan."""
    return stop - 1 - token if REVERSE else start + token


@triton.jit
def rows_of(origin, block, tokens, BLOCK: tl.constexpr, REVERSE: tl.constexpr):
    """The rows of a block's tokens, and which of them are in the segment."""
    t = block * BLOCK + tl.arange(0, BLOCK)
    return origin - t if REVERSE else origin + t, t < tokens


@triton.jit
def load_block(
    h,
    h_stride,
    f_logit,
    f_stride,
    i_logit,
    i_stride,
    z,
    z_stride,
    B,
    B_stride,
    C,
    C_stride,
    rows,
    inside,
    channels,
    d_inner,
    columns,
    d_state,
    HAS_Z: tl.constexpr,
):
    """Tiles of h, both logits, z (d, t), B and C (t, n), as they lie in memory."""
    mask = (channels < d_inner)[:, None] & inside[None, :]
    keys_mask = inside[:, None] & (columns < d_state)[None, :]
    tile, keys = rows[None, :], rows[:, None]
    drive = tl.load(h + tile * h_stride + channels[:, None], mask=mask, other=0.0)
    f_tile = tl.load(f_logit + tile * f_stride + channels[:, None], mask=mask, other=float("inf"))
    i_tile = tl.load(i_logit + tile * i_stride + channels[:, None], mask=mask, other=0.0)
    z_tile = tl.load(z + tile * z_stride + channels[:, None], mask=mask, other=0.0) if HAS_Z else drive
    key = tl.load(B + keys * B_stride + columns[None, :], mask=keys_mask, other=0.0)
    query = tl.load(C + keys * C_stride + columns[None, :], mask=keys_mask, other=0.0)
    return drive, f_tile, i_tile, z_tile, key, query


@triton.jit
def load_tile(pointer, stride, rows, columns, mask, other):
    return tl.load(pointer + rows * stride + columns, mask=mask, other=other).to(tl.float32)


LENGTH_ARGUMENTS = ["length", "sequences", "segments", "segment", "chunks", "n_chunks"]


@triton.jit(do_not_specialize=LENGTH_ARGUMENTS)
def states(
    f_logit,
    f_stride,
    value,
    value_stride,
    gate,
    gate_stride,
    keys,
    keys_stride,
    entering,
    ends,
    decays,
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
    alpha,
    d_inner,
    d_state,
    BLOCK: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
    SWEEP: tl.constexpr,
    ADJOINT: tl.constexpr,
    HAS_GATE: tl.constexpr,
    REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Runs each segment from a zero state; writes where it ends and how much of another start would be left there.

    Adjoint: the same for the gradient of the state, from the segment's end to its start; `value`, `gate` and `keys` are
    then dy, z and C instead of h, i_logit and B. Segments whose end nobody needs are skipped.
    SWEEP starts from `entering`, writes the state before every chunk to `kept`, and `ends` has one row a sequence.
    """
    index, channels = split_program(d_inner, BD)
    sequence, place = piece_of_sequence(index, owners, firsts, segments, PACKED)
    if sequence >= sequences:
        return
    start, stop = sequence_rows(sequence, boundaries, length, PACKED)
    remaining = stop - start - place.to(tl.int64) * segment
    is_last = place == 0 if ADJOINT else remaining <= segment
    if not SWEEP:  # noqa: SIM102 (a constant and a value of the device)
        if is_last:
            return
    tokens = tl.minimum(remaining, segment).to(tl.int32)
    origin = first_row(start, stop, place.to(tl.int64) * segment, REVERSE)
    first_chunk = chunk_of_segment(sequence, place, first_chunks, chunks, segment // BLOCK, PACKED)
    size = d_inner * d_state
    columns = tl.arange(0, BN)
    state_mask = (channels < d_inner)[:, None] & (columns < d_state)[None, :]
    in_state = channels[:, None] * d_state + columns[None, :]
    if SWEEP:
        state = tl.load(entering + index.to(tl.int64) * size + in_state, mask=state_mask, other=0.0)
    else:
        state = tl.zeros((BD, BN), dtype=tl.float32)
    log_decays = tl.zeros((BD,), dtype=tl.float32)
    steps = tl.cdiv(tokens, BLOCK)
    for step in range(steps):
        block = steps - 1 - step if ADJOINT else step
        t = block * BLOCK + tl.arange(0, BLOCK)
        rows = origin - t if REVERSE else origin + t
        mask = (channels < d_inner)[:, None] & (t < tokens)[None, :]
        if SWEEP:
            chunk = (first_chunk + block) * size
            tl.store(kept + chunk + in_state, state.to(kept.dtype.element_ty), mask=state_mask)
        g = log2_sigmoid(load_tile(f_logit, f_stride, rows[None, :], channels[:, None], mask, float("inf")), PRECISION)
        v = load_tile(value, value_stride, rows[None, :], channels[:, None], mask, 0.0)
        if HAS_GATE:
            logit = load_tile(gate, gate_stride, rows[None, :], channels[:, None], mask, 0.0)
            v *= logit * sigmoid(logit, PRECISION) if ADJOINT else sigmoid(logit, PRECISION)
        if ADJOINT:
            v *= alpha
        keys_mask = (t < tokens)[:, None] & (columns < d_state)[None, :]
        key = load_tile(keys, keys_stride, rows[:, None], columns[None, :], keys_mask, 0.0)
        decay = decay_from_start(g, BLOCK, PRECISION) if ADJOINT else decay_to_end(g, BLOCK, PRECISION)
        log_decay = total(g, BLOCK, PRECISION)
        state = state * exp2(log_decay, PRECISION)[:, None] + product(v * decay, key, PRECISION)
        log_decays += log_decay
    if SWEEP:
        if is_last:
            tl.store(ends + sequence.to(tl.int64) * size + in_state, state, mask=state_mask)
    else:
        tl.store(ends + index.to(tl.int64) * size + in_state, state, mask=state_mask)
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
    """The state that enters each segment; adjoint: the gradient of the state that leaves it."""
    size = d_inner * d_state
    sequence, element = split_program(size, BLOCK)
    mask = element < size
    if PACKED:
        first = tl.load(firsts + sequence)
        count = tl.load(firsts + sequence + 1) - first
    else:
        first = sequence * segments
        count = segments
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
    f_logit,
    f_stride,
    i_logit,
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
    PREFETCH: tl.constexpr,
    REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """y of one segment; the last segment of a sequence writes the final state; KEEP writes it before every chunk.

    PREFETCH asks for a block's tiles a whole step before they are needed, at the price of the registers they wait in.
    """
    index, channels = split_program(d_inner, BD)
    sequence, place = piece_of_sequence(index, owners, firsts, segments, PACKED)
    if sequence >= sequences:
        return
    start, stop = sequence_rows(sequence, boundaries, length, PACKED)
    remaining = stop - start - place.to(tl.int64) * segment
    tokens = tl.minimum(remaining, segment).to(tl.int32)
    origin = first_row(start, stop, place.to(tl.int64) * segment, REVERSE)
    first_chunk = chunk_of_segment(sequence, place, first_chunks, chunks, segment // CHUNK, PACKED)
    size = d_inner * d_state
    columns = tl.arange(0, BN)
    state_mask = (channels < d_inner)[:, None] & (columns < d_state)[None, :]
    in_state = channels[:, None] * d_state + columns[None, :]
    state = tl.load(entering + index.to(tl.int64) * size + in_state, mask=state_mask, other=0.0)
    if HAS_D:
        skip = tl.load(D + channels, mask=channels < d_inner, other=0.0).to(tl.float32)[:, None]
    if PREFETCH:
        rows, inside = rows_of(origin, 0, tokens, BLOCK, REVERSE)
        drive, f_tile, i_tile, z_tile, key, query = load_block(
            h, h_stride, f_logit, f_stride, i_logit, i_stride, z, z_stride, B, B_stride, C, C_stride,
            rows, inside, channels, d_inner, columns, d_state, HAS_Z,
        )  # fmt: skip
    for block in range(tl.cdiv(tokens, BLOCK)):
        if PREFETCH:
            next_rows, next_inside = rows_of(origin, block + 1, tokens, BLOCK, REVERSE)
            next_drive, next_f_tile, next_i_tile, next_z_tile, next_key, next_query = load_block(
                h, h_stride, f_logit, f_stride, i_logit, i_stride, z, z_stride, B, B_stride, C, C_stride,
                next_rows, next_inside, channels, d_inner, columns, d_state, HAS_Z,
            )  # fmt: skip
        else:
            rows, inside = rows_of(origin, block, tokens, BLOCK, REVERSE)
            drive, f_tile, i_tile, z_tile, key, query = load_block(
                h, h_stride, f_logit, f_stride, i_logit, i_stride, z, z_stride, B, B_stride, C, C_stride,
                rows, inside, channels, d_inner, columns, d_state, HAS_Z,
            )  # fmt: skip
        if KEEP:  # noqa: SIM102 (a constant and a value of the device)
            if (block % (CHUNK // BLOCK)) == 0:
                chunk = first_chunk + block // (CHUNK // BLOCK)
                tl.store(kept + chunk * size + in_state, state.to(kept.dtype.element_ty), mask=state_mask)
        g = log2_sigmoid(f_tile.to(tl.float32), PRECISION)
        v = drive.to(tl.float32) * sigmoid(i_tile.to(tl.float32), PRECISION)
        from_start = decay_from_start(g, BLOCK, PRECISION)
        m = from_start * product(state, tl.trans(query), PRECISION)
        m += read_block(g, v, product(key, tl.trans(query), PRECISION), LEAF, LEVELS, BLOCK, PRECISION)
        decayed = v * decay_to_end(g, BLOCK, PRECISION)
        state = state * at_last(from_start, BLOCK)[:, None] + product(decayed, key, PRECISION)
        out = alpha * m
        if HAS_D:
            out += skip * drive.to(tl.float32)
        if HAS_Z:
            out *= z_tile.to(tl.float32) * sigmoid(z_tile.to(tl.float32), PRECISION)
        mask = (channels < d_inner)[:, None] & inside[None, :]
        tl.store(y + rows[None, :] * d_inner + channels[:, None], out.to(y.dtype.element_ty), mask=mask)
        if PREFETCH:
            rows, inside, drive, f_tile = next_rows, next_inside, next_drive, next_f_tile
            i_tile, z_tile, key, query = next_i_tile, next_z_tile, next_key, next_query
    if remaining <= segment:
        tl.store(final + sequence.to(tl.int64) * size + in_state, state, mask=state_mask)
