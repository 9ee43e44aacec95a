"""The Triton kernels of one decoding step. Importing this module imports Triton, so only a step does.

B, C and the gate logits are products of h of every channel, so a program that makes some of them makes all of h for
itself, a tile of channels at a time: the tails that it reads are small and shared through the cache. For one sequence
or two, `step_kernel` is the whole step: a second launch would cost more than what its programs do twice. For more,
`products_kernel` goes first and makes each product once.
The batch is never specialized on: a new one compiles nothing, except where one launch becomes two.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
def place_of(D_CONV: tl.constexpr):
    """Places of a convolution's window, (places, 1, 1); the last of the D_CONV is now. As the first axis, all places of
    a cell are one thread's."""
    return tl.arange(0, triton.next_power_of_2(D_CONV))[:, None, None]


@triton.jit
def load_past(tail, row, channel, has_row, has_channel, D_INNER: tl.constexpr, D_CONV: tl.constexpr):
    """The window without now, (places, rows, channels)."""
    place = place_of(D_CONV)
    offset = (row[None, :, None] * (D_CONV - 1) + place) * D_INNER + channel[None, None, :]
    mask = (place < D_CONV - 1) & has_row[None, :, None] & has_channel[None, None, :]
    return tl.load(tail + offset, mask=mask, other=0.0)


@triton.jit
def window(past, now, D_CONV: tl.constexpr):
    """What a convolution sees: the past, rounded to the precision of now, and now."""
    return tl.where(place_of(D_CONV) == D_CONV - 1, now[None, :, :], past.to(now.dtype))


