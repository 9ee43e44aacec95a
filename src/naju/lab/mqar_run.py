"""One run of multi-query recall: two layers learn it from short segments and are examined on longer ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn

from naju.lab.diagnostic_run import EVALUATION_TOKENS, ModelSettings, learned
from naju.lab.lock import RunLock
from naju.lab.runs import RunFolder, carry_out, machine, versions
from naju.models import LanguageModel, ModelConfig
from naju.tasks import Task, build_task
from naju.tasks.mqar import Segment
from naju.training import (
    Journal,
    Learner,
    Part,
    Reporter,
    Rhythm,
    SegmentedSet,
    TrainConfig,
    evaluate,
    fit,
    seeded_generator,
    seeded_initialisation,
)
from naju.training.schedule import cosine_with_warmup

EXPERIMENT = "mqar"
ENOUGH = 0.99
LOGS_AN_EPOCH = 4


class Recaller(nn.Module):
    """A language model that is read at some places of its input: tokens (b, l) and places (b, q) to logits (b, q, v).

    Everything else would be multiplied by the whole vocabulary for nothing.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.language = LanguageModel(config)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        features, _ = self.language.backbone(tokens)
        asked = features.gather(1, places.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
        return self.language.logits(asked)


@dataclass(frozen=True, kw_only=True)
class Data:
    """The segments, and how their examples are made; `rewriting` binds every key twice on average."""

    training: tuple[Segment, ...]
    test: tuple[Segment, ...]
    rewriting: bool = False
    random_filler: bool = True
    n_symbols: int = 8192

    def task(self, segment: Segment) -> Task:
        n_keys = rebound_keys(segment) if self.rewriting else None
        options = {"random_filler": self.random_filler, "n_symbols": self.n_symbols}
        return build_task("MQAR", n_pairs=segment.n_pairs, n_keys=n_keys, **options)

    def part(self, segment: Segment) -> Part:
        return Part(self.task(segment), segment.length, segment.examples)

    def epoch_steps(self, batch_size: int) -> int:
        return sum(-(-segment.examples // batch_size) for segment in self.training)


@dataclass(frozen=True, kw_only=True)
class MqarRun:
    """Everything that determines a run; `training` holds the rate of a sweep. Its length is the longest trained on."""

    variant: str
    data: Data
    model: ModelSettings
    training: TrainConfig
    device: str = "cpu"

    @property
    def name(self) -> str:
        return f"{self.model.mixer}-{self.variant}-s{self.training.seed}"

    @property
    def steps(self) -> int:
        return self.training.steps

    @property
    def epoch_steps(self) -> int:
        return self.data.epoch_steps(self.training.batch_size)

    def to_json(self) -> dict[str, Any]:
        """Without nesting, but for the segments."""
        data = {**asdict(self.data), "training": _as_lists(self.data.training), "test": _as_lists(self.data.test)}
        segments = {f"{name}_segments": data.pop(name) for name in ("training", "test")}
        parts = {**data, **segments, **asdict(self.model), **self.training.to_json()}
        own = {"experiment": EXPERIMENT, "task": "MQAR", "variant": self.variant}
        return {**own, **parts, "epochs": self.steps / self.epoch_steps, "enough": ENOUGH, "device": self.device}

    def build(self) -> Recaller:
        model = self.model
        shape = ModelConfig(self.data.n_symbols, model.d_model, model.n_layers, model.mixer, model.mixer_options)
        with seeded_initialisation(self.training.seed):
            return Recaller(shape)

    def factor(self, step: int) -> float:
        """On the learning rate: a cosine that goes down once an epoch."""
        return cosine_with_warmup(step // self.epoch_steps, self.steps // self.epoch_steps, 0.0)

    @property
    def kept(self) -> float:
        """The share of a parameter that is left at the end where nothing but weight decay moves it."""
        step = self.training.lr * self.training.weight_decay
        epochs = range(0, self.steps, self.epoch_steps)
        return math.prod(1 - step * self.factor(begin) for begin in epochs) ** self.epoch_steps


def run_mqar(run: MqarRun, folder: RunFolder, reporter: Reporter) -> dict[str, Any]:
    """Begin a run or go on with it until it is finished; its result. A finished one is not touched."""
    return carry_out(folder, run.to_json(), lambda lock: _train_and_examine(run, folder, reporter, lock))


def _train_and_examine(run: MqarRun, folder: RunFolder, reporter: Reporter, lock: RunLock) -> dict[str, Any]:
    device = torch.device(run.device)
    model = run.build().to(device)
    learner = Learner(model, run.training, run.factor)
    every = max(1, run.epoch_steps // LOGS_AN_EPOCH)
    rhythm = Rhythm(log_every=every, validate_every=run.epoch_steps)
    with Journal(folder.path, learner, allow=lock.check, note=reporter.note) as journal:
        parts = [run.data.part(segment) for segment in run.data.training]
        data = SegmentedSet(parts, run.training.batch_size, run.training.seed, device)

        def validate() -> float:
            return _examine(run, model, "validation data", reporter)["all"]["all"]

        try:
            execution = fit(learner, data, journal, rhythm, validate, reporter, ENOUGH)
            accuracy = _examine(run, model, "test data", reporter)
            found = {**learned(journal.rows, run.epoch_steps), "accuracy": accuracy}
        except FloatingPointError as error:  # too high a rate is an outcome of the sweep
            # Without the checkpoint it may name: when those were saved differs from one attempt to another.
            execution, found = "stopped", {"diverged": error.args[0], "accuracy": {}}
        result = {**_about(run, model, int(learner.steps_done)), **found}
        result |= {"seconds": journal.seconds, "machine": {**machine(), "execution": execution}}
        lock.check()
        folder.finish(result)
        journal.keep_model_only(result["steps"])
    return result


def _examine(run: MqarRun, model: nn.Module, purpose: str, reporter: Reporter) -> dict[str, dict[str, float]]:
    """The mean accuracy of examples, over all and in each segment; nested as the diagnostic suite's results are."""
    shares: dict[str, float] = {}
    for segment in run.data.test:
        shares[slice_name(segment)] = evaluate(
            model,
            run.data.task(segment),
            count=segment.examples,
            length=segment.length,
            generator=seeded_generator(run.training.seed, f"{purpose} of {slice_name(segment)}", run.device),
            batch_size=max(1, EVALUATION_TOKENS // segment.length),
            bf16=run.training.bf16,
            examined=reporter.examined,
        ).overall
    examples = [segment.examples for segment in run.data.test]
    mean = sum(share * count for share, count in zip(shares.values(), examples, strict=True)) / sum(examples)
    return {name: {"all": share} for name, share in {"all": mean, **shares}.items()}


def rebound_keys(segment: Segment) -> int:
    """How many keys the rewriting variant has."""
    return -(-segment.n_pairs // 2)


def slice_name(segment: Segment) -> str:
    return f"{segment.n_pairs} pairs in {segment.length}"


def _about(run: MqarRun, model: Recaller, steps: int) -> dict[str, Any]:
    return {
        "experiment": EXPERIMENT,
        "mixer": run.model.mixer,
        "task": "MQAR",
        "variant": run.variant,
        "seed": run.training.seed,
        "config": run.to_json(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state_size": model.language.backbone.blocks[0].mixer.state_size,  # type: ignore[union-attr]
        "steps": steps,
        "versions": versions(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _as_lists(segments: Sequence[Segment]) -> list[list[int]]:
    return [list(segment) for segment in segments]
