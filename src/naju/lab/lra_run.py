"""One run of the Long Range Arena: a bidirectional model learns a task and is examined on its test set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from naju.lab.diagnostic_run import learned
from naju.lab.lock import RunLock
from naju.lab.lra_batches import BucketedSet, accuracy
from naju.lab.lra_data import DATA_SEED, load_data
from naju.lab.runs import RunFolder, carry_out, machine, versions
from naju.models import Classifier, ModelConfig, TwoTower
from naju.tasks.lra import LRA, Examples, LraTask, Sizes
from naju.training import Journal, Learner, Reporter, Rhythm, TrainConfig, fit, seeded_initialisation

EXPERIMENT = "lra"
OUT_OF_MEMORY = "out of memory"
LINES, VALIDATIONS = 200, 10  # of metrics, and how many of them with a validation
VALIDATED = 1000  # examples; the last validation takes all
EVALUATION_TOKENS = 2**17


class PaddingAware(nn.Module):
    """A classifier that sees the padding in its tokens: token 0 is none of a padded task's."""

    def __init__(self, classifier: Classifier | TwoTower, is_padded: bool) -> None:
        super().__init__()
        self.classifier, self.is_padded = classifier, is_padded

    def forward(self, tokens: Tensor) -> Tensor:
        return self.classifier(tokens, self._mask(tokens) if self.is_padded else None)  # type: ignore[no-any-return]

    @staticmethod
    def _mask(tokens: Tensor) -> Tensor:
        """An empty text counts as one token of padding, so that there is something to read."""
        first = torch.arange(tokens.shape[-1], device=tokens.device) == 0
        return (tokens != 0) | first


@dataclass(frozen=True, kw_only=True)
class LraModel:
    mixer: str
    mixer_options: Mapping[str, Any] = field(default_factory=dict)
    d_model: int = 128
    n_layers: int = 6
    checkpoint_blocks: bool = False

    def build(self, task: LraTask, seed: int) -> PaddingAware:
        shape = ModelConfig(
            task.vocab_size,
            self.d_model,
            self.n_layers,
            self.mixer,
            self.mixer_options,
            bidirectional=True,
            pooling="mean",
            checkpoint_blocks=self.checkpoint_blocks,
        )
        with seeded_initialisation(seed):
            classifier = (TwoTower if task.has_pairs else Classifier)(shape, task.n_classes)
        return PaddingAware(classifier, task.is_padded)


@dataclass(frozen=True, kw_only=True)
class LraRun:
    """Everything that determines a run; where the data lie is no part of it."""

    task: str
    variant: str
    model: LraModel
    training: TrainConfig
    sizes: Sizes | None = None  # instead of a generated task's own
    device: str = "cpu"
    data: Path = Path("data")
    cache: Path = Path("data")

    @property
    def name(self) -> str:
        return f"{self.model.mixer}-{self.task}-{self.variant}-s{self.training.seed}"

    @property
    def steps(self) -> int:
        return self.training.steps

    def to_json(self) -> dict[str, Any]:
        """Without nesting."""
        own = {"experiment": EXPERIMENT, "task": self.task, "variant": self.variant, "data_seed": DATA_SEED}
        own["sizes"] = None if self.sizes is None else list(self.sizes)
        epochs = self.steps / self.training.epoch_steps
        return {**own, **asdict(self.model), **self.training.to_json(), "epochs": epochs, "device": self.device}


def run_lra(run: LraRun, folder: RunFolder, reporter: Reporter) -> dict[str, Any]:
    """Begin a run or go on with it until it is finished; its result. A finished one is not touched.

    Running out of memory is a result, too: that of this model on this machine.
    """
    return carry_out(folder, run.to_json(), lambda lock: _result(run, folder, reporter, lock))


def _result(run: LraRun, folder: RunFolder, reporter: Reporter, lock: RunLock) -> dict[str, Any]:
    splits = load_data(LRA[run.task], run.data, run.cache, run.sizes)  # not the model's fault if they do not fit
    try:
        return _train_and_examine(run, splits, folder, reporter, lock)
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        sentence = str(error).splitlines()[0]
    result = {**_about(run), "outcome": OUT_OF_MEMORY, "reason": sentence, "test_accuracy": None, "machine": machine()}
    result |= {"steps": 0, "seconds": 0.0}
    lock.check()
    folder.finish(result)
    return result


def ran_out_of_memory(error: Exception) -> bool:
    """On a GPU torch has a class for it, on the CPU words only."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _train_and_examine(
    run: LraRun, splits: Mapping[str, Examples], folder: RunFolder, reporter: Reporter, lock: RunLock
) -> dict[str, Any]:
    task, device, seed = LRA[run.task], torch.device(run.device), run.training.seed
    model = run.model.build(task, seed).to(device)
    learner = Learner(model, run.training)
    train = limited(splits["train"], run.training.sequences)
    validation = splits["validation"]
    some = limited(validation, min(VALIDATED, len(validation)))
    with Journal(folder.path, learner, allow=lock.check, note=reporter.note) as journal:
        data = BucketedSet(task, train, batch_size=run.training.batch_size, seed=seed, device=device)

        def share(examples: Examples) -> float:
            return accuracy(
                model,
                task,
                examples,
                tokens_at_once=EVALUATION_TOKENS,
                device=device,
                bf16=run.training.bf16,
                examined=reporter.examined,
            )

        def validate() -> float:
            return share(validation if int(learner.steps_done) == run.steps else some)

        execution = fit(learner, data, journal, rhythm(run.steps), validate, reporter)
        result = {**_about(run, model), "outcome": "finished", **learned(journal.rows, data.epoch_steps)}
        result |= {"test_accuracy": share(splits["test"]), "seconds": journal.seconds}
        result["machine"] = {**machine(), "execution": execution, "peak_memory": _peak_memory(device)}
        lock.check()
        folder.finish(result)
        journal.keep_model_only(run.steps)
    return result


def limited(examples: Examples, count: int | None) -> Examples:
    """So many of them, spread evenly: files may have one class after the other."""
    if count is None or count > len(examples):
        raise ValueError(f"sequences must be at most the {len(examples)} of the training set, but is {count}")
    return examples if count == len(examples) else examples.chosen(np.arange(count) * len(examples) // count)


def rhythm(steps: int) -> Rhythm:
    """About LINES lines, some of them with a validation."""
    every = max(1, steps // LINES)
    return Rhythm(log_every=every, validate_every=max(every, steps // VALIDATIONS))


def _peak_memory(device: torch.device) -> int | None:
    """In bytes, on a GPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _about(run: LraRun, model: PaddingAware | None = None) -> dict[str, Any]:
    model = model or run.model.build(LRA[run.task], run.training.seed)
    return {
        "experiment": EXPERIMENT,
        "mixer": run.model.mixer,
        "task": run.task,
        "variant": run.variant,
        "seed": run.training.seed,
        "config": run.to_json(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state_size": model.classifier.backbone.blocks[0].mixer.state_size,  # type: ignore[union-attr]
        "steps": run.steps,
        "versions": versions(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }
