"""The backward kernels: everything from the state before and its gradient after each chunk, a chunk at a time.

With `dm_t` the gradient of the reading, S the state before the chunk and X the gradient of the state after it, a write
at s and a reading at t > s meet in the gradient of every gate between them. Writes are those of the chunk and S,
readings those of the chunk and X, so

    dg_t = sum_{s < t <= u} dm_u (C_u·B_s) decay_{s..u} v_s + sum_{u >= t} dm_u decay_u (S C_u)
         + sum_{s < t} decay_{s..end} v_s (X B_s) + decay_{all} <X, S>

The first sum goes level by level through the tree of forward.py: pairs that cross a node's middle reach a token of its
left half when s is before it, and one of its right half when u is not. Terms are added and none is taken away again
(but see `within_leaf`), which is what keeps the digits where a gate forgets among gates that hold.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from naju.scan.triton_chunked.forward import (
    LEAF_LEAST_G,
    LENGTH_ARGUMENTS,
    LOG2E,
    at_last,
    crosses,
    decay_from_start,
    decay_to_end,
    decay_to_middle,
    exp2,
    first_row,
    leaf_exponent,
    load_tile,
    log2_sigmoid,
    piece_of_sequence,
    product,
    reciprocal,
    rounded,
    sequence_rows,
    sigmoid,
    split_program,
    token_pairs,
)


@triton.jit
def both_sigmoids(x, PRECISION: tl.constexpr):
    """sigmoid(x) and sigmoid(-x), each with all its digits."""
    u = exp2(-tl.abs(x) * LOG2E, PRECISION)
    large = reciprocal(1.0 + u, PRECISION)
    small = u * large
    return tl.where(x >= 0, large, small), tl.where(x >= 0, small, large)


@triton.jit
def precise_sums(x, weights, PRECISION: tl.constexpr):
    """x @ weights with all digits of x; the weights are 0 and 1."""
    high = rounded(x, PRECISION)
    result = product(high, weights, PRECISION)
    if PRECISION == "bf16" or PRECISION == "rounded":
        middle = rounded(x - high, PRECISION)
        result += product(middle, weights, PRECISION) + product(x - high - middle, weights, PRECISION)
    return result


@triton.jit
def within_leaf(g, v, dm, scores, scores_t, LEAF: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """m, dv and dg of the pairs s < t that share a leaf.

    dg_t is what is read from t on less what was also written from t on. Both sums are made of the same rounded factors,
    so they are sums of the very same terms, and what they have in common goes out in the difference to the last digit.
    """
    row, column = token_pairs(BLOCK)
    same_leaf = row // LEAF == column // LEAF
    exponent = leaf_exponent(g, LEAF, BLOCK, PRECISION)
    from_middle = exp2(exponent, PRECISION)
    to_middle = exp2(-exponent, PRECISION)
    readings = rounded(dm * from_middle, PRECISION)
    writes = rounded(v * to_middle, PRECISION)
    read = product(writes, tl.where(same_leaf & (row < column), scores, 0.0), PRECISION)
    pulled = product(readings, tl.where(same_leaf & (row > column), scores_t, 0.0), PRECISION)
    met = readings * read - writes * pulled
    dg = precise_sums(met, (same_leaf & (row >= column)).to(tl.float32), PRECISION)
    # every term of dg_t has f_t as a factor, which was floored
    floored = tl.maximum(g, LEAF_LEAST_G, propagate_nan=tl.PropagateNan.ALL)
    return from_middle * read, to_middle * pulled, dg * exp2(g - floored, PRECISION)


@triton.jit
def within_chunk(
    g,
    v,
    dm,
    scores,
    scores_t,
    LEAF: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """m, dv and dg (d, t) of the pairs inside a chunk; scores[s, t] = B_s · C_t, and scores_t[t, s] the same."""
    row, column = token_pairs(BLOCK)
    diagonal = tl.sum(tl.where(row == column, scores, 0.0), axis=0)[None, :]
    m = v * diagonal
    dv = dm * diagonal
    dg = tl.zeros_like(v)
    if LEAF > 1:
        leaf_m, leaf_dv, leaf_dg = within_leaf(g, v, dm, scores, scores_t, LEAF, BLOCK, PRECISION)
        m += leaf_m
        dv += leaf_dv
        dg += leaf_dg
    for level in tl.static_range(LEVELS):
        if (2 << level) > LEAF:
            # tokens of right halves read, those of left halves write: one product serves both
            reads = ((column >> level) & 1) == 1
            own = tl.where(reads, dm, v)
            pairs = tl.where(crosses(row, column, level), scores, tl.where(crosses(column, row, level), scores_t, 0.0))
            decay = decay_to_middle(g, level, BLOCK, PRECISION)
            met = decay * product(own * decay, pairs, PRECISION)
            m += tl.where(reads, met, 0.0)
            dv += tl.where(reads, 0.0, met)
            if level == 0:
                dg += tl.where(reads, own * met, 0.0)
            else:
                same_half = (row >> level) == (column >> level)
                reaching = same_half & tl.where(reads, row >= column, row < column)
                dg += product(own * met, reaching.to(tl.float32), PRECISION)
    return m, dv, dg


@triton.jit(do_not_specialize=LENGTH_ARGUMENTS)
def channel_gradients(
    dy,
    dy_stride,
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
    kept,
    adjoints,
    dh,
    df_logit,
    di_logit,
    dz,
    dD,
    boundaries,
    chunk_owners,
    first_chunks,
    length,
    sequences,
    chunks,
    alpha,
    d_inner,
    d_state,
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
    """Gradients of h, the logits and z over one chunk, and the chunk's part of dD."""
    chunk, channels = split_program(d_inner, BD)
    sequence, place = piece_of_sequence(chunk, chunk_owners, first_chunks, chunks, PACKED)
    if sequence >= sequences:
        return
    start, stop = sequence_rows(sequence, boundaries, length, PACKED)
    tokens = tl.minimum(stop - start - place.to(tl.int64) * BLOCK, BLOCK).to(tl.int32)
    origin = first_row(start, stop, place.to(tl.int64) * BLOCK, REVERSE)
    t = tl.arange(0, BLOCK)
    rows = origin - t if REVERSE else origin + t
    columns = tl.arange(0, BN)
    mask = (channels < d_inner)[:, None] & (t < tokens)[None, :]
    keys_mask = (t < tokens)[:, None] & (columns < d_state)[None, :]
    state_mask = (channels < d_inner)[:, None] & (columns < d_state)[None, :]
    in_state = (chunk.to(tl.int64) * d_inner + channels[:, None]) * d_state + columns[None, :]
    row, column = token_pairs(BLOCK)

    g = log2_sigmoid(load_tile(f_logit, f_stride, rows[None, :], channels[:, None], mask, float("inf")), PRECISION)
    drive = load_tile(h, h_stride, rows[None, :], channels[:, None], mask, 0.0)
    i_tile = load_tile(i_logit, i_stride, rows[None, :], channels[:, None], mask, 0.0)
    dq = load_tile(dy, dy_stride, rows[None, :], channels[:, None], mask, 0.0)
    v = drive * sigmoid(i_tile, PRECISION)
    if HAS_Z:
        z_tile = load_tile(z, z_stride, rows[None, :], channels[:, None], mask, 0.0)
        dq *= z_tile * sigmoid(z_tile, PRECISION)
    dm = alpha * dq
    key = load_tile(B, B_stride, rows[:, None], columns[None, :], keys_mask, 0.0)
    query = load_tile(C, C_stride, rows[:, None], columns[None, :], keys_mask, 0.0)
    scores = product(key, tl.trans(query), PRECISION)
    scores_t = product(query, tl.trans(key), PRECISION)
    m, dv, dg = within_chunk(g, v, dm, scores, scores_t, LEAF, LEVELS, BLOCK, PRECISION)

    state = tl.load(kept + in_state, mask=state_mask, other=0.0)
    adjoint = tl.load(adjoints + in_state, mask=state_mask, other=0.0)
    passing = tl.sum(state.to(tl.float32) * adjoint.to(tl.float32), axis=1)
    from_start = decay_from_start(g, BLOCK, PRECISION)
    read = from_start * product(state, tl.trans(query), PRECISION)
    pulled = decay_to_end(g, BLOCK, PRECISION) * product(adjoint, tl.trans(key), PRECISION)
    m += read
    dv += pulled
    dg += product(dm * read, (row >= column).to(tl.float32), PRECISION)
    dg += product(v * pulled, (row < column).to(tl.float32), PRECISION)
    dg += (at_last(from_start, BLOCK) * passing)[:, None]

    out = rows[None, :] * d_inner + channels[:, None]
    f_tile = load_tile(f_logit, f_stride, rows[None, :], channels[:, None], mask, float("inf"))
    tl.store(df_logit + out, (dg * sigmoid(-f_tile, PRECISION)).to(df_logit.dtype.element_ty), mask=mask)
    i, not_i = both_sigmoids(i_tile, PRECISION)
    tl.store(di_logit + out, (dv * drive * i * not_i).to(di_logit.dtype.element_ty), mask=mask)
    ddrive = dv * i
    if HAS_D:
        skip = tl.load(D + channels, mask=channels < d_inner, other=0.0).to(tl.float32)[:, None]
        ddrive += skip * dq
        dskip = tl.sum(dq * drive, axis=1)
        tl.store(dD + chunk.to(tl.int64) * d_inner + channels, dskip, mask=channels < d_inner)
    tl.store(dh + out, ddrive.to(dh.dtype.element_ty), mask=mask)
    if HAS_Z:
        ungated = alpha * m
        if HAS_D:
            ungated += skip * drive
        open_z, not_open_z = both_sigmoids(z_tile, PRECISION)
        dout = load_tile(dy, dy_stride, rows[None, :], channels[:, None], mask, 0.0)
        dz_tile = dout * ungated * open_z * (1.0 + z_tile * not_open_z)
        tl.store(dz + out, dz_tile.to(dz.dtype.element_ty), mask=mask)