@triton.jit
def load_taps(taps, channel, has_channel, D_CONV: tl.constexpr):
    """(places, 1, channels), all at once: a channel's taps lie together."""
    place = place_of(D_CONV)
    mask = (place < D_CONV) & has_channel[None, None, :]
    return tl.load(taps + channel[None, None, :] * D_CONV + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def convolved(seen, taps, bias):
    """`sum_j taps[j] * seen[j] + bias`, (rows, channels) in float32."""
    return tl.sum(seen.to(tl.float32) * taps, axis=0) + bias


@triton.jit
def silu(x):
    on, _ = gate(x)
    return x * on


@triton.jit
def load_h(
    uz,
    u_tail,
    taps,
    bias,
    row,
    channel,
    uz_batch,
    has_row,
    has_channel,
    D_INNER: tl.constexpr,
    D_CONV: tl.constexpr,
):
    """h of a tile of channels: `convolved` again, but a place at a time, which the compiler lays out better for a wide
    tile. The taps of a channel, which lie together, are still read at once."""
    now = load(uz, row, channel, uz_batch, has_row, has_channel)
    place = tl.arange(0, triton.next_power_of_2(D_CONV))
    all_taps = load(taps, channel, place, D_CONV, has_channel, place < D_CONV).to(tl.float32)
    total = load_row(bias, channel, has_channel)
    for j in tl.static_range(D_CONV):
        past = now
        if j < D_CONV - 1:
            past = load(u_tail + j * D_INNER, row, channel, (D_CONV - 1) * D_INNER, has_row, has_channel).to(now.dtype)
        tap = tl.sum(tl.where(place[None, :] == j, all_taps, 0.0), axis=1)
        total = total + past.to(tl.float32) * tap[None, :]
    return silu(total).to(now.dtype)


@triton.jit
def store_tail(tail, seen, row, channel, has_row, has_channel, D_INNER: tl.constexpr, D_CONV: tl.constexpr):
    """The tail of the next token: what this one saw without its oldest entry."""
    place = place_of(D_CONV)
    offset = (row[None, :, None] * (D_CONV - 1) + place - 1) * D_INNER + channel[None, None, :]
    mask = (place > 0) & (place < D_CONV) & has_row[None, :, None] & has_channel[None, None, :]
    tl.store(tail + offset, seen, mask=mask)


@triton.jit
def product(h, W):
    """h W^T for tiles (1, k) and (r, k)."""
    return tl.sum(h.to(tl.float32) * W.to(h.dtype).to(tl.float32), axis=1)[None, :]


@triton.jit
def width(W_f, D_INNER: tl.constexpr, D_STATE: tl.constexpr):
    """Products of h for a sequence: B, C, those of the write gate and, where it has its own, of the forget gate."""
    gates: tl.constexpr = 1 if W_f is None else 2
    return 2 * D_STATE + gates * D_INNER


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def products_kernel(
    uz,
    u_tail,
    conv_taps,
    conv_bias,
    W_f,
    W_i,
    W_BC,
    products,
    batch: tl.int64,
    uz_batch: tl.int64,
    D_INNER: tl.constexpr,
    D_STATE: tl.constexpr,
    D_CONV: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A block of sequences times a block of rows of one of the weights, which the last index of the grid chooses. There
    are as many programs for each as the longest needs; the rest have nothing to do."""
    if OVERLAPS:
        gdc_launch_dependents()
    stride = width(W_f, D_INNER, D_STATE)
    W, count, first = W_BC, 2 * D_STATE, 0
    if tl.program_id(2) > 0:
        W, count, first = W_i, D_INNER, 2 * D_STATE
    if W_f is not None:  # noqa: SIM102 -- decided when compiled, the other when run
        if tl.program_id(2) > 1:
            W, count, first = W_f, D_INNER, 2 * D_STATE + D_INNER
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_B
    uz += first_row * uz_batch
    u_tail += first_row * (D_CONV - 1) * D_INNER
    row = tl.arange(0, BLOCK_B)
    own = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    has_row, has_own = row < batch - first_row, own < count
    if tl.program_id(1) * BLOCK_R < count:
        total = tl.zeros((BLOCK_B, BLOCK_R), dtype=tl.float32)
        for start in range(0, D_INNER, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            has_k = k < D_INNER
            h = load_h(uz, u_tail, conv_taps, conv_bias, row, k, uz_batch, has_row, has_k, D_INNER, D_CONV)
            W_tile = load(W, own, k, D_INNER, has_own, has_k).to(h.dtype)
            total = tl.dot(h, tl.trans(W_tile), total, input_precision="ieee")
        place = first_row * stride + first + row[:, None] * stride + own[None, :]
        tl.store(products + place, total, mask=has_row[:, None] & has_own[None, :])


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
    products,
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
    OVERLAPS: tl.constexpr,
):
    """y and the next state from uz = [u_tilde | z]; without `products`, of one sequence a program. Without W_f there
    is one gate, and f_logit is -i_logit.

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
    u_past = load_past(u_tail, row, channel, has_row, has_channel, D_INNER, D_CONV)
    h_past = load_past(h_tail, row, channel, has_row, has_channel, D_INNER, D_CONV)
    own_taps, own_bias = load_taps(conv_taps, channel, has_channel, D_CONV), load_row(conv_bias, channel, has_channel)
    own_i_taps, own_i_bias = load_taps(i_taps, channel, has_channel, D_CONV), load_row(i_bias, channel, has_channel)
    if W_f is not None:
        own_f_taps, own_f_bias = load_taps(f_taps, channel, has_channel, D_CONV), load_row(f_bias, channel, has_channel)
    z = load(uz + D_INNER, row, channel, uz_batch, has_row, has_channel).to(tl.float32)
    own_D = load_row(D, channel, has_channel)
    m = tl.zeros((BLOCK_B, BLOCK_D), dtype=tl.float32)
    f_logit, i_logit, kept, lost, v, h_own = m, m, m, m, m, u_own
    stride = width(W_f, D_INNER, D_STATE)
    if products is not None:
        products += first_row * stride

    cell = (row[:, None, None] * D_INNER + own[None, :, None]) * D_STATE
    x += (first_row * D_INNER + first_channel) * D_STATE
    x_out += (first_row * D_INNER + first_channel) * D_STATE
    for piece in tl.static_range((D_STATE + BLOCK_N - 1) // BLOCK_N):
        entry = piece * BLOCK_N + tl.arange(0, BLOCK_N)
        has_entry = entry < D_STATE
        has_cell = has_own[:, :, None] & has_entry[None, None, :]
        before = tl.load(x + cell + entry[None, None, :], mask=has_cell, other=0.0)

        if products is not None:
            if piece == 0:
                if OVERLAPS:  # nothing above is made by the products, and nothing is stored before they are complete
                    gdc_wait()
                i_logit = load(products + 2 * D_STATE, row, channel, stride, has_row, has_channel)
                if W_f is not None:
                    f_logit = load(products + 2 * D_STATE + D_INNER, row, channel, stride, has_row, has_channel)
            B = load(products, row, entry, stride, has_row, has_entry)
            C = load(products + D_STATE, row, entry, stride, has_row, has_entry)
        else:
            B = tl.zeros((BLOCK_B, BLOCK_N), dtype=tl.float32)
            C = B
            for start in range(0, D_INNER, BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                has_k = k < D_INNER
                h = load_h(uz, u_tail, conv_taps, conv_bias, row, k, uz_batch, has_row, has_k, D_INNER, D_CONV)
                if piece == 0:
                    W = load(W_i + first_channel * D_INNER, own, k, D_INNER, has_channel, has_k)
                    i_logit += product(h, W)
                    if W_f is not None:
                        W = load(W_f + first_channel * D_INNER, own, k, D_INNER, has_channel, has_k)
                        f_logit += product(h, W)
                B += product(h, load(W_BC, entry, k, D_INNER, has_entry, has_k))
                C += product(h, load(W_BC + D_STATE * D_INNER, entry, k, D_INNER, has_entry, has_k))

        if piece == 0:
            h_own = silu(convolved(window(u_past, u_own, D_CONV), own_taps, own_bias)).to(u_own.dtype)
            h_seen = window(h_past, h_own, D_CONV)
            i, f = gate((i_logit + convolved(h_seen, own_i_taps, own_i_bias)) / gate_scale)
            lost = i
            if W_f is not None:
                f, lost = gate((f_logit + convolved(h_seen, own_f_taps, own_f_bias)) / gate_scale)
            kept = tl.where(f > 0.5, 1.0, 0.0)
            lost = tl.where(f > 0.5, lost, -f)
            v = i * h_own.to(tl.float32)
        # f * before + v B, but near f = 1 before + (v B - (1 - f) * before): see frame.after_token
        change = v[:, :, None] * B[:, None, :] - lost[:, :, None] * before
        after = kept[:, :, None] * before + change
        tl.store(x_out + cell + entry[None, None, :], after, mask=has_cell)
        m += tl.sum(after * C[:, None, :], axis=2)

    out = (alpha * m + own_D * h_own.to(tl.float32)) * silu(z)
    tl.store(y + row[:, None] * D_INNER + channel[None, :], out, mask=has_own)
    store_tail(u_tail_out, window(u_past, u_own, D_CONV), row, channel, has_row, has_channel, D_INNER, D_CONV)
    store_tail(h_tail_out, window(h_past, h_own, D_CONV), row, channel, has_row, has_channel, D_INNER, D_CONV)
