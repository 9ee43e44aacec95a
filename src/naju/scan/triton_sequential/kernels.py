"""The two Triton kernels of the sequential scan. Importing this module imports Triton, so only a scan does.

A program owns one sequence and a block of channels and walks the tokens one by one with the state, (channels, state
entries), in registers. Lengths and strides are never specialized on: a new length compiles nothing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

STRIDES = [f"{name}_{axis}" for name in ("h", "f_logit", "i_logit", "B", "C", "z", "dy") for axis in ("batch", "token")]
FORWARD_SIZES = ["length", *(name for name in STRIDES if not name.startswith("dy"))]
BACKWARD_SIZES = ["length", "tokens", *STRIDES]


@triton.jit
def gate(logit):
    """sigmoid(logit) and sigmoid(-logit): each keeps its digits when the other is near 1."""
    e = tl.exp(-tl.abs(logit))
    large = 1.0 / (1.0 + e)
    small = e * large
    return tl.where(logit < 0, small, large), tl.where(logit < 0, large, small)


@triton.jit
def place(cu_seqlens, sequence, length):
    """Batch index, first and end token of a sequence. Boundaries are clamped: on a GPU nobody has checked them."""
    batch, first, end = sequence, sequence * 0, sequence * 0 + length
    if cu_seqlens is not None:
        batch = sequence * 0
        first = tl.maximum(tl.load(cu_seqlens + sequence).to(tl.int64), 0)
        end = tl.minimum(tl.load(cu_seqlens + sequence + 1).to(tl.int64), length)
    return batch, first, end


@triton.jit
def load_row(matrix, batch_stride, token_stride, batch, token, column, mask):
    return tl.load(matrix + batch * batch_stride + token * token_stride + column, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=FORWARD_SIZES)
def forward_kernel(
    h,
    f_logit,
    i_logit,
    B,
    C,
    D,
    z,
    initial_state,
    cu_seqlens,
    y,
    state,
    trajectory,
    h_batch: tl.int64,
    h_token: tl.int64,
    f_logit_batch: tl.int64,
    f_logit_token: tl.int64,
    i_logit_batch: tl.int64,
    i_logit_token: tl.int64,
    B_batch: tl.int64,
    B_token: tl.int64,
    C_batch: tl.int64,
    C_token: tl.int64,
    z_batch: tl.int64,
    z_token: tl.int64,
    length: tl.int64,
    alpha: tl.float32,
    D_INNER: tl.constexpr,
    D_STATE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """y, the final state and, where `trajectory` is given, the state that every token meets."""
    blocks: tl.constexpr = (D_INNER + BLOCK_D - 1) // BLOCK_D
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    channel = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    entry = tl.arange(0, BLOCK_N)
    has_channel, has_entry = channel < D_INNER, entry < D_STATE
    cell = channel[:, None] * D_STATE + entry[None, :]
    has_cell = has_channel[:, None] & has_entry[None, :]

    batch, first, end = place(cu_seqlens, sequence, length)
    x = tl.load(initial_state + sequence * D_INNER * D_STATE + cell, mask=has_cell, other=0.0)
    t = sequence * 0
    while t < end - first:  # Triton 3.6's interpreter takes no tensor as a bound of `range`
        token = end - 1 - t if REVERSE else first + t
        h_t = load_row(h, h_batch, h_token, batch, token, channel, has_channel)
        f, _ = gate(load_row(f_logit, f_logit_batch, f_logit_token, batch, token, channel, has_channel))
        i, _ = gate(load_row(i_logit, i_logit_batch, i_logit_token, batch, token, channel, has_channel))
        B_t = load_row(B, B_batch, B_token, batch, token, entry, has_entry)
        C_t = load_row(C, C_batch, C_token, batch, token, entry, has_entry)

        row = batch * length + token
        if trajectory is not None:
            tl.store(trajectory + row * D_INNER * D_STATE + cell, x, mask=has_cell)
        x = f[:, None] * x + (i * h_t)[:, None] * B_t[None, :]
        y_t = alpha * tl.sum(x * C_t[None, :], axis=1)
        if D is not None:
            y_t += tl.load(D + channel, mask=has_channel, other=0.0).to(tl.float32) * h_t
        if z is not None:
            z_t = load_row(z, z_batch, z_token, batch, token, channel, has_channel)
            on, _ = gate(z_t)
            y_t *= z_t * on
        tl.store(y + row * D_INNER + channel, y_t, mask=has_channel)
        t += 1
    tl.store(state + sequence * D_INNER * D_STATE + cell, x, mask=has_cell)


@triton.jit(do_not_specialize=BACKWARD_SIZES)
def backward_kernel(
    dy,
    dstate,
    trajectory,
    h,
    f_logit,
    i_logit,
    B,
    C,
    D,
    z,
    cu_seqlens,
    dh,
    df_logit,
    di_logit,
    dB,
    dC,
    dD,
    dz,
    dinitial_state,
    dy_batch: tl.int64,
    dy_token: tl.int64,
    h_batch: tl.int64,
    h_token: tl.int64,
    f_logit_batch: tl.int64,
    f_logit_token: tl.int64,
    i_logit_batch: tl.int64,
    i_logit_token: tl.int64,
    B_batch: tl.int64,
    B_token: tl.int64,
    C_batch: tl.int64,
    C_token: tl.int64,
    z_batch: tl.int64,
    z_token: tl.int64,
    length: tl.int64,
    tokens: tl.int64,
    alpha: tl.float32,
    D_INNER: tl.constexpr,
    D_STATE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Every gradient, with the adjoint state X_t = dm_t C_t^T + f_{t+1} X_{t+1}.

    dB and dC have a leading axis of channel blocks, dD one of sequences; the caller sums over them.
    """
    blocks: tl.constexpr = (D_INNER + BLOCK_D - 1) // BLOCK_D
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    channel = block * BLOCK_D + tl.arange(0, BLOCK_D)
    entry = tl.arange(0, BLOCK_N)
    has_channel, has_entry = channel < D_INNER, entry < D_STATE
    cell = channel[:, None] * D_STATE + entry[None, :]
    has_cell = has_channel[:, None] & has_entry[None, :]
    dB += block.to(tl.int64) * tokens * D_STATE
    dC += block.to(tl.int64) * tokens * D_STATE

    batch, first, end = place(cu_seqlens, sequence, length)
    X = tl.load(dstate + sequence * D_INNER * D_STATE + cell, mask=has_cell, other=0.0)
    dD_sum = tl.zeros((BLOCK_D,), dtype=tl.float32)
    t = sequence * 0
    while t < end - first:
        token = first + t if REVERSE else end - 1 - t
        row = batch * length + token
        h_t = load_row(h, h_batch, h_token, batch, token, channel, has_channel)
        f, f_off = gate(load_row(f_logit, f_logit_batch, f_logit_token, batch, token, channel, has_channel))
        i, i_off = gate(load_row(i_logit, i_logit_batch, i_logit_token, batch, token, channel, has_channel))
        B_t = load_row(B, B_batch, B_token, batch, token, entry, has_entry)
        C_t = load_row(C, C_batch, C_token, batch, token, entry, has_entry)
        met = tl.load(trajectory + row * D_INNER * D_STATE + cell, mask=has_cell, other=0.0)
        v = i * h_t
        x = f[:, None] * met + v[:, None] * B_t[None, :]

        dp = load_row(dy, dy_batch, dy_token, batch, token, channel, has_channel)  # of y before the factor silu(z)
        D_d = 0.0
        if D is not None:
            D_d = tl.load(D + channel, mask=has_channel, other=0.0).to(tl.float32)
        if z is not None:
            z_t = load_row(z, z_batch, z_token, batch, token, channel, has_channel)
            on, off = gate(z_t)
            p = alpha * tl.sum(x * C_t[None, :], axis=1) + D_d * h_t
            tl.store(dz + row * D_INNER + channel, dp * p * on * (1.0 + z_t * off), mask=has_channel)
            dp *= z_t * on
        dm = alpha * dp

        X += dm[:, None] * C_t[None, :]
        dv = tl.sum(X * B_t[None, :], axis=1)
        df = tl.sum(X * met, axis=1)
        tl.store(dh + row * D_INNER + channel, dv * i + D_d * dp, mask=has_channel)
        tl.store(df_logit + row * D_INNER + channel, df * (f * f_off), mask=has_channel)
        tl.store(di_logit + row * D_INNER + channel, dv * h_t * (i * i_off), mask=has_channel)
        tl.store(dB + row * D_STATE + entry, tl.sum(X * v[:, None], axis=0), mask=has_entry)
        tl.store(dC + row * D_STATE + entry, tl.sum(x * dm[:, None], axis=0), mask=has_entry)
        dD_sum += dp * h_t
        X = f[:, None] * X
        t += 1
    tl.store(dinitial_state + sequence * D_INNER * D_STATE + cell, X, mask=has_cell)
    if dD is not None:
        tl.store(dD + sequence * D_INNER + channel, dD_sum, mask=has_channel)
