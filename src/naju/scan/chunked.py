"""The scan in chunks: matrix products inside a chunk, for all chunks at once, and a short loop that carries the state.

With `P_t = f_1 … f_t` since the chunk's start and `A_t[s] = f_{s+1} … f_t v_s`, what the write at s has left at t,

    m_t   = P_t (S C_t) + sum_{s<=t} (C_t·B_s) A_t[s]          S: the state that enters the chunk
    S_out = P_Q S       + sum_s A_Q[s] B_s^T

P and A grow by products, one token at a time in all chunks together. No logarithm and no difference of prefix sums
appears, so gates that forget strongly (f = 0 included) cost no digits, in the values or in any derivative, and every
torch transform (double backward, forward mode, vmap) sees ordinary operations.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from naju.scan.dispatch import Backend
from naju.scan.frame import run_core

CHUNK = 16


def _core(
    f: Tensor, v: Tensor, B: Tensor, C: Tensor, state: Tensor, boundaries: list[int] | None
) -> tuple[Tensor, Tensor]:
    lengths = [f.shape[1]] if boundaries is None else _differences(boundaries)
    f, v, B, C = (_into_chunks(tensor, lengths, fill) for tensor, fill in ((f, 1.0), (v, 0.0), (B, 0.0), (C, 0.0)))
    inside, kept, left = _inside_chunks(f, v, B, C)
    written = left.transpose(-1, -2) @ B  # (b, c, d, n)
    entering, final = _carry(kept[:, :, -1], written, state, [-(-length // CHUNK) for length in lengths])
    m = inside + kept * (C @ entering.transpose(-1, -2))
    return _out_of_chunks(m, lengths), final


def _inside_chunks(f: Tensor, v: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Readings of the chunk's own writes (b, c, q, d), P (b, c, q, d), and A at the chunk's end (b, c, q, d)."""
    scores = C @ B.transpose(-1, -2)  # (b, c, q, q)
    left, product = v[:, :, :0], torch.ones_like(f[:, :, :1])
    readings, kept = [], []
    for t in range(CHUNK):
        f_t, v_t = f[:, :, t : t + 1], v[:, :, t : t + 1]
        left = torch.cat([f_t * left, v_t], dim=2)  # (b, c, t + 1, d)
        product = f_t * product
        readings.append(scores[:, :, t : t + 1, : t + 1] @ left)
        kept.append(product)
    return torch.cat(readings, dim=2), torch.cat(kept, dim=2), left


def _carry(kept: Tensor, written: Tensor, state: Tensor, chunks: list[int]) -> tuple[Tensor, Tensor]:
    """States that enter each chunk (b, c, d, n), and the final ones; `chunks` counts those of each packed sequence."""
    entering, final = [], []
    steps = zip(kept.unsqueeze(-1).unbind(1), written.unbind(1), strict=True)
    rows = [state] if len(chunks) == 1 else state.split(1)
    for x, count in zip(rows, chunks, strict=True):
        for _ in range(count):
            entering.append(x)
            kept_c, written_c = next(steps)
            x = kept_c * x + written_c
        final.append(x)
    return torch.stack(entering, dim=1), torch.cat(final)


def _into_chunks(tensor: Tensor, lengths: list[int], fill: float) -> Tensor:
    """(b, l, ·) to (b, c, q, ·): each sequence padded to whole chunks, so that no chunk holds two of them."""
    padded = [F.pad(part, (0, 0, 0, -part.shape[1] % CHUNK), value=fill) for part in tensor.split(lengths, dim=1)]
    joined = torch.cat(padded, dim=1)
    return joined.reshape(joined.shape[0], -1, CHUNK, joined.shape[-1])


def _out_of_chunks(tensor: Tensor, lengths: list[int]) -> Tensor:
    flat = tensor.flatten(1, 2)
    padded = flat.split([length + -length % CHUNK for length in lengths], dim=1)
    return torch.cat([part[:, :length] for part, length in zip(padded, lengths, strict=True)], dim=1)


def _differences(boundaries: list[int]) -> list[int]:
    return [right - left for left, right in itertools.pairwise(boundaries)]


CHUNKED = Backend(name="chunked", run=lambda inputs: run_core(_core, inputs))
