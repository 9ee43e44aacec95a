"""Overwriting: one entity is updated several times among distractors, and only its latest value counts (T3 and T4)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from naju.tasks.base import Batch
from naju.tasks.events import (
    EOS,
    EVENT_LENGTH,
    FINAL,
    INIT,
    LATER,
    LIKES,
    NOW,
    QUERY_LENGTH,
    QUES,
    SEP,
    EventTask,
    assemble,
    check_at_least,
    check_range,
    distinct,
    integers,
    join,
    scattered_starts,
)


@dataclass(frozen=True, kw_only=True)
class StateTrackingTask(EventTask):
    """`CONN entity LIKES value SEP` … `QUES entity NOW EOS`; the group is the third of the sequence that holds the
    target's last update."""

    min_updates: int = 3
    max_updates: int = 6
    groups: ClassVar[tuple[str, ...]] = ("far", "middle", "near")

    def __post_init__(self) -> None:
        check_range("min_updates", self.min_updates, "max_updates", self.max_updates)
        check_at_least("n_entities", self.n_entities, 2, "the target and a distractor")
        check_at_least("n_values", self.n_values, max(2, self.max_updates), "the target's values are distinct")

    @abstractmethod
    def _connectives(self, nth_update: Tensor, updates: Tensor, generator: Generator) -> Tensor:
        """The first token of every event (b, e); `nth_update` counts the target's updates from 0, -1 elsewhere."""

    def _batch(self, starts: Tensor, length: int, generator: Generator) -> Batch:
        count, slots = starts.shape
        updates = integers(self.min_updates, self.max_updates, (count,), generator).unsqueeze(1)
        of_target = distinct(count, slots, slots, generator) < updates
        nth_update = torch.where(of_target, of_target.cumsum(1) - 1, -1)
        target, entity = self._entities(of_target, generator)
        value = self._values(nth_update, generator)
        events = join(
            self._connectives(nth_update, updates, generator),
            self.entity_token(entity),
            torch.full_like(entity, LIKES),
            self.value_token(value),
            torch.full_like(entity, SEP),
        )
        latest = nth_update.argmax(1, keepdim=True)
        query = join(QUES, self.entity_token(target), NOW, EOS).squeeze(1)
        group = starts.gather(1, latest) * len(self.groups) // (length - QUERY_LENGTH)
        tokens = assemble(events, starts, query, length)
        return Batch(tokens, value.gather(1, latest).squeeze(1), group.squeeze(1))

    def _entities(self, of_target: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """The target (b, 1) and the entity of every event (b, e); a distractor is any other entity."""
        target = integers(0, self.n_entities - 1, (len(of_target), 1), generator)
        other = integers(0, self.n_entities - 2, tuple(of_target.shape), generator)
        return target, torch.where(of_target, target, other + (other >= target))

    def _values(self, nth_update: Tensor, generator: Generator) -> Tensor:
        """(b, e): distinct values for the target's updates, independent ones elsewhere."""
        own = distinct(len(nth_update), self.n_values, self.max_updates, generator)
        other = integers(0, self.n_values - 1, tuple(nth_update.shape), generator)
        return torch.where(nth_update >= 0, own.gather(1, nth_update.clamp_min(0)), other)


@dataclass(frozen=True, kw_only=True)
class CurrentStateTracking(StateTrackingTask):
    """T3: events fill the sequence; the target's first update says INIT, its last FINAL."""

    def minimum_length(self) -> int:
        return EVENT_LENGTH * self.max_updates + QUERY_LENGTH

    def sample(self, count: int, length: int, generator: Generator) -> Batch:
        self.check_size(count, length)
        events, rest = divmod(length - QUERY_LENGTH, EVENT_LENGTH)
        starts = rest + EVENT_LENGTH * torch.arange(events, device=generator.device)
        return self._batch(starts.expand(count, -1), length, generator)

    def _connectives(self, nth_update: Tensor, updates: Tensor, generator: Generator) -> Tensor:
        distractor = torch.where(integers(0, 1, tuple(nth_update.shape), generator) == 0, INIT, LATER)
        connective = torch.where(nth_update > 0, LATER, distractor).masked_fill(nth_update == 0, INIT)
        return connective.masked_fill(nth_update == updates - 1, FINAL)


@dataclass(frozen=True, kw_only=True)
class RecencyStateTracking(StateTrackingTask):
    """T4: scattered events that all say LATER, so only the order tells which value is the latest.

    `n_events` is their number at every length, or, where `growing_from` names a length, their number at that length:
    longer sequences then hold proportionally more distractors.
    """

    n_entities: int = 512
    n_values: int = 32
    n_events: int = 32
    growing_from: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("n_events", self.n_events, self.max_updates, "every update is an event")
        if self.growing_from is not None:
            check_at_least("growing_from", self.growing_from, self.fixed_minimum, "the events have to fit")

    @property
    def fixed_minimum(self) -> int:
        return EVENT_LENGTH * self.n_events + QUERY_LENGTH

    def minimum_length(self) -> int:
        return self.fixed_minimum if self.growing_from is None else self.growing_from

    def sample(self, count: int, length: int, generator: Generator) -> Batch:
        self.check_size(count, length)
        events = self.n_events if self.growing_from is None else self.n_events * length // self.growing_from
        return self._batch(scattered_starts(count, events, length - QUERY_LENGTH, generator), length, generator)

    def _connectives(self, nth_update: Tensor, updates: Tensor, generator: Generator) -> Tensor:
        return torch.full_like(nth_update, LATER)
