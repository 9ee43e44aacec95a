"""Accuracy on fresh sequences, overall and slice by slice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from naju.tasks.base import Task
from naju.training.questions import questions, right_answers


@dataclass(frozen=True)
class Accuracy:
    """Means over sequences, of the share of right answers where each has many. `by_group` has only the groups that
    occurred, each with its own accuracy and count."""

    overall: float
    count: int
    by_group: dict[str, tuple[float, int]]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A model in its mode for use; afterwards it is in the mode that it had."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    task: Task,
    *,
    count: int,
    length: int,
    generator: torch.Generator,
    batch_size: int = 64,
    bf16: bool = False,
    examined: Callable[[float], None] = lambda share: None,
) -> Accuracy:
    """Accuracy of a classifier on `count` fresh sequences of any length; the model's mode is left as it was. `examined`
    hears before every batch which share of them is done.

    Where a task has many questions, the model gets their places (b, q) beside the tokens and answers (b, q, classes).

    Which sequences these are depends on `batch_size`, too: that is how they are drawn.
    """
    if count < 1:
        raise ValueError(f"count must be a positive integer, but is {count}")
    right = torch.zeros(len(task.groups), dtype=torch.float64, device=generator.device)
    total = torch.zeros_like(right, dtype=torch.int64)
    with evaluating(model):
        for start in range(0, count, batch_size):
            examined(start / count)
            batch = task.sample(min(batch_size, count - start), length, generator)
            inputs, targets = questions(task, batch)
            with torch.autocast(generator.device.type, torch.bfloat16, enabled=bf16):
                logits = model(*inputs)
            right.index_add_(0, batch.group, right_answers(logits, targets))
            total.index_add_(0, batch.group, torch.ones_like(batch.group))
    slices = zip(task.groups, right.tolist(), total.tolist(), strict=True)
    return Accuracy(float(right.sum()) / count, count, {name: (hit / n, n) for name, hit, n in slices if n})
