"""`naju runs`: what is in a run store, one run in full, and how to be rid of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from naju.lab.diagnostics import aligned
from naju.lab.reproduce import experiment_of, tables_of
from naju.lab.runs import RunFolder, RunStore

RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True)
class ListRuns:
    """Every run with its status."""

    runs: Path = RUNS
    """Folder of the run store."""


@dataclass(frozen=True, kw_only=True)
class ShowRun:
    """One run: config, last lines of its metrics, result."""

    name: str
    """As `naju runs ls` prints it."""
    runs: Path = RUNS
    """Folder of the run store."""
    lines: int = 5
    """How many of the last lines of its metrics."""


@dataclass(frozen=True, kw_only=True)
class RemoveRuns:
    """Delete runs; one that is being trained is refused, and then none is deleted."""

    names: tuple[str, ...]
    """As `naju runs ls` prints them."""
    runs: Path = RUNS
    """Folder of the run store."""


def list_runs(options: ListRuns) -> None:
    rows = [["run", "status", "result"]]
    for run in RunStore(options.runs).runs():
        rows.append([f"{run.path.parent.name}/{run.name}", run.status(), _told_result(run.result())])
    print(aligned(rows) if len(rows) > 1 else f"no runs in {options.runs}")


def _told_result(result: dict[str, Any] | None) -> str:
    try:
        return "" if result is None else experiment_of(result).describe(result)
    except (AttributeError, LookupError, TypeError, ValueError):
        return "its result is damaged"


def show_run(options: ShowRun) -> None:
    run = RunStore(options.runs).find(options.name)
    print(f"{run.path}: {run.status()}\n")
    print(aligned([[key, json.dumps(value)] for key, value in run.config().items()]), end="\n\n")
    for row in run.metrics()[-options.lines :] if options.lines > 0 else []:
        print(json.dumps(row))
    _show_result(run)


def _show_result(run: RunFolder) -> None:
    result = run.result()
    if result is None:
        return
    facts = ("parameters", "state_size", "seconds", "train_accuracy", "best_validation", "final_validation", "when")
    print(aligned([["", ""], *([name, str(result[name])] for name in facts if name in result)]))
    try:
        print(f"\n{tables_of(result)}")
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"the result of run {run.name} is damaged: {type(error).__name__}, {error}") from error


def remove_runs(options: RemoveRuns) -> None:
    if not options.names:
        raise ValueError("names must name at least one run, but name none")
    store = RunStore(options.runs)
    found = list(dict.fromkeys(store.find(name) for name in options.names))
    for run in found:
        run.check_idle()
    for run in found:
        run.remove()
        print(f"removed {run.path}")
