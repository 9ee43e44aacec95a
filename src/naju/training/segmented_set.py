"""A training set of several segments, each with its own task and length, whose batches never mix two of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from naju.tasks.base import Task
from naju.training.fixed_set import PORTION
from naju.training.questions import questions
from naju.training.seeding import seeded_generator


class Part(NamedTuple):
    """One segment: a task with many questions, and how many sequences of which length are drawn from it."""

    task: Task
    length: int
    sequences: int


class SegmentedSet:
    """Sequences that are drawn once and stay on the device, in batches whose order is drawn once, too: every epoch is
    the same. A segment's last batch is filled up with its first sequences."""

    def __init__(self, parts: Sequence[Part], batch_size: int, seed: int, device: torch.device) -> None:
        self.parts = [_drawn(part, seeded_generator(seed, f"training data of {part}", device)) for part in parts]
        batches = [(kind, start) for kind, part in enumerate(parts) for start in range(0, part.sequences, batch_size)]
        order = torch.randperm(len(batches), generator=seeded_generator(seed, "order of batches")).tolist()
        self._kinds: list[int] = [batches[place][0] for place in order]
        self._starts = torch.tensor([batches[place][1] for place in order], device=device)
        self._within = torch.arange(batch_size, device=device)

    @property
    def epoch_steps(self) -> int:
        return len(self._kinds)

    @property
    def kinds(self) -> int:
        return len(self.parts)

    def kind(self, step: int) -> int:
        return self._kinds[(step - 1) % self.epoch_steps]

    def shuffle(self, epoch: int) -> None:
        """Nothing changes from epoch to epoch."""

    def batch(self, steps_done: Tensor, kind: int) -> tuple[Tensor, ...]:
        start = self._starts.index_select(0, steps_done % self.epoch_steps)
        part = self.parts[kind]
        rows = (start + self._within) % len(part[0])
        return tuple(tensor.index_select(0, rows).long() for tensor in part)


def _drawn(part: Part, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Tokens (n, l), places (n, q) and targets (n, q)."""
    portions = []
    for start in range(0, part.sequences, PORTION):
        batch = part.task.sample(min(PORTION, part.sequences - start), part.length, generator)
        inputs, targets = questions(part.task, batch)
        portions.append([tensor.int() for tensor in (*inputs, targets)])
    return tuple(torch.cat(tensors) for tensors in zip(*portions, strict=True))
