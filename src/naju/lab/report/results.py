"""Finished runs as the report sees them: read from their files, grouped into models, summed up over seeds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from naju.lab.diagnostic_run import EXPERIMENT
from naju.lab.diagnostics import FULL, SUCCESS, TASKS, spread
from naju.lab.paper import PaperModel, diagnostics
from naju.lab.reproduce import EXPERIMENTS, tables_of
from naju.lab.runs import CELL, CONFIG, RESULT, is_inside_a_run

Written = Mapping[str, Any]  # a result as its file has it
GROWING = "T4 growing"
# The tables of the report. The growing length rule is measured on the runs of T4 and shown as a task of its own.
BOARDS = ("T1", "T2", "T3", "T4", GROWING)


@dataclass(frozen=True)
class Seeds:
    """One number of several runs that differ in their seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return spread(self.values).mean

    @property
    def std(self) -> float | None:
        """The sample standard deviation, None for a single seed."""
        return spread(self.values).std

    @property
    def worst(self) -> float:
        return spread(self.values).worst

    @property
    def best(self) -> float:
        return max(self.values)

    @property
    def count(self) -> int:
        return len(self.values)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One finished run. `accuracy[board][length][bucket]` is a share of right answers; the bucket "all" is everything.

    A value that was not measured is absent.
    """

    mixer: str
    task: str
    variant: str
    seed: int
    config: Mapping[str, Any]
    parameters: int
    state_size: int | None
    steps: int
    seconds: float
    train_accuracy: float
    best_validation: float
    accuracy: Mapping[str, Mapping[int, Mapping[str, float]]]
    curve: Sequence[tuple[int, float, float | None]]
    machine: str
    when: str

    @property
    def length(self) -> int:
        """The training length."""
        length: int = self.config["length"]
        return length


@dataclass(frozen=True)
class Model:
    """Runs that differ in task and seed only, and the paper's row about them where it has one."""

    label: str
    mixer: str
    runs: tuple[Result, ...]
    paper: PaperModel | None

    def of(self, board: str) -> list[Result]:
        task = board.split()[0]
        return [run for run in self.runs if run.task == task]

    def at(self, board: str, length: int, bucket: str = "all") -> Seeds | None:
        """Over the seeds for which this was measured."""
        cells = (run.accuracy.get(board, {}).get(length, {}) for run in self.of(board))
        values = tuple(cell[bucket] for cell in cells if bucket in cell)
        return Seeds(values) if values else None

    def successes(self, board: str) -> int:
        return sum(run.best_validation > SUCCESS for run in self.of(board))

    def lengths(self, board: str) -> list[int]:
        return sorted({length for run in self.of(board) for length in run.accuracy.get(board, {})})

    @property
    def far(self) -> int:
        """Four times the training length: where the paper draws its frontier."""
        return 4 * max(run.length for run in self.runs)


class Reading(NamedTuple):
    """What a folder holds: results of the diagnostic suite, a sentence about every file or run that gives none, and the
    results of all experiments as they were written."""

    results: list[Result]
    problems: list[str]
    written: list[Written]

    def of(self, experiment: str) -> list[Written]:
        return [one for one in self.written if _experiment(one) == experiment]


def read_results(folder: Path) -> Reading:
    """Every `result.json` below `folder`, and the JSON files in it and in folders in it that are no runs; of two
    results for one cell, the later."""
    if not folder.is_dir():
        raise ValueError(f"runs must be a folder, but {str(folder)!r} is none")
    cells: dict[tuple[str, ...], Written] = {}
    problems = []
    for path in _result_files(folder):
        try:
            found = _checked(_read_json(path.read_text(encoding="utf-8")))
        except (ValueError, OSError) as error:
            problems.append(f"{path.relative_to(folder)} cannot be read as a result: {error}")
            continue
        cell = (_experiment(found), *(str(found[name]) for name in CELL))
        if cell not in cells or str(cells[cell].get("when", "")) <= str(found.get("when", "")):
            cells[cell] = found
    begun = (path.parent for path in sorted(folder.rglob(CONFIG)))
    unfinished = [run for run in begun if not (run / RESULT).exists() and not is_inside_a_run(run)]
    problems += [f"{run.relative_to(folder)} has a config but no result: unfinished" for run in unfinished]
    written = list(cells.values())
    return Reading([parse_result(one) for one in written if _experiment(one) == EXPERIMENT], problems, written)


def _result_files(folder: Path) -> list[Path]:
    """In a run's own folder, JSON files beside the result are other things."""
    places = [folder, *(place for place in folder.iterdir() if place.is_dir())]
    copies = [path for place in places if not (place / CONFIG).exists() for path in place.glob("*.json")]
    return sorted({*folder.rglob(RESULT), *copies})


def _read_json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from error


def _checked(found: Any) -> Written:
    """A result whose experiment can show it; a ValueError says what is wrong with it."""
    if not isinstance(found, dict):
        raise ValueError(f"a value has another type than expected ({type(found).__name__} is no result)")
    if _experiment(found) == EXPERIMENT:
        parse_result(found)
        return found
    if _experiment(found) not in {known.name for known in EXPERIMENTS.values()}:
        raise ValueError(f"no experiment is called {_experiment(found)!r}")
    for name in CELL:
        if name not in found:
            raise ValueError(f"{name!r} is missing")
    if not isinstance(found["seed"], int):
        raise ValueError(f"seed must be an integer, but is {found['seed']!r}")
    try:
        tables_of(found)
        curve_of(found.get("curve", []))
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"its experiment cannot show it ({type(error).__name__}: {error})") from error
    return found


