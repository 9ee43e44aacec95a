"""The writes of one example, and what a model answers when one of them is taken away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from naju.tasks.events import EVENT_LENGTH, PAD, QUERY_LENGTH, SEP, SPECIAL, EventTask

ROWS_AT_ONCE = 32
ANSWER, STALE, OTHER = "answer", "overwritten", "other"


@dataclass(frozen=True)
class Event:
    """Tokens from `start` on: of a task `connective entity relation value SEP`, of a text a single one.

    Its role is the answer if it is the latest about the entity that is asked for, overwritten if it is an earlier one.
    """

    start: int
    words: tuple[str, ...]
    role: str

    @property
    def value(self) -> str:
        return self.words[3]

    @property
    def places(self) -> slice:
        return slice(self.start, self.start + len(self.words))

    @property
    def last(self) -> int:
        """The last token of the write: from here on the memory can only keep it or lose it."""
        return self.start + len(self.words) - 1


class Reply(NamedTuple):
    """What the model says, and how it judges what was right before anything was taken away."""

    answer: str
    right_logit: float
    right_probability: float


@dataclass(frozen=True)
class Removal:
    """One event taken away in two ways; `due` is what is right without it, None where nothing says it any more."""

    event: Event
    padded: Reply  # its tokens replaced by padding, as the model knows it from training
    held: Reply  # its tokens passed over: every layer's memory stays as it is
    due: str | None


def find_events(task: EventTask, tokens: Tensor) -> list[Event]:
    """In the order of the sequence tokens (l,)."""
    words = task.describe(tokens)
    query = words[-QUERY_LENGTH:]
    asked = next(word for word in query if word not in SPECIAL)
    ends = (tokens[:-QUERY_LENGTH] == SEP).nonzero().flatten().tolist()
    found = [tuple(words[end - EVENT_LENGTH + 1 : end + 1]) for end in ends]
    latest = max((place for place, event in enumerate(found) if event[1] == asked), default=-1)
    return [
        Event(
            end - EVENT_LENGTH + 1,
            event,
            OTHER if event[1] != asked else ANSWER if place == latest else STALE,
        )
        for place, (end, event) in enumerate(zip(ends, found, strict=True))
    ]


def remove_each(
    model: nn.Module, task: EventTask, tokens: Tensor, target: int, events: Sequence[Event]
) -> list[Removal]:
    rows = tokens.repeat(len(events), 1)
    kept = torch.ones_like(rows)
    for row, event in enumerate(events):
        kept[row, event.places] = 0
    padded = replies(model, task, rows.masked_fill(kept == 0, PAD), target)
    held = replies(model, task, rows, target, kept)
    due = [_due_without(events, event) for event in events]
    return [Removal(*parts) for parts in zip(events, padded, held, due, strict=True)]


@torch.no_grad()
def replies(
    model: nn.Module, task: EventTask, rows: Tensor, target: int, attention_mask: Tensor | None = None
) -> list[Reply]:
    """One for each of the sequences (b, l), a few of them at once."""
    logits = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        logits.append(model(rows[part], attention_mask=None if attention_mask is None else attention_mask[part]))
    return [_reply(task, row, target) for row in torch.cat(logits).double()]


def _reply(task: EventTask, logits: Tensor, target: int) -> Reply:
    return Reply(task.answer_name(int(logits.argmax())), float(logits[target]), float(logits.softmax(0)[target]))


def _due_without(events: Sequence[Event], removed: Event) -> str | None:
    left = [event for event in events if event.role != OTHER and event != removed]
    return left[-1].value if left else None
