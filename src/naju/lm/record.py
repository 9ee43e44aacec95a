"""What a language-model run leaves in its folder: metrics, checkpoints and the best model. The first process writes.

metrics.jsonl             a line every few updates, without times: killed and resumed, a run leaves the same file
checkpoint*.safetensors   the last few, or `sharded/` where the model is sharded
best/                     the model with the lowest validation loss so far
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from naju.lm.distributed import full_weights
from naju.lm.folder import save_model
from naju.lm.learner import LanguageLearner
from naju.lm.sharded_checkpoint import FOLDER as SHARDED
from naju.lm.sharded_checkpoint import ShardedCheckpoints
from naju.lm.tokenizer import copy_tokenizer
from naju.models import LanguageModel
from naju.training.checkpoint import NEWEST, Checkpoint, Checkpoints
from naju.training.metrics import METRICS, Metrics, checksum, read_metrics

BEST = "best"
BEGINNING = {"step": 0, "seconds": 0.0}


class Record:
    """Opening it puts the learner where the newest good checkpoint left it, and drops the metrics beyond that step.

    All processes make the same calls. The tokenizer of `data` goes with the best model, if it is there.
    """

    def __init__(
        self,
        folder: Path,
        learner: LanguageLearner,
        *,
        data: Path,
        keep: int,
        allow: Callable[[], None],
        note: Callable[[str], None],
    ) -> None:
        self.folder, self.learner, self.place, self.data = folder, learner, learner.place, data
        self.checkpoints: Checkpoints | ShardedCheckpoints = (
            ShardedCheckpoints(folder, self.place, learner.tensors, allow=allow, keep=keep)
            if self.place.kind == "fsdp"
            else Checkpoints(folder, allow, keep)
        )
        facts = self._restore(note)
        self.metrics = Metrics(folder, facts["step"]) if self.place.is_first else None
        self.rows: list[dict[str, Any]] = self.place.agree(self.metrics and self.metrics.rows)
        self._saved = time.perf_counter()
        self._began = self._saved - float(facts["seconds"])
        if facts["step"] > 0 and self.best_step == facts["step"]:
            self.save_best()  # it may have been killed between the checkpoint and this

    def __enter__(self) -> Record:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.metrics is not None:
            self.metrics.close()

    def _restore(self, note: Callable[[str], None]) -> dict[str, Any]:
        sharded = isinstance(self.checkpoints, ShardedCheckpoints)
        found = self.checkpoints.load(note) if sharded or self.place.is_first else None
        facts: dict[str, Any] | None = self.place.agree(None if found is None else found.facts)
        if facts is None:
            self._refuse_the_other_kind(sharded=sharded)
            return BEGINNING
        if not self.place.agree(self._has_its_lines(facts) if self.place.is_first else None):
            note(
                f"{METRICS} does not hold the lines that it had at the checkpoint of step {facts['step']}; "
                "the run begins again"
            )
            if isinstance(self.checkpoints, ShardedCheckpoints):
                self.checkpoints.begin_again()
            return BEGINNING
        self.learner.restore(found.tensors if sharded and found is not None else self._spread(found))
        return facts

    def _has_its_lines(self, facts: dict[str, Any]) -> bool:
        """Else losses since the last line and the best model would be others than they were."""
        known = checksum(row for row in read_metrics(self.folder) if row["step"] <= facts["step"])
        return "lines" not in facts or facts["lines"] == known

    def _refuse_the_other_kind(self, *, sharded: bool) -> None:
        """Else a run would begin again in a folder that holds its checkpoints."""
        if (self.folder / (NEWEST if sharded else SHARDED)).exists():
            kind = "without" if sharded else "with"
            raise ValueError(f"{self.folder} holds checkpoints of a run {kind} parallel 'fsdp': go on like that")

    def _spread(self, found: Checkpoint | None) -> dict[str, Tensor]:
        """What the first process has read, on all of them."""
        tensors = {name: tensor.clone() for name, tensor in self.learner.tensors().items()}
        if found is not None and self.place.world == 1:
            return found.tensors
        if found is not None:
            tensors = {name: found.tensors[name].to(tensor.device) for name, tensor in tensors.items()}
        self.place.spread(tensors)
        return tensors

    @property
    def last_logged(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def best_step(self) -> int:
        """0 before the first validation."""
        validated = [row for row in self.rows if row["validation_loss"] is not None]
        return int(min(validated, key=lambda row: row["validation_loss"])["step"]) if validated else 0

    @property
    def seconds(self) -> float:
        """Since the run began, the pauses between its attempts excluded."""
        return time.perf_counter() - self._began

    def log(self, row: dict[str, Any]) -> None:
        if self.metrics is None:
            self.rows.append(row)
        else:
            self.metrics.append(row)

    def save(self, step: int) -> None:
        """Nothing is saved after a loss that was not finite: the checkpoint before it stays."""
        self.learner.check_finite()
        if self.metrics is not None:
            self.metrics.sync()
        tensors = self.learner.tensors()
        if self.place.is_first or self.place.kind == "fsdp":
            self.checkpoints.save(tensors, {"step": step, "seconds": self.seconds, "lines": checksum(self.rows)})
        self._saved = time.perf_counter()

    def save_if_older(self, seconds: float, step: int) -> None:
        if self.place.any(time.perf_counter() - self._saved > seconds):
            self.save(step)

    def save_best(self) -> None:
        """The model as it is now."""
        weights = full_weights(self.learner.model)
        if self.place.is_first:
            model = LanguageModel(self.learner.model.config)  # type: ignore[arg-type]
            model.load_state_dict(weights, assign=True)
            save_model(model, self.folder / BEST)
            copy_tokenizer(self.data, self.folder / BEST)
