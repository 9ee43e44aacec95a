"""The Triton kernel of one decoding step. Importing this module imports Triton, so only a step does.

A program owns some sequences and a block of channels. B, C and the gate logits need h of every channel, so each program
makes all of h for itself, a tile of channels at a time: the tails that it reads are small and shared through the cache.
The batch is never specialized on: a new one compiles nothing, except where it needs another block.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from naju.scan.triton_sequential.kernels import gate

NOT_SPECIALIZED = ["batch", "uz_batch"]


@triton.jit
def load(matrix, row, column, stride, has_row, has_column):
    """A tile; rows and columns outside are 0."""
    offset = row[:, None] * stride + column[None, :]
    return tl.load(matrix + offset, mask=has_row[:, None] & has_column[None, :], other=0.0)


@triton.jit
def load_row(vector, column, has_column):
    return tl.load(vector + column, mask=has_column, other=0.0).to(tl.float32)[None, :]


@triton.jit
def convolved(now, tail, taps, bias, row, channel, has_row, has_channel, D_INNER: tl.constexpr, D_CONV: tl.constexpr):
    """`sum_j taps[:, j] * past[j] + bias`, (rows, channels) in float32; the tail is rounded to the precision of now."""
    total = load_row(bias, channel, has_channel)
    for j in tl.static_range(D_CONV - 1):
        past = load(tail + j * D_INNER, row, channel, (D_CONV - 1) * D_INNER, has_row, has_channel).to(now.dtype)
        total = total + past.to(tl.float32) * load_row(taps + j, channel * D_CONV, has_channel)
    return total + now.to(tl.float32) * load_row(taps + D_CONV - 1, channel * D_CONV, has_channel)


@triton.jit
def silu(x):
    on, _ = gate(x)
    return x * on


@triton.jit
def shift(tail, tail_out, now, row, channel, has_row, has_channel, D_INNER: tl.constexpr, D_CONV: tl.constexpr):
    """The tail of the next token: this one without its oldest entry, and now."""
    stride: tl.constexpr = (D_CONV - 1) * D_INNER
    place = tail_out + row[:, None] * stride + channel[None, :]
    mask = has_row[:, None] & has_channel[None, :]
    for j in tl.static_range(D_CONV - 2):
        kept = load(tail + (j + 1) * D_INNER, row, channel, stride, has_row, has_channel)
        tl.store(place + j * D_INNER, kept.to(now.dtype), mask=mask)
    if D_CONV > 1:
        tl.store(place + (D_CONV - 2) * D_INNER, now, mask=mask)


@triton.jit
def add_product(total, h, W):
    """total + h W^T for tiles (b, k) and (r, k): a sum for one sequence, a matrix product for more."""
    W = W.to(h.dtype)
    if h.shape[0] == 1:
        total += tl.sum(h.to(tl.float32) * W.to(tl.float32), axis=1)[None, :]
    else:
        total = tl.dot(h, tl.trans(W), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def step_kernel(
    uz,
    x,
    u_tail,
    h_tail,
    conv_taps,
    conv_bias,
    W_f,
    f_taps,
    f_bias,
    W_i,
    i_taps,
    i_bias,
    W_BC,
    D,
    y,
    x_out,
    u_tail_out,
    h_tail_out,
    batch: tl.int64,
    uz_batch: tl.int64,
    alpha: tl.float32,
    gate_scale: tl.float32,
    D_INNER: tl.constexpr,
    D_STATE: tl.constexpr,
    D_CONV: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y and the next state from uz = [u_tilde | z]. Without W_f there is one gate, and f_logit is -i_logit.

    The state is worked off in pieces of BLOCK_N entries. Each is asked for before the products of its B and C, which
    hide the wait; those of the gates go with the first. Stores come late, because no load is moved above one.
    """
    blocks: tl.constexpr = (D_INNER + BLOCK_D - 1) // BLOCK_D
    tail_size: tl.constexpr = (D_CONV - 1) * D_INNER
    first_row = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_B
    first_channel = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_D
    uz += first_row * uz_batch
    y += first_row * D_INNER
    u_tail += first_row * tail_size
    h_tail += first_row * tail_size
    u_tail_out += first_row * tail_size
    h_tail_out += first_row * tail_size

    row = tl.arange(0, BLOCK_B)
    own = tl.arange(0, BLOCK_D)
    channel = first_channel.to(tl.int32) + own
    has_row, has_channel = row < batch - first_row, channel < D_INNER
    has_own = has_row[:, None] & has_channel[None, :]

    u_own = load(uz, row, channel, uz_batch, has_row, has_channel)
    conv_own = convolved(u_own, u_tail, conv_taps, conv_bias, row, channel, has_row, has_channel, D_INNER, D_CONV)
    h_own = silu(conv_own).to(u_own.dtype)
    i_logit = convolved(h_own, h_tail, i_taps, i_bias, row, channel, has_row, has_channel, D_INNER, D_CONV)
    if W_f is not None:
        f_logit = convolved(h_own, h_tail, f_taps, f_bias, row, channel, has_row, has_channel, D_INNER, D_CONV)

    cell = (row[:, None, None] * D_INNER + own[None, :, None]) * D_STATE
    x += (first_row * D_INNER + first_channel) * D_STATE
    x_out += (first_row * D_INNER + first_channel) * D_STATE
    f = tl.zeros((BLOCK_B, BLOCK_D), dtype=tl.float32)
    v = f
    m = f
    for piece in tl.static_range((D_STATE + BLOCK_N - 1) // BLOCK_N):
        entry = piece * BLOCK_N + tl.arange(0, BLOCK_N)
        has_entry = entry < D_STATE
        has_cell = has_own[:, :, None] & has_entry[None, None, :]
        before = tl.load(x + cell + entry[None, None, :], mask=has_cell, other=0.0)

        B = tl.zeros((BLOCK_B, BLOCK_N), dtype=tl.float32)
        C = B
        for start in range(0, D_INNER, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            has_k = k < D_INNER
            u = load(uz, row, k, uz_batch, has_row, has_k)
            conv = convolved(u, u_tail, conv_taps, conv_bias, row, k, has_row, has_k, D_INNER, D_CONV)
            W_B = load(W_BC, entry, k, D_INNER, has_entry, has_k)
            W_C = load(W_BC + D_STATE * D_INNER, entry, k, D_INNER, has_entry, has_k)
            h = silu(conv).to(u.dtype)
            if piece == 0:
                W = load(W_i + first_channel * D_INNER, own, k, D_INNER, has_channel, has_k)
                i_logit = add_product(i_logit, h, W)
                if W_f is not None:
                    W = load(W_f + first_channel * D_INNER, own, k, D_INNER, has_channel, has_k)
                    f_logit = add_product(f_logit, h, W)
            B, C = add_product(B, h, W_B), add_product(C, h, W_C)

        if piece == 0:
            i, closed = gate(i_logit / gate_scale)
            f = closed
            if W_f is not None:
                f, _ = gate(f_logit / gate_scale)
            v = i * h_own.to(tl.float32)
        after = f[:, :, None] * before + v[:, :, None] * B[:, None, :]
        tl.store(x_out + cell + entry[None, None, :], after, mask=has_cell)
        m += tl.sum(after * C[:, None, :], axis=2)

    z = load(uz + D_INNER, row, channel, uz_batch, has_row, has_channel).to(tl.float32)
    out = (alpha * m + load_row(D, channel, has_channel) * h_own.to(tl.float32)) * silu(z)
    tl.store(y + row[:, None] * D_INNER + channel[None, :], out, mask=has_own)
    shift(u_tail, u_tail_out, u_own, row, channel, has_row, has_channel, D_INNER, D_CONV)
    shift(h_tail, h_tail_out, h_own, row, channel, has_row, has_channel, D_INNER, D_CONV)
