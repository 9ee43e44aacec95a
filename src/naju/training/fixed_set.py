"""A training set that is drawn once and stays on the device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from naju.tasks.base import Task
from naju.training.config import TrainConfig
from naju.training.seeding import seeded_generator

# Part of what the set is: drawing in other portions would use the random stream in another order.
PORTION = 4096


class TrainingSet(Protocol):
    """What the training loop goes through, batch by batch, epoch by epoch. Batches of one kind have one shape."""

    @property
    def epoch_steps(self) -> int: ...

    @property
    def kinds(self) -> int: ...

    def kind(self, step: int) -> int:
        """Of the batch of a step, counted from 1; below `kinds`."""

    def shuffle(self, epoch: int) -> None:
        """Before the first step of an epoch, and wherever in it a run goes on."""

    def batch(self, steps_done: Tensor, kind: int) -> tuple[Tensor, ...]:
        """The model's inputs and the targets of the step after `steps_done` (1,), which is read on the device alone."""


class FixedSet:
    """`config.sequences` sequences of a task that depend on the seed (and the kind of device) alone."""

    def __init__(self, task: Task, config: TrainConfig, device: torch.device) -> None:
        if config.sequences is None:
            raise ValueError("sequences must be a number for a fixed set, but is None")
        self.config, self.device = config, device
        generator = seeded_generator(config.seed, "training data", device)
        self.tokens = torch.empty(config.sequences, config.length, dtype=torch.int32, device=device)
        self.targets = torch.empty(config.sequences, dtype=torch.int64, device=device)
        for start in range(0, config.sequences, PORTION):
            rows = slice(start, min(start + PORTION, config.sequences))
            batch = task.sample(rows.stop - rows.start, config.length, generator)
            self.tokens[rows], self.targets[rows] = batch.tokens, batch.targets
        self.order = torch.empty(config.epoch_steps, config.batch_size, dtype=torch.int64, device=device)

    @property
    def epoch_steps(self) -> int:
        return len(self.order)

    @property
    def kinds(self) -> int:
        return 1

    def kind(self, step: int) -> int:
        return 0

    def shuffle(self, epoch: int) -> None:
        """The order of one epoch follows from the seed and its number, whatever came before."""
        generator = seeded_generator(self.config.seed, f"order of epoch {epoch}", self.device)
        shuffled = torch.randperm(len(self.targets), generator=generator, device=self.device)
        self.order.copy_(shuffled[: self.order.numel()].view_as(self.order))

    def batch(self, steps_done: Tensor, kind: int = 0) -> tuple[Tensor, Tensor]:
        """Tokens and targets."""
        rows = self.order.index_select(0, steps_done % len(self.order)).squeeze(0)
        return self.tokens.index_select(0, rows), self.targets.index_select(0, rows)
