"""The demo: two memories that differ in one gate learn to hold and to overwrite at once, on a bare CPU.

Everything it prints is measured while it runs. The same seed gives both models the same sequences in the same order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor
from tqdm import tqdm

from naju.lab.demo_picture import draw, why_not
from naju.models import Classifier, ModelConfig, ModelState
from naju.tasks import Batch, Task, build_task
from naju.training import Step, TrainConfig, evaluate, seeded_generator, seeded_initialisation, train
from naju.training.files import check_writable

# Few channels and a large state: two gates can add to a channel, one gate pays for a strong write with what the channel
# held. The complementary gate keeps its default bias of -3, on average the best for it here among -1, -2, -3 and -4.
MIXERS: Mapping[str, Mapping[str, Any]] = {"naju": {}, "coupled": {}}


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Sizes of the demo; the defaults take about a minute and a half on two cores."""

    seed: int = 0
    """Seeds initialisation, training data and test data."""
    steps: int = 1800
    """Training steps of each model."""
    length: int = 64
    """Length of the training sequences; both models are also tested on sequences four times as long."""
    batch_size: int = 32
    d_model: int = 32
    d_state: int = 64
    lr: float = 5e-3
    test_sequences: int = 1000
    """Fresh sequences of each task behind every number of the table."""
    output: Path = Path("demo-output")
    """Folder for the picture and the saved state."""

    def __post_init__(self) -> None:
        if self.test_sequences < 1:
            raise ValueError(f"test_sequences must be a positive integer, but is {self.test_sequences}")

    @property
    def lengths(self) -> tuple[int, int]:
        return self.length, 4 * self.length

    def training(self) -> TrainConfig:
        return TrainConfig(steps=self.steps, length=self.length, batch_size=self.batch_size, lr=self.lr, seed=self.seed)


@dataclass(frozen=True)
class DemoResult:
    """`accuracy[mixer, task, length]`, every training loss, and the largest logit difference after resuming."""

    accuracy: dict[tuple[str, str, int], float]
    losses: dict[str, list[float]]
    resume_difference: float
    picture: Path | None  # None where matplotlib is missing
    state_file: Path


class HoldAndOverwrite(Task):
    """Half of every batch has to hold all its facts (T2), half to keep only the latest value (T4), in small."""

    groups = ("retention", "overwriting")

    def __init__(self) -> None:
        sizes = {"n_entities": 16, "n_values": 8}
        self.parts = (
            build_task("T2", n_facts=8, **sizes),
            build_task("T4", n_events=8, min_updates=2, max_updates=4, **sizes),
        )

    @property
    def vocab_size(self) -> int:
        return self.parts[0].vocab_size

    @property
    def n_classes(self) -> int:
        return self.parts[0].n_classes

    def minimum_length(self) -> int:
        return max(part.minimum_length() for part in self.parts)

    def token_names(self) -> tuple[str, ...]:
        return self.parts[0].token_names()

    def sample(self, count: int, length: int, generator: Generator) -> Batch:
        self.check_size(count, length)
        group = torch.arange(count, device=generator.device) % len(self.parts)
        sizes = group.bincount(minlength=len(self.parts)).tolist()
        drawn = [part.sample(size, length, generator) for part, size in zip(self.parts, sizes, strict=True) if size]
        tokens, targets = (torch.cat([batch[index] for batch in drawn]) for index in range(2))
        return Batch(tokens, targets, group.sort().values)


def run_demo(config: DemoConfig) -> DemoResult:
    """Train, test, draw, and resume a stream; prints as it goes."""
    check_writable(config.output)
    began, training = time.perf_counter(), config.training()
    task = HoldAndOverwrite()
    task.check_size(config.batch_size, config.length)
    models = {name: build_model(name, task, config) for name in MIXERS}
    _introduce(task, models, config)
    losses = train_side_by_side(models, task, training)
    accuracy = {
        (name, group, length): share
        for name, model in models.items()
        for length in config.lengths
        for group, share in test(model, task, length, config).items()
    }
    print(f"\n{table(accuracy, config.lengths, task)}\n")
    picture = _picture(config.output / "demo.png", accuracy, losses, 1 / task.n_classes)
    state_file = config.output / "stream-state.safetensors"
    difference = resume_stream(models["naju"], task, state_file, config)
    print(f"All of this took {time.perf_counter() - began:.0f} s.")
    return DemoResult(accuracy, losses, difference, picture, state_file)


def build_model(mixer: str, task: Task, config: DemoConfig) -> Classifier:
    shape = ModelConfig(
        vocab_size=task.vocab_size,
        d_model=config.d_model,
        n_layers=2,
        mixer=mixer,
        mixer_options={"d_state": config.d_state, **MIXERS[mixer]},
    )
    with seeded_initialisation(config.seed):
        return Classifier(shape, task.n_classes)


