"""A run's folder as the loop sees it: where it left off, what it says, and what it saves."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from naju.training.checkpoint import Checkpoint, Checkpoints
from naju.training.learner import Learner
from naju.training.metrics import METRICS, Metrics, checksum, read_metrics


class Journal:
    """Opening it puts the learner where the newest good checkpoint left it, and drops the metrics beyond that step.

    `allow` is called before every checkpoint and may refuse it by raising; `note` hears of damaged checkpoints.
    """

    def __init__(
        self,
        folder: Path,
        learner: Learner,
        *,
        allow: Callable[[], None] = lambda: None,
        note: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.learner, self.checkpoints = learner, Checkpoints(folder, allow)
        found = _usable(self.checkpoints.load(note), folder, learner, note)
        if found is not None:
            learner.restore(found.tensors)
        facts: dict[str, Any] = {"step": 0, "seconds": 0.0} if found is None else found.facts
        self.metrics = Metrics(folder, facts["step"])
        self._saved = time.perf_counter()
        self._began = self._saved - float(facts["seconds"])

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.metrics.close()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.metrics.rows

    @property
    def last_logged(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def seconds(self) -> float:
        """Since the run began, the pauses between its attempts excluded."""
        return time.perf_counter() - self._began

    def log(self, row: dict[str, Any]) -> None:
        self.metrics.append(row)

    def save(self, step: int) -> None:
        """Nothing is saved after a loss that was not finite: the checkpoint before it stays."""
        self.learner.check_finite()
        self.metrics.sync()
        self.checkpoints.save(self.learner.tensors(), self._facts(step))
        self._saved = time.perf_counter()

    def save_if_older(self, seconds: float, step: int) -> None:
        if time.perf_counter() - self._saved > seconds:
            self.save(step)

    def keep_model_only(self, step: int) -> None:
        """A finished run needs its optimizer no more."""
        tensors = {name: tensor for name, tensor in self.learner.tensors().items() if name.startswith("model.")}
        self.checkpoints.keep_only(Checkpoint(tensors, self._facts(step)))

    def _facts(self, step: int) -> dict[str, Any]:
        return {"step": step, "seconds": self.seconds, "lines": checksum(self.rows)}


def _usable(found: Checkpoint | None, folder: Path, learner: Learner, note: Callable[[str], None]) -> Checkpoint | None:
    """None where a run has to begin again, lest it end with something else than it would have."""
    if found is None:
        return None
    step = found.facts["step"]
    if checksum(row for row in read_metrics(folder) if row["step"] <= step) != found.facts.get("lines"):
        note(f"{METRICS} does not hold the lines that it had at the checkpoint of step {step}; the run begins again")
        return None
    has_optimizer = any(name.startswith("optimizer.") for name in found.tensors)
    return found if has_optimizer else _of_finished_run(found, learner)


def _of_finished_run(found: Checkpoint, learner: Learner) -> Checkpoint | None:
    """Its result was lost: at the last step the model is all that it takes to examine it again. A run that ended
    earlier would have needed its optimizer."""
    if found.facts["step"] < learner.config.steps:
        return None
    unused = {**learner.tensors(), "loop.steps_done": torch.tensor([found.facts["step"]])}
    return Checkpoint({**unused, **found.tensors}, found.facts)
