"""One run of the diagnostic suite: a mixer learns a task at one length and is examined at many."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from naju.lab.lock import RunLock
from naju.lab.runs import RunFolder, carry_out, machine, versions
from naju.mixers import Mixer
from naju.models import Classifier, ModelConfig
from naju.tasks import Task, build_task
from naju.training import (
    FixedSet,
    Journal,
    Learner,
    Reporter,
    Rhythm,
    TrainConfig,
    evaluate,
    fit,
    seeded_generator,
    seeded_initialisation,
)

EXPERIMENT = "diagnostics"
HEADS = ("linear", "hidden")
CURVE_POINTS = 200
LOGS_AN_EPOCH = 4
# Part of what the test data are, like any way of drawing them: a batch of an evaluation has this many tokens.
EVALUATION_TOKENS = 2**17


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A classifier of the suite; the hidden head has one layer of d_model units before the linear one."""

    mixer: str
    mixer_options: Mapping[str, Any] = field(default_factory=dict)
    d_model: int = 128
    n_layers: int = 4
    head: str = "linear"

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise ValueError(f"head must be 'linear' or 'hidden', but is {self.head!r}")

    def build(self, task: Task, seed: int) -> Classifier:
        shape = ModelConfig(task.vocab_size, self.d_model, self.n_layers, self.mixer, self.mixer_options)
        with seeded_initialisation(seed):
            model = Classifier(shape, task.n_classes)
            if self.head == "hidden":
                model.head = nn.Sequential(nn.Linear(self.d_model, self.d_model), nn.GELU(), model.head)  # type: ignore[assignment]
            return model


@dataclass(frozen=True, kw_only=True)
class Examination:
    """Fresh sequences at every test length at the end, held-out ones of the training length on the way."""

    test_lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    test_sequences: int = 2000
    validation_sequences: int = 1000


@dataclass(frozen=True, kw_only=True)
class DiagnosticRun:
    """Everything that determines a run. The kind of device does, too: it draws other sequences from the same seed."""

    task: str
    task_options: Mapping[str, Any] = field(default_factory=dict)
    variant: str = "default"
    model: ModelSettings
    training: TrainConfig
    examination: Examination = field(default_factory=Examination)
    device: str = "cpu"

    @property
    def name(self) -> str:
        return f"{self.model.mixer}-{self.task}-{self.variant}-s{self.training.seed}"

    @property
    def steps(self) -> int:
        return self.training.steps

    def build_task(self, **changes: Any) -> Task:
        return build_task(self.task, **{**self.task_options, **changes})

    def to_json(self) -> dict[str, Any]:
        """Without nesting; `load_run_model` reads it back."""
        own = {"task": self.task, "task_options": dict(self.task_options), "variant": self.variant}
        epochs = self.steps / self.training.epoch_steps
        parts = {**asdict(self.model), **self.training.to_json(), **asdict(self.examination)}
        parts["test_lengths"] = list(self.examination.test_lengths)
        return {"experiment": EXPERIMENT, **own, **parts, "epochs": epochs, "device": self.device}


def run_diagnostic(run: DiagnosticRun, folder: RunFolder, reporter: Reporter) -> dict[str, Any]:
    """Begin a run or go on with it until it is finished; its result. A finished one is not touched."""
    return carry_out(folder, run.to_json(), lambda lock: _train_and_examine(run, folder, reporter, lock))


def _train_and_examine(run: DiagnosticRun, folder: RunFolder, reporter: Reporter, lock: RunLock) -> dict[str, Any]:
    device, task = torch.device(run.device), run.build_task()
    model = run.model.build(task, run.training.seed).to(device)
    learner = Learner(model, run.training)
    with Journal(folder.path, learner, allow=lock.check, note=reporter.note) as journal:
        data = FixedSet(task, run.training, device)
        execution = fit(
            learner, data, journal, rhythm(run.training), lambda: _validate(run, model, task, reporter), reporter
        )
        measured = _examine(run, model, reporter)
        result = {**_about(run, model), **learned(journal.rows, run.training.epoch_steps), **measured}
        result |= {"seconds": journal.seconds, "machine": {**machine(), "execution": execution}}
        lock.check()
        folder.finish(result)
        journal.keep_model_only(run.steps)
    return result


