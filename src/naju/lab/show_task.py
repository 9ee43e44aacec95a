"""One example of a task in words, and a list of all tasks."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from naju.lm.config import parse_options
from naju.models.sampling import check_seed
from naju.tasks import IGNORE, TASKS, Task, build_task

WORDS_A_LINE = 12


@dataclass(frozen=True, kw_only=True)
class ShowTask:
    """One example of a task, with its answer."""

    name: str
    """One of the names that `naju tasks ls` prints."""
    length: int = 192
    """Length of the sequence."""
    seed: int = 0
    """The same seed gives the same example."""
    options: tuple[str, ...] = ()
    """Options of the task as name=value, such as n_events=8 growing_from=64."""

    def __post_init__(self) -> None:
        check_seed(self.seed)


@dataclass(frozen=True)
class ListTasks:
    """Every task with its options and their defaults."""


def show_task(config: ShowTask) -> None:
    """The sequence, line by line with the place of each line's first token; then the answer and its group."""
    task = build_task(config.name, **parse_options(config.options))
    tokens, targets, group = task.sample(1, config.length, torch.Generator().manual_seed(config.seed))
    words, start = task.describe(tokens[0]), 0
    while start < len(words):
        end = _line_end(words, start)
        text = f"PAD × {end - start}" if words[start] == "PAD" else " ".join(words[start:end])
        print(f"{start:>{len(str(config.length))}}  {text}")
        start = end
    print(f"answer  {_told_answers(task, targets[0])}, one of {task.n_classes}")
    print(f"group   {task.groups[int(group[0])]}, one of {', '.join(task.groups)}")


def _told_answers(task: Task, targets: Tensor) -> str:
    """The answer, or each with the place that asks for it."""
    if targets.dim() == 0:
        return task.answer_name(int(targets))
    places = (targets != IGNORE).nonzero().squeeze(1).tolist()
    return ", ".join(f"{task.answer_name(int(targets[place]))} at {place}" for place in places)


def list_tasks() -> None:
    for name, task in TASKS.items():
        print(f"{name}  {_first_sentence(task)}")
        defaults = (f"{option.name} {option.default}" for option in fields(task))  # type: ignore[arg-type]
        print(f"{' ' * len(name)}  {', '.join(defaults)}")


def _line_end(words: Sequence[str], start: int) -> int:
    """A line is a run of padding, or ends with an event, before padding, or when it is full."""
    if words[start] == "PAD":
        return next((place for place in range(start, len(words)) if words[place] != "PAD"), len(words))
    full = min(start + WORDS_A_LINE, len(words))
    ends = (place for place in range(start + 1, full) if words[place - 1] == "SEP" or words[place] == "PAD")
    return next(ends, full)


def _first_sentence(task: type[Task]) -> str:
    """What the task's own docstring says after its name."""
    paragraph = " ".join((inspect.getdoc(task) or "").split("\n\n")[0].split())
    return paragraph.partition(": ")[2] or paragraph
