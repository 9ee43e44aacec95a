"""The backward kernels: a sweep from the end of each segment for the channels, then a chunk at a time for the keys.

With `dm_t` the gradient of the reading, S the state before a block and X the gradient of the state after it, a write
at s and a reading at t > s meet in the gradient of every gate between them. Writes are those of the block and S,
readings those of the block and X, so

    dg_t = sum_{s < t <= u} dm_u (C_u·B_s) decay_{s..u} v_s + sum_{u >= t} dm_u decay_u (S C_u)
         + sum_{s < t} decay_{s..end} v_s (X B_s) + decay_{all} <X, S>

The first sum goes level by level through the tree of algebra.py: pairs that cross a node's middle reach a token of its
left half when s is before it, and one of its right half when u is not. Terms are added and none is taken away again
(but see `within_leaf`), which is what keeps the digits where a gate forgets among gates that hold.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from naju.scan.triton_chunked.algebra import (
    LEAST_F,
    as_factor,
    block_sums,
    crosses,
    decay_from_start,
    decay_to_end,
    decay_to_middle,
    exp2,
    gate_value,
    leaf_exponent,
    product,
    rest_of,
    rounded,
    sigmoid,
    token_pairs,
    unpacked,
    unpacked_gate,
)
from naju.scan.triton_chunked.pieces import (
    LENGTH_ARGUMENTS,
    chunk_of_segment,
    load,
    piece_of_sequence,
    rest_of_sequence,
    rows_of,
    split_program,
    store,
)


@triton.jit
def precise_sums(x, weights, PRECISION: tl.constexpr):
    """x @ weights with all digits of x; the weights are 0 and 1."""
    high = rounded(x, PRECISION)
    result = product(high, weights, PRECISION)
    if PRECISION == "bf16" or PRECISION == "rounded":
        result = product(x - high, weights, PRECISION, result)
    return result


@triton.jit
def within_leaf(g, f, v, dm, scores, LEAF: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """m, dv and dg of the pairs s <= t that share a leaf.

    dg_t is what is read from t on less what was also written from t on. Both sums are made of the same rounded factors,
    so they are sums of the very same terms, and what they have in common goes out in the difference to the last digit,
    the pairs s = t among it.
    """
    row, column = token_pairs(BLOCK)
    same_leaf = row // LEAF == column // LEAF
    exponent = leaf_exponent(g, LEAF, BLOCK)
    from_middle = exp2(exponent, PRECISION)
    to_middle = exp2(-exponent, PRECISION)
    readings = rounded(dm * from_middle, PRECISION)
    writes = rounded(v * to_middle, PRECISION)
    pairs = as_factor(tl.where(same_leaf & (row <= column), scores, 0.0), PRECISION)
    read = product(writes, pairs, PRECISION)
    pulled = product(readings, tl.trans(pairs), PRECISION)
    met = readings * read - writes * pulled
    dg = precise_sums(met, (same_leaf & (row >= column)).to(tl.float32), PRECISION)
    # every term of dg_t has f_t as a factor, which was floored
    dg *= tl.minimum(f / LEAST_F, 1.0)
    return from_middle * read, to_middle * pulled, dg


@triton.jit
def within_block(
    g,
    f,
    v,
    dm,
    m,
    dv,
    dg,
    scores,
    LEAF: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """m, dv and dg (d, t) with what the pairs inside a block add to them; scores[s, t] = B_s · C_t."""
    row, column = token_pairs(BLOCK)
    if LEAF == 1:
        diagonal = tl.sum(tl.where(row == column, scores, 0.0), axis=0)[None, :]
        m += v * diagonal
        dv += dm * diagonal
    else:
        leaf_m, leaf_dv, leaf_dg = within_leaf(g, f, v, dm, scores, LEAF, BLOCK, PRECISION)
        m += leaf_m
        dv += leaf_dv
        dg += leaf_dg
    for level in tl.static_range(LEVELS):
        if (2 << level) > LEAF:
            # tokens of right halves read, those of left halves write: one sum serves both
            reads = ((column >> level) & 1) == 1
            decay = decay_to_middle(g, level, BLOCK, PRECISION)
            pairs = as_factor(tl.where(crosses(row, column, level), scores, 0.0), PRECISION)
            met = product(v * decay, pairs, PRECISION)
            met = decay * product(dm * decay, tl.trans(pairs), PRECISION, met)
            m += tl.where(reads, met, 0.0)
            dv += tl.where(reads, 0.0, met)
            met *= tl.where(reads, dm, v)
            if level == 0:
                dg += tl.where(reads, met, 0.0)
            else:
                same_half = (row >> level) == (column >> level)
                reaching = same_half & tl.where(reads, row >= column, row < column)
                dg = product(met, reaching.to(tl.float32), PRECISION, dg)
    return m, dv, dg


@triton.jit
def across_block(
    g,
    v,
    dq,
    state,
    adjoint,
    key,
    query,
    alpha,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What comes into a block from outside: the readings of the state before it, dv and dg by that and by the gradient
    of the state after it, and the gradient of the state before it. Also each token's own log2 of f."""
    row, column = token_pairs(BLOCK)
    factor = as_factor(adjoint, PRECISION)
    after, upto, forget_log, everything = block_sums(g, BLOCK)
    decay = exp2(everything, PRECISION)
    dg = decay * product(as_factor(state, PRECISION) * factor, tl.full((BN, BLOCK), 1.0, tl.float32), PRECISION)
    dv = exp2(after, PRECISION) * product(factor, tl.trans(key), PRECISION)
    dg = product(v * dv, (row < column).to(tl.float32), PRECISION, dg)
    from_start = exp2(upto, PRECISION)
    read = alpha * from_start * product(state, tl.trans(query), PRECISION)
    dg = product(dq * read, (row >= column).to(tl.float32), PRECISION, dg)
    adjoint = adjoint * (tl.sum(decay, axis=1) / BLOCK)[:, None] + product(alpha * dq * from_start, query, PRECISION)
    return read, dv, dg, adjoint, forget_log


