"""What runs were trained with: each task's budget, and what the name of a variant stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from naju.lab.diagnostics import FULL, TASKS, diagnostic_run
from naju.lab.report.gaps import NAMES
from naju.lab.report.results import Model, Result

# With the options of mixer and task, all that a variant may change; the rest of a config names or measures a run.
VARIED = NAMES | {name: name for name in ("head", "sequences", "decay_all")} | {"d_model": "width"}


def told_budgets(models: Sequence[Model]) -> list[str]:
    """A sentence for each task; where it has several budgets, with the models that had them."""
    used = {task: budgets for task in TASKS if (budgets := _budgets(task, models))}
    return [f"{task}: {'; '.join(_with_models(budgets))}." for task, budgets in used.items()]


def told_variants(models: Sequence[Model]) -> list[str]:
    """What the names in parentheses have otherwise than the full protocol, as far as their runs' configs say it."""
    runs: dict[str, list[Result]] = {}
    for model in models:
        if (variant := _variant(model)) is not None:
            runs.setdefault(variant, []).extend(model.runs)
    return [f"{variant}: {_told_differences(of_variant)}" for variant, of_variant in runs.items()]


def _variant(model: Model) -> str | None:
    """The name that stands in parentheses in its label."""
    variant = model.runs[0].variant
    return variant if model.label.endswith(f"({variant})") else None


def _budgets(task: str, models: Sequence[Model]) -> dict[str, list[Model]]:
    """A budget in words -> its models."""
    budgets: dict[str, list[Model]] = {}
    for model in models:
        for told in dict.fromkeys(_budget(run) for run in model.of(task)):
            budgets.setdefault(told, []).append(model)
    return budgets


def _with_models(budgets: Mapping[str, Sequence[Model]]) -> list[str]:
    if len(budgets) == 1:
        return [f"{budget} for every model" for budget in budgets]
    return [f"{budget} for {told_models(models)}" for budget, models in budgets.items()]


def told_models(models: Sequence[Model]) -> str:
    """Those of one variant, which has one budget a task, by its name."""
    variants = {_variant(model) for model in models}
    if len(models) > 1 and len(variants) == 1 and None not in variants:
        return f"all that are called ({variants.pop()})"
    return ", ".join(model.label for model in models)


def _budget(run: Result) -> str:
    count = run.config.get("sequences")
    sequences = f"{count:,} sequences" if isinstance(count, int) else "an unrecorded number of sequences"
    return f"{sequences} of length {run.length:,} for {run.config['epochs']:g} epochs ({run.steps:,} steps)"


def _told_differences(runs: Sequence[Result]) -> str:
    found: dict[str, dict[str, set[str]]] = {}  # setting -> value -> tasks
    for run in runs:
        for name, value in _differences(run).items():
            found.setdefault(name, {}).setdefault(_told(value), set()).add(run.task)
    told = [f"{name} {_told_values(values)}" for name, values in found.items()]
    return ", ".join(told) or "nothing that is recorded (a name given by hand, to runs of older code for example)"


def _told_values(values: Mapping[str, set[str]]) -> str:
    if len(values) == 1:
        return next(iter(values))
    return " and ".join(f"{value} ({', '.join(sorted(tasks))})" for value, tasks in values.items())


def _differences(run: Result) -> dict[str, Any]:
    usual = _settings(diagnostic_run(FULL, run.mixer, run.task, run.seed, device="cpu").to_json())
    return {name: value for name, value in _settings(run.config).items() if value != usual.get(name)}


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    options = [found for name in ("mixer_options", "task_options") if isinstance(found := config.get(name), Mapping)]
    return {told: config[name] for name, told in VARIED.items() if name in config} | {
        name: value for given in options for name, value in given.items()
    }


def _told(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if type(value) is int else str(value)
