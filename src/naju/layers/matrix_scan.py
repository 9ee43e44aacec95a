"""The scan of every matrix memory: `S_t = decay_t * S_{t-1} + k_t v_t^T`, read as `o_t = S_t^T q_t`, head by head.

The decay, given as its logarithm, is one number a head (Mamba-2, RetNet, mLSTM) or one a key channel (GLA, RWKV-6). A
chunk of Q tokens is done by matrix products, all chunks at once, and a short loop carries the state between them. With
`R_t[s]` = decay_{s+1} … decay_t, what is left at t of the write at s, and P_t what is left of the state S that enters,

    o_t   = (q_t * P_t)^T S + sum_{s<=t} (q_t · R_t[s] k_s) v_s
    S_out = P_Q * S         + sum_s R_Q[s] k_s v_s^T

The logarithm of R is a sum that starts at s, never a difference of two prefix sums, and no exponent is above 0: strong
forgetting, decay 0 included, costs no digits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from naju.layers.cuts import outside
from naju.layers.head_scan import head_scan, head_scan_refuses
from naju.layers.layout import Layout, PaddedLayout
from naju.layers.public_kernels import public_kernel, suits_public_kernels
from naju.scan.dispatch import state_dtype
from naju.scan.frame import without_autocast

# A decay a channel makes R as wide as the keys, so its chunks are shorter.
HEAD_CHUNK, CHANNEL_CHUNK = 64, 16


class Drive(NamedTuple):
    """What a scan reads at each token."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Drive:
        return Drive(*(function(tensor) for tensor in self))


def matrix_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    *,
    bonus: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs (b, l, heads, value) in the precision of v, and the state after the last token.

    `q, k`: (b, l, heads, key), or one head that all share; `v`: (b, l, heads, value); `log_decay`: (b, l, heads, 1 or
    key), at most 0; `state`: (rows, heads, key, value), float32 or float64, a row for each packed sequence. With
    `bonus` (heads, key) a token reads the state before it, and its own write through the bonus:
    `o_t = (S_{t-1} + (bonus * k_t) v_t^T)^T q_t`.
    """
    kernel = public_kernel(q, k, v, log_decay, bonus, cu_seqlens)
    if kernel is not None:
        return kernel(q, k, v, log_decay, state, bonus)
    if head_scan_refuses(q, v, log_decay, bonus, cu_seqlens) is None:
        return head_scan(q, k, v, log_decay, state)
    cut_out = outside("matrix_scan")
    if cut_out is not None and suits_public_kernels(q, k, v, cu_seqlens):
        return cut_out(q, k, v, log_decay, state, bonus=bonus, cu_seqlens=cu_seqlens)  # type: ignore[no-any-return]
    dtype = state_dtype(v.dtype)
    with without_autocast(v.device):
        drive = Drive(*(tensor.to(dtype) for tensor in (q, k, v, log_decay)))
        bonus = None if bonus is None else bonus.to(dtype)
        if v.shape[1] == 1 and cu_seqlens is None:
            o, state = matrix_step(*drive.map(lambda tensor: tensor.squeeze(1)), state=state, bonus=bonus)
            o = o.unsqueeze(1)
        else:
            o, state = _in_chunks(drive, state, bonus, _sequence_lengths(v.shape[1], cu_seqlens))
    return o.to(v.dtype), state


def matrix_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, *, bonus: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token of `matrix_scan`: the same arguments without the length axis, all in the precision of the state."""
    write = k.unsqueeze(-1) * v.unsqueeze(-2)  # (b, heads, key, value)
    after = log_decay.exp().unsqueeze(-1) * state + write
    read = after if bonus is None else state + bonus.unsqueeze(-1) * write
    return (q.unsqueeze(-2) @ read).squeeze(-2), after


