"""What a batch asks of a model, whether once at the end of a sequence or at many of its positions."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from naju.tasks.base import IGNORE, Batch, Task


class Questions(NamedTuple):
    """`inputs` are the model's arguments: tokens, and where there are many questions their places (b, q) in order."""

    inputs: tuple[Tensor, ...]
    targets: Tensor  # (b,) or (b, q)


def questions(task: Task, batch: Batch) -> Questions:
    """How many there are in a sequence is the task's to say, so that nothing has to wait for the device to count."""
    if task.n_questions is None:
        return Questions((batch.tokens,), batch.targets)
    asked = (batch.targets != IGNORE).byte()
    places = asked.argsort(dim=1, descending=True, stable=True)[:, : task.n_questions]
    return Questions((batch.tokens, places), batch.targets.gather(1, places))


def right_answers(logits: Tensor, targets: Tensor) -> Tensor:
    """(b,), float64: the share of right answers in each sequence."""
    right = logits.argmax(-1) == targets
    return right.double().reshape(len(right), -1).mean(1)