@triton.jit
def pair_gradients(g, v, dm, LEAF: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """P[s, t] and P[t, s]: the gradient of the score B_s · C_t by these channels, s < t (in leaves also s = t).

    Tiles are (t, d). Both orders are computed: a transposed product as the left factor of another is not to be trusted.
    """
    row, column = token_pairs(BLOCK)
    by_write = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    by_reading = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    if LEAF > 1:
        exponent = leaf_exponent(g, LEAF, BLOCK, PRECISION, True)
        writes = v * exp2(-exponent, PRECISION)
        readings = dm * exp2(exponent, PRECISION)
        same_leaf = row // LEAF == column // LEAF
        by_write = tl.where(same_leaf & (row <= column), product(writes, tl.trans(readings), PRECISION), 0.0)
        by_reading = tl.where(same_leaf & (row >= column), product(readings, tl.trans(writes), PRECISION), 0.0)
    for level in tl.static_range(LEVELS):
        if (2 << level) > LEAF:
            decay = decay_to_middle(g, level, BLOCK, PRECISION, True)
            writes = v * decay
            readings = dm * decay
            by_write += tl.where(crosses(row, column, level), product(writes, tl.trans(readings), PRECISION), 0.0)
            by_reading += tl.where(crosses(column, row, level), product(readings, tl.trans(writes), PRECISION), 0.0)
    return by_write, by_reading


@triton.jit(do_not_specialize=LENGTH_ARGUMENTS)
def key_gradients(
    dy,
    dy_stride,
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
    kept,
    adjoints,
    dB,
    dC,
    boundaries,
    chunk_owners,
    first_chunks,
    length,
    sequences,
    chunks,
    alpha,
    d_inner,
    d_state,
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
    """dB and dC of one chunk, summed over all channels in registers."""
    chunk = tl.program_id(0)
    sequence, place = piece_of_sequence(chunk, chunk_owners, first_chunks, chunks, PACKED)
    if sequence >= sequences:
        return
    start, stop = sequence_rows(sequence, boundaries, length, PACKED)
    tokens = tl.minimum(stop - start - place.to(tl.int64) * BLOCK, BLOCK).to(tl.int32)
    origin = first_row(start, stop, place.to(tl.int64) * BLOCK, REVERSE)
    t = tl.arange(0, BLOCK)
    rows = origin - t if REVERSE else origin + t
    columns = tl.arange(0, BN)
    row, column = token_pairs(BLOCK)
    by_write = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    by_reading = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    own = tl.zeros((BLOCK,), dtype=tl.float32)
    dkey = tl.zeros((BLOCK, BN), dtype=tl.float32)
    dquery = tl.zeros((BLOCK, BN), dtype=tl.float32)
    for channel in range(0, d_inner, BD):
        channels = channel + tl.arange(0, BD)
        mask = (t < tokens)[:, None] & (channels < d_inner)[None, :]
        state_mask = (channels < d_inner)[:, None] & (columns < d_state)[None, :]
        in_state = (chunk.to(tl.int64) * d_inner + channels[:, None]) * d_state + columns[None, :]
        state = tl.load(kept + in_state, mask=state_mask, other=0.0)
        adjoint = tl.load(adjoints + in_state, mask=state_mask, other=0.0)
        g = log2_sigmoid(load_tile(f_logit, f_stride, rows[:, None], channels[None, :], mask, float("inf")), PRECISION)
        v = load_tile(h, h_stride, rows[:, None], channels[None, :], mask, 0.0)
        v *= sigmoid(load_tile(i_logit, i_stride, rows[:, None], channels[None, :], mask, 0.0), PRECISION)
        dm = alpha * load_tile(dy, dy_stride, rows[:, None], channels[None, :], mask, 0.0)
        if HAS_Z:
            logit = load_tile(z, z_stride, rows[:, None], channels[None, :], mask, 0.0)
            dm *= logit * sigmoid(logit, PRECISION)
        p_write, p_reading = pair_gradients(g, v, dm, LEAF, LEVELS, BLOCK, PRECISION)
        by_write += p_write
        by_reading += p_reading
        if LEAF == 1:
            own += tl.sum(v * dm, axis=1)
        dkey += product(v * decay_to_end(g, BLOCK, PRECISION, True), adjoint, PRECISION)
        dquery += product(dm * decay_from_start(g, BLOCK, PRECISION, True), state, PRECISION)
    if LEAF == 1:
        by_write = tl.where(row == column, own[None, :], by_write)
        by_reading = tl.where(row == column, own[None, :], by_reading)
    keys_mask = (t < tokens)[:, None] & (columns < d_state)[None, :]
    dkey += product(by_write, load_tile(C, C_stride, rows[:, None], columns[None, :], keys_mask, 0.0), PRECISION)
    dquery += product(by_reading, load_tile(B, B_stride, rows[:, None], columns[None, :], keys_mask, 0.0), PRECISION)
    out = rows[:, None] * d_state + columns[None, :]
    tl.store(dB + out, dkey.to(dB.dtype.element_ty), mask=keys_mask)
    tl.store(dC + out, dquery.to(dC.dtype.element_ty), mask=keys_mask)