def held(layout: Layout, log_decay: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Decays and keys, (b, l, heads, ·), that leave the state as it is wherever there is no token."""
    if not isinstance(layout, PaddedLayout):
        return log_decay, k
    padding = ~layout.real[..., None, None]
    return log_decay.masked_fill(padding, 0.0), k.masked_fill(padding, 0.0)


def running_max(values: Tensor, log_decay: Tensor, start: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """`m_t = max(log_decay_t + m_{t-1}, values_t)`, (b, l, heads), with `m_0` = start, (rows, heads); no derivative."""
    values, log_decay, start = values.detach(), log_decay.detach(), start.detach()
    if values.shape[1] == 1 and cu_seqlens is None:
        return torch.maximum(log_decay + start.unsqueeze(1), values)
    lengths = _sequence_lengths(values.shape[1], cu_seqlens)
    values = _into_chunks(values.unsqueeze(-1), lengths, HEAD_CHUNK, fill=-torch.inf)
    log_decay = _into_chunks(log_decay.unsqueeze(-1), lengths, HEAD_CHUNK)
    spans = _spans(log_decay)
    own = torch.where(_seen(spans), spans + values.unsqueeze(-3), spans.new_full((), -torch.inf)).amax(-2)
    total = log_decay.cumsum(-2)  # (b, c, heads, q, 1), as is own: the largest value of the chunk itself
    entering, _ = _carry(
        lambda m, decay, newest: torch.maximum(decay + m, newest),
        total[..., -1, :],
        own[..., -1, :],
        start.unsqueeze(-1),
        _chunk_counts(lengths, HEAD_CHUNK),
    )
    m = torch.maximum(total + entering.unsqueeze(-2), own)
    return _out_of_chunks(m, lengths).squeeze(-1)


def _sequence_lengths(length: int, cu_seqlens: Tensor | None) -> list[int]:
    """The lengths of the packed sequences, or the whole length."""
    if cu_seqlens is None:
        return [length]
    return [right - left for left, right in itertools.pairwise(cu_seqlens.tolist())]


def _in_chunks(drive: Drive, state: Tensor, bonus: Tensor | None, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    size = HEAD_CHUNK if drive.log_decay.shape[-1] == 1 else CHANNEL_CHUNK
    q, k, v, log_decay = drive.map(lambda tensor: _into_chunks(tensor, lengths, size))
    spans = _spans(log_decay)
    left = torch.where(_seen(spans), spans.exp(), spans.new_zeros(()))  # R: (b, c, heads, q, q, 1 or key)
    kept = log_decay.cumsum(-2).exp()  # P: (b, c, heads, q, 1 or key)
    written = (k * left[..., -1, :, :]).transpose(-1, -2) @ v  # (b, c, heads, key, value)
    entering, final = _carry(
        lambda x, decay, write: decay.unsqueeze(-1) * x + write,
        kept[..., -1, :],
        written,
        state,
        _chunk_counts(lengths, size),
    )
    if bonus is None:
        scores = _scores(q, k, left)
    else:  # a token reads what was there one token before, and itself through the bonus
        scores = F.pad(_scores(q[..., 1:, :], k, left[..., :-1, :, :]), (0, 0, 1, 0))
        scores = scores + torch.diag_embed((q * bonus.unsqueeze(-2) * k).sum(-1))
        kept = F.pad(kept[..., :-1, :], (0, 0, 1, 0), value=1.0)
    o = scores @ v + (q * kept) @ entering
    return _out_of_chunks(o, lengths), final


def _spans(log_decay: Tensor) -> Tensor:
    """Sums of log_decay (…, q, c) over s+1 … t, at (…, t, s, c); 0 where there is nothing to sum."""
    steps = log_decay.unsqueeze(-2).expand(*log_decay.shape[:-1], log_decay.shape[-2], -1)
    return torch.where(_seen(steps, -1), steps, steps.new_zeros(())).cumsum(-3)


def _seen(pairs: Tensor, diagonal: int = 0) -> Tensor:
    """Whether s is at t or before, for (…, t, s, c)."""
    return torch.ones(pairs.shape[-3:-1], dtype=torch.bool, device=pairs.device).tril(diagonal).unsqueeze(-1)


def _scores(q: Tensor, k: Tensor, left: Tensor) -> Tensor:
    """`q_t · R_t[s] k_s` at (…, t, s)."""
    if left.shape[-1] == 1:
        return (q @ k.transpose(-1, -2)) * left.squeeze(-1)
    return ((left * k.unsqueeze(-3)) @ q.unsqueeze(-1)).squeeze(-1)


def _carry(
    combine: Callable[[Tensor, Tensor, Tensor], Tensor],
    kept: Tensor,
    written: Tensor,
    state: Tensor,
    chunks: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """States that enter each chunk, (b, c, …), and the final ones; `chunks` counts those of each packed sequence."""
    entering, final = [], []
    steps = zip(kept.unbind(1), written.unbind(1), strict=True)
    rows = [state] if len(chunks) == 1 else state.split(1)
    for x, count in zip(rows, chunks, strict=True):
        for _ in range(count):
            entering.append(x)
            x = combine(x, *next(steps))
        final.append(x)
    return torch.stack(entering, dim=1), torch.cat(final)


def _chunk_counts(lengths: Sequence[int], size: int) -> list[int]:
    return [-(-length // size) for length in lengths]


def _into_chunks(tensor: Tensor, lengths: Sequence[int], size: int, fill: float = 0.0) -> Tensor:
    """(b, l, heads, c) to (b, chunks, heads, size, c): each sequence padded to whole chunks, so that none holds two."""
    parts = tensor.split(list(lengths), dim=1)
    padded = [F.pad(part, (0, 0, 0, 0, 0, -part.shape[1] % size), value=fill) for part in parts]
    joined = torch.cat(padded, dim=1)
    return joined.reshape(joined.shape[0], -1, size, *joined.shape[2:]).transpose(2, 3)


def _out_of_chunks(tensor: Tensor, lengths: Sequence[int]) -> Tensor:
    size = tensor.shape[3]
    padded = tensor.transpose(2, 3).flatten(1, 2).split([length + -length % size for length in lengths], dim=1)
    return torch.cat([part[:, :length] for part, length in zip(padded, lengths, strict=True)], dim=1)
