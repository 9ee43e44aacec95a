"""One example through a trained model: its gates, what it kept, and what it answers without each of the writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from naju.lab.diagnostic_run import load_run_model
from naju.lab.inspect.events import ANSWER, find_events, remove_each, replies
from naju.lab.inspect.layers import gate_scale, gated_layers, view_layer
from naju.lab.pages import render, write_page
from naju.lab.runs import RunFolder
from naju.models.sampling import check_seed
from naju.tasks import TASKS, Task
from naju.tasks.events import QUERY_LENGTH, EventTask
from naju.training.checkpoint import NEWEST

LANGUAGE_MODEL = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Which example, and which part of the model."""

    run: Path
    """Folder of a run, or a checkpoint in it."""
    task: str | None = None
    """Task of the example; by default the one that the run was trained on."""
    seed: int = 0
    """The same seed gives the same example."""
    length: int | None = None
    """Length of the example; by default that of the training sequences."""
    layers: tuple[int, ...] = ()
    """Layers to show, counted from 0; by default all."""
    channels: tuple[int, ...] = ()
    """Channels to show; by default some from the one that keeps least to the one that keeps most."""
    output: Path = Path("inspect.html")
    """The page."""

    def __post_init__(self) -> None:
        check_seed(self.seed)


def run_inspect(config: InspectConfig) -> Path:
    write_page(config.output, build_page(config))
    print(f"Inspected: {config.output.resolve()}")
    return config.output


def build_page(config: InspectConfig) -> str:
    folder = _run_folder(config.run)
    trained_on = folder.config()
    model, own_task = load_run_model(folder.path)
    layers = gated_layers(model, config.layers)
    task = _task(config.task or trained_on["task"], trained_on["task"], own_task)
    length = int(trained_on["length"]) if config.length is None else config.length
    batch = task.sample(1, length, torch.Generator().manual_seed(config.seed))
    tokens, target = batch.tokens[0], int(batch.targets[0])
    events = find_events(task, tokens)
    colours, ticks = gate_scale()
    return render(
        "inspect.html",
        name=folder.name,
        trained_on=trained_on,
        task=config.task or trained_on["task"],
        seed=config.seed,
        length=length,
        query=" ".join(task.describe(tokens[-QUERY_LENGTH:])),
        due=task.answer_name(target),
        reply_now=replies(model, task, tokens.unsqueeze(0), target)[0],
        group=task.groups[int(batch.group[0])],
        answer=ANSWER,
        events=events,
        removals=remove_each(model, task, tokens, target, events),
        layers=[view_layer(model, number, mixer, tokens, events, config.channels) for number, mixer in layers.items()],
        gate_colours=colours,
        gate_ticks=ticks,
    )


def _run_folder(path: Path) -> RunFolder:
    folder = path if path.is_dir() else path.parent
    if (folder / LANGUAGE_MODEL).exists():
        raise ValueError(f"run must be of a diagnostic task, but {str(path)!r} is a language model: not shown yet")
    if not path.is_dir() and path.name != NEWEST:
        raise ValueError(f"run must be the folder of a run or its {NEWEST}, but is {str(path)!r}")
    return RunFolder(folder)


def _task(name: str, own_name: str, own: Task) -> EventTask:
    """Another task than the run's own gets its vocabulary, so that every token means what it meant in training."""
    if not isinstance(own, EventTask):
        raise ValueError(f"run must be of one of the event tasks T1 to T4, but is of {own_name!r}")
    kind = TASKS.get(name)
    if kind is None or not issubclass(kind, EventTask):
        raise ValueError(f"task must be one of the event tasks T1 to T4, but is {name!r}")
    return own if name == own_name else kind(n_entities=own.n_entities, n_values=own.n_values)