@triton.jit
def before_readout_gate(dout, z, PRECISION: tl.constexpr):
    """Of an output q * silu(z): the gradient of q, and by what q is multiplied for that of z."""
    opened = sigmoid(z, PRECISION)
    gated = z * opened
    slope = as_factor(dout * (opened + gated * (1.0 - opened)), PRECISION)
    return dout * gated, slope


@triton.jit(do_not_specialize=LENGTH_ARGUMENTS)
def channel_gradients(
    dy,
    dy_stride,
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
    kept,
    leaving,
    adjoints,
    dh,
    dh_stride,
    df,
    df_stride,
    di,
    di_stride,
    dz,
    dz_stride,
    dD,
    dinitial,
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
    REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Gradients of h, the logits and z over one segment, from its end, and the segment's part of dD.

    `leaving` is the gradient of the state after the segment, or that is zero if `carried` is 0; it writes that after
    every chunk to `adjoints`, and the first segment of a sequence that of the initial state.
    """
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
    leaving += index.to(tl.int64) * size
    adjoint = tl.load(leaving + in_state, mask=state_mask & (columns < carried * d_state)[None, :], other=0.0)
    if HAS_D:
        skip = tl.load(D + channels, mask=channels < d_inner, other=0.0).to(tl.float32)[:, None]
        dskip = tl.zeros((BD,), dtype=tl.float32)
    steps = tl.cdiv(tokens, CHUNK) * (CHUNK // BLOCK)
    for step in range(steps):
        block = steps - 1 - step
        before = (first_chunk * (CHUNK // BLOCK) + block) * size
        state = tl.load(kept + before + in_state, mask=state_mask, other=0.0)
        if (block + 1) % (CHUNK // BLOCK) == 0:
            after_chunk = (first_chunk + block // (CHUNK // BLOCK)) * size
            tl.store(adjoints + after_chunk + in_state, adjoint.to(adjoints.dtype.element_ty), mask=state_mask)
        rows, inside = rows_of(origin, block, tokens, BLOCK, REVERSE)
        mask = (channels < d_inner)[:, None] & inside[None, :]
        keys_mask = inside[:, None] & (columns < d_state)[None, :]
        g = load(log_f, f_stride, rows[None, :], channels[:, None], mask)
        i_tile = load(log_i, i_stride, rows[None, :], channels[:, None], mask)
        drive = load(h, h_stride, rows[None, :], channels[:, None], mask)
        dout = load(dy, dy_stride, rows[None, :], channels[:, None], mask)
        key = load(B, B_stride, rows[:, None], columns[None, :], keys_mask)
        query = load(C, C_stride, rows[:, None], columns[None, :], keys_mask)
        dq = unpacked(dout, PRECISION)
        if HAS_Z:
            z_tile = load(z, z_stride, rows[None, :], channels[:, None], mask)
            dq, slope = before_readout_gate(dq, unpacked(z_tile, PRECISION), PRECISION)
        drive = unpacked(drive, PRECISION)
        write_log = unpacked_gate(i_tile, PRECISION)
        i = exp2(write_log, PRECISION)
        v = drive * i
        q = tl.zeros((BD, BLOCK), dtype=tl.float32)
        if HAS_D:
            q = skip * drive
        read, dv, dg, adjoint, forget_log = across_block(
            g, v, dq, state, adjoint, key, query, alpha, BLOCK, BN, PRECISION
        )
        q += read
        scores = alpha * product(key, tl.trans(query), PRECISION)
        f = exp2(forget_log, PRECISION)
        forgotten = rest_of(forget_log, f, PRECISION)
        q, dv, dg = within_block(g, f, v, dq, q, dv, dg, scores, LEAF, LEVELS, BLOCK, PRECISION)
        if HAS_Z:
            store(dz, dz_stride, rows[None, :], channels[:, None], slope.to(tl.float32) * q, mask)
        store(df, df_stride, rows[None, :], channels[:, None], dg * forgotten, mask)
        store(di, di_stride, rows[None, :], channels[:, None], dv * v * rest_of(write_log, i, PRECISION), mask)
        ddrive = dv * i
        if HAS_D:
            ddrive += skip * dq
            dskip += tl.sum(dq * drive, axis=1)
        store(dh, dh_stride, rows[None, :], channels[:, None], ddrive, mask)
    if HAS_D:
        tl.store(dD + index.to(tl.int64) * d_inner + channels, dskip, mask=channels < d_inner)
    if dinitial is not None and place == 0:
        tl.store(dinitial + sequence.to(tl.int64) * size + in_state, adjoint, mask=state_mask)


@triton.jit
def pair_gradients(g, v, dm, LEAF: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """P[s, t], the gradient of the score B_s · C_t by these channels, for s < t (in leaves also s = t).

    Tiles are (t, d).
    """
    row, column = token_pairs(BLOCK)
    pairs = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    if LEAF > 1:
        exponent = leaf_exponent(g, LEAF, BLOCK, True)
        met = product(v * exp2(-exponent, PRECISION), tl.trans(dm * exp2(exponent, PRECISION)), PRECISION)
        pairs = tl.where((row // LEAF == column // LEAF) & (row <= column), met, 0.0)
    for level in tl.static_range(LEVELS):
        if (2 << level) > LEAF:
            decay = decay_to_middle(g, level, BLOCK, PRECISION, True)
            met = product(v * decay, tl.trans(dm * decay), PRECISION)
            pairs += tl.where(crosses(row, column, level), met, 0.0)
    return pairs


@triton.jit(do_not_specialize=LENGTH_ARGUMENTS)
def key_gradients(
    dy,
    dy_stride,
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
    kept,
    adjoints,
    dB,
    dB_stride,
    dC,
    dC_stride,
    boundaries,
    chunk_owners,
    first_chunks,
    length,
    sequences,
    chunks,
    alpha,
    d_inner,
    d_state,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    LEAF: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_Z: tl.constexpr,
    REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """dB and dC of one chunk, the block here, summed over all channels in registers. It has KEPT kept states."""
    chunk = tl.program_id(0)
    sequence, place = piece_of_sequence(chunk, chunk_owners, first_chunks, chunks, PACKED)
    if sequence >= sequences:
        return
    remaining, origin = rest_of_sequence(sequence, place, BLOCK, boundaries, length, REVERSE, PACKED)
    tokens = tl.minimum(remaining, BLOCK).to(tl.int32)
    rows, inside = rows_of(origin, 0, tokens, BLOCK, REVERSE)
    columns = tl.arange(0, BN)
    row, column = token_pairs(BLOCK)
    pairs = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    own = tl.zeros((BLOCK,), dtype=tl.float32)
    size = d_inner * d_state
    dkey = tl.zeros((BLOCK, BN), dtype=tl.float32)
    dquery = tl.zeros((BLOCK, BN), dtype=tl.float32)
    for channel in range(0, d_inner, BD):
        channels = channel + tl.arange(0, BD)
        mask = inside[:, None] & (channels < d_inner)[None, :]
        state_mask = (channels < d_inner)[:, None] & (columns < d_state)[None, :]
        in_state = channels[:, None] * d_state + columns[None, :]
        state = tl.load(kept + chunk.to(tl.int64) * KEPT * size + in_state, mask=state_mask, other=0.0)
        adjoint = tl.load(adjoints + chunk.to(tl.int64) * size + in_state, mask=state_mask, other=0.0)
        g = load(log_f, f_stride, rows[:, None], channels[None, :], mask)
        v = load(h, h_stride, rows[:, None], channels[None, :], mask).to(tl.float32)
        v *= gate_value(load(log_i, i_stride, rows[:, None], channels[None, :], mask), PRECISION)
        dm = alpha * load(dy, dy_stride, rows[:, None], channels[None, :], mask).to(tl.float32)
        if HAS_Z:
            z_tile = load(z, z_stride, rows[:, None], channels[None, :], mask).to(tl.float32)
            dm *= z_tile * sigmoid(z_tile, PRECISION)
        pairs += pair_gradients(g, v, dm, LEAF, LEVELS, BLOCK, PRECISION)
        if LEAF == 1:
            own += tl.sum(v * dm, axis=1)
        dkey += product(v * decay_to_end(g, BLOCK, PRECISION, True), adjoint, PRECISION)
        dquery += product(dm * decay_from_start(g, BLOCK, PRECISION, True), state, PRECISION)
    if LEAF == 1:
        pairs = tl.where(row == column, own[None, :], pairs)
    keys_mask = inside[:, None] & (columns < d_state)[None, :]
    key = load(B, B_stride, rows[:, None], columns[None, :], keys_mask)
    query = load(C, C_stride, rows[:, None], columns[None, :], keys_mask)
    dkey += product(pairs, query, PRECISION)
    # the pairs are a product themselves, and one that is transposed as the left factor of another is not to be trusted
    dquery += tl.trans(product(tl.trans(key), pairs, PRECISION))
    store(dB, dB_stride, rows[:, None], columns[None, :], dkey, keys_mask)
    store(dC, dC_stride, rows[:, None], columns[None, :], dquery, keys_mask)
