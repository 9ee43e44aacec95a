"""What T1 to T4 are built from: events of five tokens, drawn and placed for a whole batch at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from naju.tasks.base import Task

SPECIAL = ("PAD", "KEY", "IS", "SEP", "QUES", "EOS", "INIT", "LATER", "FINAL", "LIKES", "NOW")
PAD, KEY, IS, SEP, QUES, EOS, INIT, LATER, FINAL, LIKES, NOW = range(len(SPECIAL))
EVENT_LENGTH = 5
QUERY_LENGTH = 4


@dataclass(frozen=True, kw_only=True)
class EventTask(Task):
    """Events about entities and values, then a query of four tokens; the vocabulary is special, entities, values."""

    n_entities: int = 64
    n_values: int = 16

    @property
    def vocab_size(self) -> int:
        return len(SPECIAL) + self.n_entities + self.n_values

    @property
    def n_classes(self) -> int:
        return self.n_values

    def token_names(self) -> tuple[str, ...]:
        entities = (f"e{index}" for index in range(self.n_entities))
        return (*SPECIAL, *entities, *(f"v{index}" for index in range(self.n_values)))

    def answer_name(self, target: int) -> str:
        return f"v{target}"

    def entity_token(self, entity: Tensor) -> Tensor:
        return entity + len(SPECIAL)

    def value_token(self, value: Tensor) -> Tensor:
        return value + len(SPECIAL) + self.n_entities


def check_range(low_name: str, low: int, high_name: str, high: int) -> None:
    if not 1 <= low <= high:
        raise ValueError(
            f"{low_name} and {high_name} must satisfy 1 <= {low_name} <= {high_name}, but are {low}, {high}"
        )


def check_at_least(name: str, value: int, least: int, why: str) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least} ({why}), but is {value}")


def integers(low: int, high: int, shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Uniform over low..high, both included."""
    return torch.randint(low, high + 1, shape, generator=generator, device=generator.device)


def below(bound: Tensor, generator: Generator) -> Tensor:
    """Uniform over 0..bound-1, each element with its own bound."""
    return (torch.rand(bound.shape, generator=generator, device=generator.device) * bound).long()


def distinct(rows: int, pool: int, size: int, generator: Generator) -> Tensor:
    """(rows, size): `size` different integers below `pool` in random order, row by row."""
    return torch.rand(rows, pool, generator=generator, device=generator.device).argsort(1)[:, :size]


def scattered_starts(rows: int, events: int, room: int, generator: Generator) -> Tensor:
    """(rows, events): increasing starts, uniform over all ways of placing the events in `room` tokens without overlap.

    Shrink each event to one cell: a placement is then a choice of `events` cells among the cells that remain.
    """
    cells = room - (EVENT_LENGTH - 1) * events
    chosen = distinct(rows, cells, events, generator).sort(1).values
    return chosen + (EVENT_LENGTH - 1) * torch.arange(events, device=generator.device)


def assemble(events: Tensor, starts: Tensor, query: Tensor, length: int) -> Tensor:
    """(b, l) tokens: events (b, e, 5) at starts (b, e), the query (b, 4) at the end, PAD elsewhere."""
    tokens = torch.full((len(query), length), PAD, device=query.device)
    places = starts.unsqueeze(-1) + torch.arange(EVENT_LENGTH, device=starts.device)
    tokens.scatter_(1, places.flatten(1), events.flatten(1))
    tokens[:, -QUERY_LENGTH:] = query
    return tokens


def join(*parts: Tensor | int) -> Tensor:
    """Tensors of one shape and constant tokens, side by side along a new last axis: an event or a query."""
    like = next(part for part in parts if isinstance(part, Tensor))
    return torch.stack([part if isinstance(part, Tensor) else torch.full_like(like, part) for part in parts], dim=-1)