def rhythm(training: TrainConfig) -> Rhythm:
    every = max(1, training.epoch_steps // LOGS_AN_EPOCH)
    return Rhythm(log_every=every, validate_every=2 * every)


def _validate(run: DiagnosticRun, model: nn.Module, task: Task, reporter: Reporter) -> float:
    count = run.examination.validation_sequences
    return _accuracy(run, model, task, count, run.training.length, "validation data", reporter)["all"]


def _examine(run: DiagnosticRun, model: Classifier, reporter: Reporter) -> dict[str, Any]:
    """Accuracies by length, as far as the model can read; for T4 also where events grow in number with the length."""
    mixers = [module for module in model.modules() if isinstance(module, Mixer)]
    longest = min(mixer.longest or math.inf for mixer in mixers)
    lengths, longer = (
        [length for length in run.examination.test_lengths if least <= length <= longest]
        for least in (run.training.length, run.training.length + 1)
    )
    measured = {"accuracy": _by_length(run, model, run.build_task(), lengths, "test data", reporter)}
    if run.task == "T4":
        task = run.build_task(growing_from=run.training.length)
        measured["growing"] = _by_length(run, model, task, longer, "growing test data", reporter)
    return measured


def _by_length(
    run: DiagnosticRun, model: nn.Module, task: Task, lengths: Sequence[int], purpose: str, reporter: Reporter
) -> dict[str, dict[str, float]]:
    count = run.examination.test_sequences
    return {
        str(length): _accuracy(run, model, task, count, length, f"{purpose} of length {length}", reporter)
        for length in lengths
    }


def _accuracy(
    run: DiagnosticRun, model: nn.Module, task: Task, count: int, length: int, purpose: str, reporter: Reporter
) -> dict[str, float]:
    result = evaluate(
        model,
        task,
        count=count,
        length=length,
        generator=seeded_generator(run.training.seed, purpose, run.device),
        batch_size=max(1, EVALUATION_TOKENS // length),
        bf16=run.training.bf16,
        examined=reporter.examined,
    )
    return {"all": result.overall, **{name: share for name, (share, _) in result.by_group.items()}}


def _about(run: DiagnosticRun, model: Classifier) -> dict[str, Any]:
    return {
        "experiment": EXPERIMENT,
        "mixer": run.model.mixer,
        "task": run.task,
        "variant": run.variant,
        "seed": run.training.seed,
        "config": run.to_json(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state_size": model.backbone.blocks[0].mixer.state_size,  # type: ignore[union-attr]
        "steps": run.steps,
        "versions": versions(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def learned(rows: Sequence[Mapping[str, Any]], epoch_steps: int) -> dict[str, Any]:
    """The training accuracy is that of the last epoch, while it learned; the weights are always the last ones."""
    validations = [row["validation_accuracy"] for row in rows if row["validation_accuracy"] is not None]
    return {
        "train_accuracy": _last_epoch_accuracy(rows, rows[-1]["step"] - epoch_steps),
        "best_validation": max(validations),
        "final_validation": validations[-1],
        "curve": [[row["step"], row["loss"], row["validation_accuracy"]] for row in _thinned(rows)],
    }


def _last_epoch_accuracy(rows: Sequence[Mapping[str, Any]], begins: int) -> float:
    """The windows that end after step `begins`, each weighted by its steps."""
    windows = [(row["step"] - before["step"], row) for before, row in zip([{"step": 0}, *rows], rows, strict=False)]
    last = [(size, row["train_accuracy"]) for size, row in windows if row["step"] > begins]
    return float(sum(size * share for size, share in last) / sum(size for size, _ in last))


def _thinned(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Every n-th line, counted from the last, and, unless they are most of them, all that have a validation."""
    validated = [row["validation_accuracy"] is not None for row in rows]
    if sum(validated) > CURVE_POINTS // 2:
        validated = [False] * len(rows)
    stride = -(-len(rows) // (CURVE_POINTS - sum(validated)))
    return [row for place, row in enumerate(rows, 1) if (len(rows) - place) % stride == 0 or validated[place - 1]]


def load_run_model(path: Path) -> tuple[Classifier, Task]:
    """The model of a run folder with its newest weights, in evaluation mode, and its task."""
    folder = RunFolder(path)
    config = folder.config()
    try:
        task = build_task(config["task"], **config["task_options"])
        settings = ModelSettings(**{part.name: config[part.name] for part in fields(ModelSettings)})
        model = settings.build(task, config["seed"])
        model.load_state_dict(folder.checkpoint().model())
    except (KeyError, TypeError, RuntimeError) as error:
        told = " ".join(str(error).split())[:500]
        raise ValueError(f"run {folder.name} is damaged, its config and checkpoint make no model: {told}") from error
    return model.eval(), task
