"""One example, or a text, through a trained model: its gates, what it kept, and its answer without each write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from naju.lab.diagnostic_run import load_run_model
from naju.lab.inspect.events import ANSWER, find_events, remove_each, replies
from naju.lab.inspect.layers import gate_scale, gated_layers, view_layer
from naju.lab.inspect.text import text_page
from naju.lab.pages import render, write_page
from naju.lab.runs import RunFolder
from naju.lm.folder import WEIGHTS
from naju.lm.record import BEST
from naju.models.sampling import check_seed
from naju.tasks import TASKS, Task
from naju.tasks.events import QUERY_LENGTH, EventTask
from naju.training.checkpoint import NEWEST


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Which example, and which part of the model."""

    run: Path
    """Folder of a run, or a checkpoint in it; for --text that of a language model."""
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
    text: str | None = None
    """What a language model reads, in place of an example of a task."""
    tokenizer: str | None = None
    """For the text, as for `naju lm generate`; by default the tokenizer.json in the model's folder."""
    output: Path = Path("inspect.html")
    """The page."""

    def __post_init__(self) -> None:
        check_seed(self.seed)


def run_inspect(config: InspectConfig) -> Path:
    write_page(config.output, build_page(config))
    print(f"Inspected: {config.output.resolve()}")
    return config.output


def build_page(config: InspectConfig) -> str:
    language_model = _language_model(config.run)
    if language_model is None:
        if config.text is not None:
            raise ValueError(f"run must be a language model for --text, but {str(config.run)!r} is none")
        return _example_page(config)
    if config.text is None:
        raise ValueError(f"{str(config.run)!r} is a language model: give it something to read with --text")
    return text_page(language_model, config.text, config.tokenizer, config.layers, config.channels)


def _example_page(config: InspectConfig) -> str:
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
    if not path.is_dir() and path.name != NEWEST:
        raise ValueError(f"run must be the folder of a run or its {NEWEST}, but is {str(path)!r}")
    return RunFolder(path if path.is_dir() else path.parent)


def _language_model(path: Path) -> Path | None:
    """The folder of the language model that is meant, which for a run is its best, or None."""
    folder = path.parent if path.name == WEIGHTS else path
    return next((found for found in (folder, folder / BEST) if (found / WEIGHTS).is_file()), None)


def _task(name: str, own_name: str, own: Task) -> EventTask:
    """Another task than the run's own gets its vocabulary, so that every token means what it meant in training."""
    if not isinstance(own, EventTask):
        raise ValueError(f"run must be of one of the event tasks T1 to T4, but is of {own_name!r}")
    kind = TASKS.get(name)
    if kind is None or not issubclass(kind, EventTask):
        raise ValueError(f"task must be one of the event tasks T1 to T4, but is {name!r}")
    if name == own_name:
        return own
    try:
        return kind(n_entities=own.n_entities, n_values=own.n_values)
    except ValueError as error:
        told = f"task must fit the vocabulary that the run was trained on, but {name} does not: {error}"
        raise ValueError(told) from error
