"""Retention: facts are written once and never updated, and one of them is asked for (T1 and T2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from naju.tasks.base import Batch
from naju.tasks.events import (
    EOS,
    EVENT_LENGTH,
    IS,
    KEY,
    PAD,
    QUERY_LENGTH,
    QUES,
    SEP,
    EventTask,
    assemble,
    below,
    check_at_least,
    check_range,
    distinct,
    integers,
    join,
    scattered_starts,
)


@dataclass(frozen=True, kw_only=True)
class KeyValueTask(EventTask):
    """`KEY entity IS value SEP` … `QUES KEY entity EOS`; the group is the third of the facts that holds the answer."""

    groups: ClassVar[tuple[str, ...]] = ("early", "middle", "late")

    def _batch(self, starts: Tensor, kept: Tensor, length: int, generator: Generator) -> Batch:
        """Facts at `starts` (b, e), of which each row keeps its last `kept` (b,)."""
        count, slots = starts.shape
        entity = distinct(count, self.n_entities, slots, generator)
        value = integers(0, self.n_values - 1, (count, slots), generator)
        group = integers(0, 2, (count,), generator)
        asked = (slots - kept + _within_third(group, kept, generator)).unsqueeze(1)
        facts = join(KEY, self.entity_token(entity), IS, self.value_token(value), SEP)
        dropped = torch.arange(slots, device=kept.device) < (slots - kept).unsqueeze(1)
        query = join(QUES, KEY, self.entity_token(entity.gather(1, asked)), EOS).squeeze(1)
        tokens = assemble(facts.masked_fill(dropped.unsqueeze(-1), PAD), starts, query, length)
        return Batch(tokens, value.gather(1, asked).squeeze(1), group)


@dataclass(frozen=True, kw_only=True)
class KeyValueRetrieval(KeyValueTask):
    """T1: between `min_facts` and `max_facts` facts in one block, right before the query or, if `anywhere`, at any
    place before it; padding around them."""

    min_facts: int = 8
    max_facts: int = 16
    anywhere: bool = False

    def __post_init__(self) -> None:
        check_range("min_facts", self.min_facts, "max_facts", self.max_facts)
        check_at_least("min_facts", self.min_facts, 3, "one for each third")
        check_at_least("n_entities", self.n_entities, self.max_facts, "every fact has its own entity")
        check_at_least("n_values", self.n_values, 2, "an answer needs an alternative")

    def minimum_length(self) -> int:
        return EVENT_LENGTH * self.max_facts + QUERY_LENGTH

    def sample(self, count: int, length: int, generator: Generator) -> Batch:
        self.check_size(count, length)
        back = torch.arange(self.max_facts, 0, -1, device=generator.device)
        starts = (length - QUERY_LENGTH - EVENT_LENGTH * back).expand(count, -1)
        kept = integers(self.min_facts, self.max_facts, (count,), generator)
        batch = self._batch(starts, kept, length, generator)
        if not self.anywhere:
            return batch
        free = length - QUERY_LENGTH - EVENT_LENGTH * kept
        return batch._replace(tokens=_slid_left(batch.tokens, below(free + 1, generator)))


@dataclass(frozen=True, kw_only=True)
class ScatteredKeyValueRetrieval(KeyValueTask):
    """T2: `n_facts` facts anywhere in the sequence; their number is fixed, so the gaps grow with the length."""

    n_facts: int = 32

    def __post_init__(self) -> None:
        check_at_least("n_facts", self.n_facts, 3, "one for each third")
        check_at_least("n_entities", self.n_entities, self.n_facts, "every fact has its own entity")
        check_at_least("n_values", self.n_values, 2, "an answer needs an alternative")

    def minimum_length(self) -> int:
        return EVENT_LENGTH * self.n_facts + QUERY_LENGTH

    def sample(self, count: int, length: int, generator: Generator) -> Batch:
        self.check_size(count, length)
        starts = scattered_starts(count, self.n_facts, length - QUERY_LENGTH, generator)
        kept = torch.full((count,), self.n_facts, device=generator.device)
        return self._batch(starts, kept, length, generator)


def _within_third(third: Tensor, size: Tensor, generator: Generator) -> Tensor:
    """An index into `size` things, uniform within the given third of them."""
    low, high = third * size // 3, (third + 1) * size // 3
    return low + below(high - low, generator)


def _slid_left(tokens: Tensor, by: Tensor) -> Tensor:
    """What stands before the query moved left by `by` (b,) places, none more than there is padding to its left."""
    room = tokens.shape[1] - QUERY_LENGTH
    source = (torch.arange(room, device=tokens.device) + by.unsqueeze(1)) % room
    return torch.cat([tokens[:, :room].gather(1, source), tokens[:, room:]], dim=1)