def _experiment(found: Written) -> str:
    return str(found.get("experiment", EXPERIMENT))


def parse_result(read: Written) -> Result:
    """A result of the diagnostic suite from its JSON; a ValueError says what is wrong with it."""
    try:
        boards = {read["task"]: read["accuracy"], GROWING: _growing(read)}
        return Result(
            mixer=str(read["mixer"]),
            task=_known_task(read["task"]),
            variant=str(read["variant"]),
            seed=int(read["seed"]),
            config=_config(read["config"]),
            parameters=int(read["parameters"]),
            state_size=None if read["state_size"] is None else int(read["state_size"]),
            steps=int(read["steps"]),
            seconds=float(read["seconds"]),
            train_accuracy=_share(read["train_accuracy"]),
            best_validation=_share(read["best_validation"]),
            accuracy={board: _by_length(rows) for board, rows in boards.items() if rows},
            curve=curve_of(read["curve"]),
            machine=_machine(read.get("machine")),
            when=str(read.get("when", "")),
        )
    except KeyError as error:
        raise ValueError(f"{error.args[0]!r} is missing") from error
    except (TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"a value has another type than expected ({error})") from error


def _growing(read: Written) -> Mapping[str, Any]:
    """At the training length, where both rules give the same number of events, the one measurement stands for both."""
    longer, trained = read.get("growing") or {}, str(read["config"]["length"])
    shared = {trained: read["accuracy"][trained]} if longer and trained in read["accuracy"] else {}
    return {**shared, **longer}


def curve_of(points: Sequence[Sequence[Any]]) -> list[tuple[int, float, float | None]]:
    """Steps, losses and validation accuracies."""
    return [_curve_point(*point) for point in points]


# Sizes and budgets that the paper has rows for; every other change makes another experiment.
PAPERS_VARIANT = re.compile(r"default|(d\d+-n\d+)?-?(3x-epochs)?")


def group_models(results: Sequence[Result]) -> list[Model]:
    """Models in the paper's order, Naju first; those the paper does not have come after them. Beside a row of the
    paper's stand only runs of its protocol: what was changed otherwise is in the label."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in sorted(results, key=_order):
        groups.setdefault((result.mixer, result.variant), []).append(result)
    models: list[Model] = []
    for (mixer, variant), runs in groups.items():
        alike = (row for row in diagnostics().models if row.is_like(**_identity(runs[0])))
        row = next(alike, None) if PAPERS_VARIANT.fullmatch(variant) else None
        label = row.label if row else family(mixer)
        taken = label in {model.label for model in models}
        named = variant != "default" and (taken or row is None)
        models.append(Model(f"{label} ({variant})" if named else label, mixer, tuple(runs), row))
    order = [row.mixer for row in diagnostics().models]
    return sorted(models, key=lambda model: order.index(model.mixer) if model.mixer in order else len(order))


def _order(run: Result) -> tuple[str, bool, str, str, int]:
    return run.mixer, run.variant != "default", run.variant, run.task, run.seed


def family(mixer: str) -> str:
    """A mixer as people call it."""
    return next((row.family for row in diagnostics().models if row.mixer == mixer), mixer.capitalize())


def _identity(run: Result) -> dict[str, Any]:
    return {
        "mixer": run.mixer,
        "d_model": run.config.get("d_model"),
        "state_size": run.state_size,
        "extended": run.config["epochs"] >= 3 * FULL.budgets[run.task].epochs,
    }


def _by_length(rows: Mapping[str, Mapping[str, float | None] | None]) -> dict[int, dict[str, float]]:
    """Numbers only: a length or a bucket that could not be measured holds null."""
    return {
        _positive("a test length", int(length)): {
            bucket: _share(value) for bucket, value in (row or {}).items() if value is not None
        }
        for length, row in rows.items()
    }


def _share(value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"an accuracy must lie in [0, 1], but one is {value}")
    return float(value)


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} must be positive, but one is {value}")
    return value


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no measurement")


def _curve_point(step: int, loss: float, validation: float | None) -> tuple[int, float, float | None]:
    if not (math.isfinite(step) and math.isfinite(loss)):
        raise ValueError(f"the loss at step {step} is {loss}")
    return int(step), float(loss), None if validation is None else float(validation)


def _known_task(name: str) -> str:
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, but is {name!r}")
    return name


def _config(read: Mapping[str, Any]) -> dict[str, Any]:
    """With the two settings that the page itself needs checked."""
    return {**read, "length": _positive("the training length", int(read["length"])), "epochs": float(read["epochs"])}


def _machine(read: Any) -> str:
    """The accelerator where there was one, else the processor and its cores."""
    if not isinstance(read, Mapping):
        return ""
    return str(read.get("accelerator") or f"{read.get('processor', 'unknown')}, {read.get('cores', '?')} cores")
