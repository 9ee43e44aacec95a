"""Who is whose neighbour in a batch: plain rows, rows with padding, or several sequences packed into one row.

A mixer asks its layout for each token's recent past (the short convolutions read it) and for what a sequence leaves
behind at its end, and so never has a case of its own for padding or packing. States have one row a sequence.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from naju.scan.dispatch import boundaries_on, check_cu_seqlens

ADDITIVE = (
    "attention_mask must be 1 at tokens and 0 at padding; of floats it must have some 1 and no other number, since one "
    "that is added to scores has 0 at tokens and large negative numbers at padding: pass `mask == 0` instead of that"
)


class Layout:
    """Every row is one sequence of the full length."""

    cu_seqlens: Tensor | None = None
    lengths: Tensor | None = None  # of every row, (rows,), where they differ: `arrange` puts its tokens first

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def arrange(self, u: Tensor) -> Tensor:
        """(b, l, ·) as the recurrence wants it."""
        return u

    def restore(self, out: Tensor) -> Tensor:
        """Undo `arrange` on an output."""
        return out

    def hold(self, f_logit: Tensor, i_logit: Tensor) -> tuple[Tensor, Tensor]:
        """Gate logits that leave the state as it is wherever there is no token."""
        return f_logit, i_logit

    def past(self, u: Tensor, tail: Tensor) -> list[Tensor]:
        """u delayed by width-1, …, 1, 0 tokens; before a sequence's start comes its tail, (rows, width-1, d)."""
        joined = torch.cat([tail.to(u.dtype), u], dim=1)
        return [joined[:, delay : delay + u.shape[1]] for delay in range(tail.shape[1] + 1)]

    def last(self, u: Tensor, tail: Tensor) -> Tensor:
        """The tail for whatever follows: each sequence's last width-1 tokens."""
        count = tail.shape[1]
        newest = torch.cat([tail.to(u.dtype), u[:, -count:] if count else u[:, :0]], dim=1)
        return newest[:, newest.shape[1] - count :]


class PaddedLayout(Layout):
    """Rows with padding at any place: real tokens move to the left, in order, and the rest is held."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.shape[0])
        self.mask = mask.bool()
        self.order = torch.argsort(~self.mask, dim=1, stable=True)
        self.lengths: Tensor = self.mask.sum(dim=1)
        self.real = torch.arange(mask.shape[1], device=mask.device) < self.lengths.unsqueeze(1)

    def arrange(self, u: Tensor) -> Tensor:
        return self._chosen(u, self.order, self.real)

    def restore(self, out: Tensor) -> Tensor:
        rank = (self.mask.cumsum(1) - 1).clamp_min(0)  # what sorting `order` back gives, without sorting
        return self._chosen(out, rank, self.mask)

    def hold(self, f_logit: Tensor, i_logit: Tensor) -> tuple[Tensor, Tensor]:
        padding = ~self.real.unsqueeze(-1)
        return f_logit.masked_fill(padding, math.inf), i_logit.masked_fill(padding, -math.inf)

    def last(self, u: Tensor, tail: Tensor) -> Tensor:
        joined = torch.cat([tail.to(u.dtype), u], dim=1)
        places = self.lengths.unsqueeze(1) + torch.arange(tail.shape[1], device=u.device)
        return _take(joined, places)

    @staticmethod
    def _chosen(u: Tensor, order: Tensor, real: Tensor) -> Tensor:
        """Selected, not multiplied: whatever stands in the padding, NaN included, goes no further."""
        return torch.where(real.unsqueeze(-1), _take(u, order), u.new_zeros(()))


class PackedLayout(Layout):
    """Several sequences one after the other in a single row, bounded by `cu_seqlens`."""

    def __init__(self, cu_seqlens: Tensor, length: int) -> None:
        super().__init__(len(cu_seqlens) - 1)
        self.cu_seqlens = cu_seqlens = cu_seqlens.long()
        self.starts, self.ends = cu_seqlens[:-1], cu_seqlens[1:]
        self.place = torch.arange(length, device=cu_seqlens.device)
        self.sequence = torch.searchsorted(self.ends, self.place, right=True)

    def past(self, u: Tensor, tail: Tensor) -> list[Tensor]:
        width = tail.shape[1] + 1
        return [self._at(u, tail, self.sequence, self.place - delay).unsqueeze(0) for delay in reversed(range(width))]

    def last(self, u: Tensor, tail: Tensor) -> Tensor:
        count = tail.shape[1]
        places = self.ends.unsqueeze(1) + torch.arange(-count, 0, device=u.device)
        sequences = torch.arange(self.rows, device=u.device).unsqueeze(1).expand_as(places)
        return self._at(u, tail, sequences.flatten(), places.flatten()).view(self.rows, count, u.shape[-1])

    def _at(self, u: Tensor, tail: Tensor, sequence: Tensor, place: Tensor) -> Tensor:
        """The token of `sequence` at `place`; a place before the sequence's start counts back into its tail."""
        count = tail.shape[1]
        inside = place - self.starts[sequence]
        rows = torch.cat([tail.to(u.dtype).flatten(0, 1), u[0]])
        before = sequence * count + (inside + count)
        return rows[torch.where(inside >= 0, self.rows * count + place, before)]


def layout_of(u: Tensor, attention_mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Layout:
    """The layout of a batch u (b, l, ·), after checking that mask and boundaries fit it."""
    batch, length = u.shape[:2]
    if attention_mask is not None and cu_seqlens is not None:
        raise ValueError("attention_mask and cu_seqlens exclude each other: packed sequences have no padding")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch, length)
        return PackedLayout(boundaries_on(u.device, cu_seqlens), length)
    if attention_mask is None:
        return Layout(batch)
    return PaddedLayout(checked_mask(attention_mask, batch, length))


def checked_mask(attention_mask: Tensor, batch: int, length: int) -> Tensor:
    """The mask as booleans, after checking that it is as long as its text: whoever cuts both has to ask first."""
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor, but is a {type(attention_mask).__name__}")
    if tuple(attention_mask.shape) != (batch, length):
        raise ValueError(f"attention_mask must have shape {(batch, length)}, but has {tuple(attention_mask.shape)}")
    return real_tokens(attention_mask)


def real_tokens(attention_mask: Tensor) -> Tensor:
    """The mask as booleans. One of floats could be meant to be added to scores, where 0 is a token and -inf padding;
    that one is refused, and so is one of zeros alone, which would say the opposite to its reader and its writer."""
    if not attention_mask.is_floating_point():
        return attention_mask.bool()
    if torch._C._functorch.is_batchedtensor(attention_mask):
        raise TypeError("attention_mask must be of booleans or integers under vmap, where floats cannot be looked at")
    real = attention_mask == 1
    is_clear = ((attention_mask == 0) | real).all() & real.any()
    recorded = attention_mask.is_cuda and torch.cuda.is_current_stream_capturing()
    if recorded or torch.compiler.is_compiling() or attention_mask.is_meta:
        torch._assert_async(is_clear, ADDITIVE)
    elif not is_clear:
        raise ValueError(ADDITIVE)
    return real


def _take(u: Tensor, places: Tensor) -> Tensor:
    return u.gather(1, places.unsqueeze(-1).expand(-1, -1, u.shape[-1]))