class _StoppedError(Exception):
    """Ends a training thread whose result nobody waits for any more."""


def train_side_by_side(models: Mapping[str, Classifier], task: Task, config: TrainConfig) -> dict[str, list[float]]:
    """Train every model in a thread of its own; an error in one, or Ctrl-C, stops all of them within a step."""
    stop = threading.Event()
    latest: dict[str, str] = {}
    bar = tqdm(total=len(models) * config.steps, desc="training", unit="step", dynamic_ncols=True, disable=None)

    def follow(name: str, step: Step) -> None:
        if stop.is_set():
            raise _StoppedError
        latest[name] = f"{step.loss:.2f}"
        with bar.get_lock():
            bar.set_postfix({f"{who} loss": loss for who, loss in latest.items()}, refresh=False)
            bar.update()

    with bar, _one_thread_each(), ThreadPoolExecutor(len(models)) as pool:
        runs = {pool.submit(train, model, task, config, partial(follow, name)): name for name, model in models.items()}
        try:
            return {runs[run]: run.result() for run in as_completed(runs)}
        finally:
            stop.set()


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Two small models on two cores run best with one core each; torch's own splitting of such small products loses
    a factor of ten as soon as anything else runs on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test(model: Classifier, task: Task, length: int, config: DemoConfig) -> dict[str, float]:
    """Accuracy by task on sequences that no training step has seen."""
    generator = seeded_generator(config.seed, f"test data of length {length}")
    count = len(task.groups) * config.test_sequences
    result = evaluate(model, task, count=count, length=length, generator=generator)
    return {name: share for name, (share, _) in result.by_group.items()}


def table(accuracy: Mapping[tuple[str, str, int], float], lengths: tuple[int, int], task: Task) -> str:
    """A line a mixer, the tasks side by side, each at both lengths."""
    columns = [(group, length) for group in task.groups for length in lengths]
    heads = [f"{group} @{length}" for group, length in columns]
    lines = ["accuracy".ljust(10) + "".join(head.rjust(18) for head in heads)]
    for name in MIXERS:
        cells = (f"{accuracy[name, group, length]:.3f}".rjust(18) for group, length in columns)
        lines.append(name.ljust(10) + "".join(cells))
    lines.append("chance".ljust(10) + f"{1 / task.n_classes:.3f}".rjust(18) * len(columns))
    return "\n".join(lines)


def _picture(
    path: Path, accuracy: dict[tuple[str, str, int], float], losses: dict[str, list[float]], chance: float
) -> Path | None:
    missing = why_not()
    if missing is not None:
        print(f"No picture: {missing}.")
        return None
    draw(path, accuracy, losses, chance=chance)
    print(f"Picture: {path.resolve()}")
    return path


@torch.no_grad()
def resume_stream(model: Classifier, task: Task, path: Path, config: DemoConfig) -> float:
    """Read half a long sequence, save the state, go on in a fresh model; returns the largest logit difference."""
    tokens, targets, _ = task.sample(4, config.lengths[1], seeded_generator(config.seed, "stream"))
    half = tokens.shape[1] // 2
    whole = model(tokens)
    _, state = model.backbone(tokens[:, :half])
    state.save(path)
    print(f"State after {half} of {tokens.shape[1]} tokens: {path.resolve()} ({path.stat().st_size:,} bytes)")

    fresh = build_model("naju", task, config)
    fresh.load_state_dict(model.state_dict())
    resumed = fresh.head(_step_through(fresh, tokens[:, half:], ModelState.load(path)))
    difference = float((resumed - whole).abs().max())
    right = int((resumed.argmax(-1) == targets).sum())
    print(
        f"Resumed from the file in a fresh model, token by token: {right} of {len(targets)} answers right; "
        f"the logits differ from those of one uninterrupted reading by at most {difference:.1e}."
    )
    return difference


def _step_through(model: Classifier, tokens: Tensor, state: ModelState) -> Tensor:
    for token in tokens.unbind(1):
        features, state = model.backbone.step(token, state)
    return features


def _introduce(task: Task, models: Mapping[str, Classifier], config: DemoConfig) -> None:
    print("Two models that differ in one thing, trained on the same sequences with the same budget:")
    print("  naju     x = f x + i h B      two gates: what is kept and what is written are separate decisions")
    print("  coupled  x = (1-g) x + g h B   one gate: the more is kept, the less is written")
    for part, what in zip(task.groups, ("every fact counts", "only the latest value counts"), strict=True):
        print(f"  {part}: {what}")
    sizes = ", ".join(f"{name} {sum(p.numel() for p in model.parameters()):,}" for name, model in models.items())
    print(
        f"Parameters: {sizes}. {config.steps} steps of {config.batch_size} sequences of {config.length} tokens.",
        flush=True,
    )
