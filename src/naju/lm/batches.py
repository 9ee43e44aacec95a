"""Which tokens an update reads: a pure function of the seed and the step, whatever model reads them on how many
processes.

Without carried state every epoch cuts the text into windows at a new offset and reads each once, in a new order. With
it, the text is cut into as many lanes as an update has rows, and a row reads its lane from one end to the other.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from naju.lm.loss import IGNORED
from naju.lm.token_files import TokenSplit
from naju.mixers.state import State
from naju.training import seeded_generator

Offsets = NDArray[np.int64]
AnyState = TypeVar("AnyState", bound=State)


class Order:
    """Where in the text the rows of each update start."""

    def __init__(self, tokens: int, *, length: int, rows: int, seed: int, lanes: bool) -> None:
        self.length, self.rows, self.seed, self.lanes = length, rows, seed, lanes
        self.windows = tokens // length - 1  # one less than fit, so that there are as many at every offset
        least = rows if lanes else 1
        if self.windows < least:
            raise ValueError(
                f"the training split must hold at least {(least + 1) * length:,} tokens for {least} windows of length "
                f"{length}, but it has {tokens:,}"
            )
        self._epoch = lru_cache(maxsize=2)(self._draw)

    @property
    def lane(self) -> int:
        """Updates until every row has come to the end of its lane."""
        return self.windows // self.rows

    def begins(self, step: int) -> bool:
        """Whether the rows of this step begin their lanes; steps count from 0 here."""
        return self.lanes and step % self.lane == 0

    def starts(self, step: int) -> Offsets:
        """The first token of every row, (rows,)."""
        if self.lanes:
            offset, _ = self._epoch(step // self.lane)
            places = np.arange(self.rows) * self.lane + step % self.lane
            return offset + places * self.length
        place = step * self.rows + np.arange(self.rows)
        return np.array([self._window(*divmod(int(p), self.windows)) for p in place])

    def _window(self, epoch: int, place: int) -> int:
        offset, order = self._epoch(epoch)
        return offset + int(order[place]) * self.length

    def _draw(self, epoch: int) -> tuple[int, Tensor]:
        """An epoch's offset and the order of its windows."""
        generator = seeded_generator(self.seed, f"text of epoch {epoch}")
        offset = int(torch.randint(self.length, (), generator=generator))
        return offset, torch.randperm(self.windows, generator=generator)


class Packing(NamedTuple):
    """Rows laid end to end, and where documents begin in them: `cu_seqlens` of the sequences they fall into.

    A state has one row for each row of the batch outside and one for each sequence inside.
    """

    cu_seqlens: Tensor  # (sequences + 1,)
    source: (
        Tensor  # (sequences,): the row whose state enters each sequence; one more than the last row is the empty one
    )
    last: Tensor  # (rows,): the sequence that ends each row

    def open(self, state: AnyState, empty: AnyState) -> AnyState:
        """States of rows to states of sequences; `empty` is one row."""
        blank = iter(empty.tensors().values())
        return state.map(lambda t: torch.cat([t, _fitted(next(blank), t)])).reorder(self.source)

    def close(self, state: AnyState) -> AnyState:
        """States after the sequences to states after the rows."""
        return state.reorder(self.last)


def _fitted(blank: Tensor, tensor: Tensor) -> Tensor:
    """An empty past of no tokens becomes as long as the tensor's, with zeros, which mark tokens that are not real."""
    fits = blank.shape[1:] == tensor.shape[1:]
    return blank.to(tensor) if fits else tensor.new_zeros(1, *tensor.shape[1:])


class Batch(NamedTuple):
    tokens: Tensor  # (b, l)
    targets: Tensor  # (b, l): the tokens after them, IGNORED where the text has ended
    packing: Packing | None  # where documents reset the state

    def to(self, device: torch.device) -> Batch:
        """Copies that nobody waits for."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

        packing = None if self.packing is None else Packing(*map(moved, self.packing))
        return Batch(moved(self.tokens), moved(self.targets), packing)


def read_batch(split: TokenSplit, starts: Offsets, length: int, *, reset: bool) -> Batch:
    """The windows at `starts`, with nothing to predict beyond the text; `reset` adds where documents begin in them."""
    places = starts[:, None] + np.arange(length + 1)
    there = places < len(split.tokens)
    stored = split.tokens[np.minimum(places, len(split.tokens) - 1)]
    if stored.max() >= split.vocab_size:  # here, on the CPU: on a GPU it would take a wait to say which
        raise ValueError(
            f"tokens must be below the vocabulary's size of {split.vocab_size:,}, but one is {int(stored.max()):,}: "
            "the token files are damaged"
        )
    read = stored.astype(np.int32)
    targets = np.where(there, read, IGNORED)[:, 1:]
    packing = pack(split.documents, starts, length) if reset else None
    return Batch(torch.from_numpy(read[:, :-1].copy()), torch.from_numpy(targets.copy()), packing)


def pack(documents: NDArray[np.uint64], starts: Offsets, length: int) -> Packing:
    """Sequences end at rows and at documents, whose first tokens are given in order."""
    begins = documents.view(np.int64)
    cuts: list[int] = []
    source: list[int] = []
    last: list[int] = []
    for row, start in enumerate(starts.tolist()):
        left, right = np.searchsorted(begins, [start, start + length]).tolist()
        fresh = sorted({row * length + place - start for place in begins[left:right].tolist()})
        carried = [] if fresh and fresh[0] == row * length else [row * length]
        cuts += carried + fresh
        source += [row] * len(carried) + [len(starts)] * len(fresh)
        last.append(len(cuts) - 1)
    return Packing(torch.tensor([*cuts, len(starts) * length]), torch.tensor(source), torch.tensor(last))
