"""What the results do not show: cells without runs, and where the budget is another than the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from naju.lab.diagnostics import TASKS, tasks_of
from naju.lab.paper import PaperModel, diagnostics
from naju.lab.report.results import Model, Result, family
from naju.lab.report.tables import side_by_side

# The bound's single gate is no row of the paper's tables, but belongs to the grid.
BESIDE_THE_PAPER = ("coupled",)
NAMES = {
    "lr": "learning rate",
    "weight_decay": "weight decay",
    "batch_size": "batch",
    "warmup_ratio": "warm-up, share of all steps",
    "epochs": "epochs",
    "clip": "gradient clipping",
    "length": "training length",
    "n_layers": "layers",
}


@dataclass(frozen=True)
class SeedCounts:
    """How many seeds a model has, task by task in the order of TASKS; None where none is expected, because the paper's
    row or the model's protocol lacks the task."""

    label: str
    counts: tuple[int | None, ...]
    planned: bool = True  # else nothing is missing of it, whatever there is


@dataclass(frozen=True)
class Deviation:
    setting: str
    paper: str
    here: tuple[str, ...]  # a sentence a value: the value, and where it was used


def seed_counts(models: Sequence[Model]) -> list[SeedCounts]:
    """Every model of ours and of the paper, so that an empty row is a model that was not run."""
    rows = [
        SeedCounts(label, tuple(_seeds(task, model, row) for task in TASKS), _is_planned(label, row))
        for label, model, row in side_by_side(models)
    ]
    present = {model.mixer for model in models}
    absent = [family(mixer) for mixer in BESIDE_THE_PAPER if mixer not in present]
    return rows + [SeedCounts(label, (0,) * len(TASKS)) for label in absent]


def missing_seeds(counts: Sequence[SeedCounts]) -> int:
    """Runs to go until every cell has as many seeds as the paper's."""
    planned = (count for row in counts if row.planned for count in row.counts if count is not None)
    return sum(max(diagnostics().seeds - count, 0) for count in planned)


def deviations(models: Sequence[Model]) -> list[Deviation]:
    """Settings of the paper's protocol that some run has otherwise, or does not record."""
    found = []
    for name, usual in diagnostics().protocol.items():
        used = _used(name, models)
        if any(value != usual for value in used):
            here = tuple(f"{_shown(value)} ({_where(places, models)})" for value, places in used.items())
            found.append(Deviation(NAMES[name], _shown(usual), here))
    return found


def _is_planned(label: str, row: PaperModel | None) -> bool:
    return row is not None or label in map(family, BESIDE_THE_PAPER)


def _seeds(task: str, model: Model | None, row: PaperModel | None) -> int | None:
    seeds = {run.seed for run in model.of(task)} if model else set()
    expected = (row is None or task in row.accuracy) and (model is None or task in tasks_of(model.runs[0].variant))
    return len(seeds) if seeds or expected else None


def _used(name: str, models: Sequence[Model]) -> dict[Any, dict[str, set[str]]]:
    """value -> task -> labels of the models that used it there."""
    used: dict[Any, dict[str, set[str]]] = {}
    for model in models:
        for run in model.runs:
            value = _setting(run, name)
            used.setdefault(value, {}).setdefault(run.task, set()).add(model.label)
    return used


def _setting(run: Result, name: str) -> Any:
    value = run.config.get(name)
    return value if isinstance(value, int | float) else None


def _where(places: Mapping[str, set[str]], models: Sequence[Model]) -> str:
    """Tasks by name; with the models where not all of a task's models are meant."""
    told = []
    for task, labels in sorted(places.items()):
        others = {model.label for model in models if model.of(task)} - labels
        if not others:
            told.append(task)
        elif len(others) < len(labels):
            told.append(f"{task} but for {', '.join(sorted(others))}")
        else:
            told.append(f"{task}: {', '.join(sorted(labels))}")
    return "; ".join(told)


def _shown(value: Any) -> str:
    return "not recorded" if value is None else f"{value:g}"
