"""The training loops: on fresh sequences, and on a fixed set with metrics, checkpoints and a way to stop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import nn

from naju.tasks.base import Task
from naju.training.config import Rhythm, TrainConfig
from naju.training.execution import prepared
from naju.training.finite import last_good, naming
from naju.training.fixed_set import TrainingSet
from naju.training.journal import Journal
from naju.training.learner import Learner
from naju.training.seeding import seeded_generator

FEW_SHAPES = 6  # each is compiled for itself


class Step(NamedTuple):
    """What one training step has to say; steps count from 1."""

    step: int
    loss: float
    lr: float


def train(
    model: nn.Module, task: Task, config: TrainConfig, on_step: Callable[[Step], None] = lambda step: None
) -> list[float]:
    """Train a classifier (tokens to logits) in place on fresh batches of a task; returns the loss at every step.

    The data depend on `config.seed` alone, so two models trained with one config see the same sequences.
    """
    learner = Learner(model, config)
    data = seeded_generator(config.seed, "training data", learner.device)
    model.train()
    losses: list[float] = []
    for step in range(1, config.steps + 1):
        batch = task.sample(config.batch_size, config.length, data)
        losses.append(learner.learn(batch.tokens, batch.targets).item())
        learner.check_finite()
        on_step(Step(step, losses[-1], learner.rate(step)))
    return losses


class StoppedError(Exception):
    """Someone asked for an end before the end; what was learned so far is saved."""


@dataclass(frozen=True, kw_only=True)
class Reporter:
    """Where a run tells how far it is (`begin` at the step it goes on from, `progress` with the mean loss of a window,
    `examining` with the share of an examination that is done, `note` in a sentence) and hears after every step whether
    it should `stop`."""

    begin: Callable[[int], None] = lambda step: None
    progress: Callable[[int, float], None] = lambda step, loss: None
    examining: Callable[[float], None] = lambda share: None
    note: Callable[[str], None] = lambda sentence: None
    stop: Callable[[], bool] = lambda: False

    def examined(self, share: float) -> None:
        """To be called between the batches of an examination: where a run should stop, this ends it."""
        if self.stop():
            raise StoppedError("stopped while it was examined; the same command goes on from its last checkpoint")
        self.examining(share)


SILENT = Reporter()


def fit(
    learner: Learner,
    data: TrainingSet,
    journal: Journal,
    rhythm: Rhythm,
    validate: Callable[[], float],
    reporter: Reporter = SILENT,
    enough: float = math.inf,
) -> str:
    """Train to the end of `learner.config`, from wherever the learner stands; returns in words how steps were executed.

    A validation accuracy above `enough` ends it, too. A loss or a gradient that is not finite is a NotFiniteError at
    the next log point; weights and checkpoints stay as they were before it. On the CPU the outcome, metrics included,
    is the same bit for bit however often the run was stopped or killed and restored from a checkpoint.
    """
    with naming(lambda: last_good(journal.checkpoints)):
        return _fit(learner, data, journal, rhythm, validate, reporter, enough)


def _fit(
    learner: Learner,
    data: TrainingSet,
    journal: Journal,
    rhythm: Rhythm,
    validate: Callable[[], float],
    reporter: Reporter,
    enough: float,
) -> str:
    steps, done = learner.config.steps, int(learner.steps_done)

    def ends(step: int) -> bool:
        """Whether the run ends with this step, once its line is written and saved."""
        try:
            mean_loss = _log(step, learner, journal, validate if rhythm.validates(step, steps) else None)
        except StoppedError:  # in the validation: the line is still to be written, and will be
            journal.save(step)
            raise
        reporter.progress(step, mean_loss)
        ended = step == steps or _is_enough(journal, enough)
        journal.save_if_older(0 if ended else rhythm.save_seconds, step)
        return ended

    reporter.begin(done)
    learner.model.train()
    owes_line = journal.last_logged < done and rhythm.logs(done, steps)
    if (owes_line and ends(done)) or done == steps or _is_enough(journal, enough):
        return "nothing left to execute"
    data.shuffle(done // data.epoch_steps)
    run_steps, execution = executables(learner, data, reporter.note)
    for step in range(done + 1, steps + 1):
        if (step - 1) % data.epoch_steps == 0:
            data.shuffle((step - 1) // data.epoch_steps)
        run_steps[data.kind(step)]()
        if rhythm.logs(step, steps) and ends(step):
            break
        if step < steps and reporter.stop():
            journal.save(step)
            raise StoppedError(f"stopped after step {step} of {steps}; the same command goes on from there")
    return execution


def _log(step: int, learner: Learner, journal: Journal, validate: Callable[[], float] | None) -> float:
    """Means over the window since the last line; returns that of the loss. A validation may be stopped: it comes before
    the window is closed."""
    learner.check_finite()
    validation_accuracy = None if validate is None else validate()
    loss, correct = learner.window()
    count = step - journal.last_logged
    row = {
        "step": step,
        "loss": loss / count,
        "lr": learner.rate(step),
        "train_accuracy": correct / (count * learner.config.batch_size),
        "validation_accuracy": validation_accuracy,
    }
    journal.log(row)
    return loss / count


def _is_enough(journal: Journal, enough: float) -> bool:
    reached = journal.rows[-1]["validation_accuracy"] if journal.rows else None
    return reached is not None and reached > enough


def executables(
    learner: Learner, data: TrainingSet, note: Callable[[str], None]
) -> tuple[list[Callable[[], object]], str]:
    """The step on each kind of batch as it will be run, and in words how."""

    def learn(kind: int) -> None:
        learner.learn(*data.batch(learner.steps_done, kind))

    steps = [partial(learn, kind) for kind in range(data.kinds)]
    return prepared(steps, learner, note, compiles=data.kinds <= FEW_SHAPES)
