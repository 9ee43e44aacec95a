"""`naju reproduce ls`: every table of the paper, the command that fills it, what that costs, and what is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from naju.bench.rows import RESULTS
from naju.lab.diagnostic_run import EXPERIMENT
from naju.lab.diagnostics import aligned
from naju.lab.options import GridOptions
from naju.lab.paper import paper_tables
from naju.lab.reproduce import EXPERIMENTS, Experiment, StoredCell
from naju.lab.runs import CELL, Results, RunStore
from naju.lab.throughput import speed_tables
from naju.lab.wikitext import LanguageGrid
from naju.lab.wikitext_run import LANGUAGE, PILOT, WIKITEXT, Text
from naju.tasks.lra import LRA

# The command behind each of the paper's tables.
COMMANDS = {
    "tab:protocol": "reproduce diagnostics",
    "tab:summary": "reproduce diagnostics",
    "tab:mamba_factorial": "reproduce mamba-factorial",
    "tab:throughput": "reproduce throughput",
    "tab:bf_sweep": "reproduce bias-f",
    "tab:bi_sweep": "reproduce bias-i",
    "tab:norm_state": "reproduce readout",
    "tab:mqar": "reproduce mqar",
    "tab:lra": "reproduce lra",
    "tab:wt103": "reproduce wikitext-context",
    "tab:wt103_width": "reproduce wikitext-width",
    "tab:wt103_eff": "reproduce wikitext-efficiency",
    "tab:gate_rank": "reproduce gate-rank",
    "tab:main": "reproduce diagnostics",
    "tab:extrap": "reproduce diagnostics",
    "tab:state": "reproduce diagnostics",
    "tab:sthard": "reproduce diagnostics",
    "tab:state_sizes": "reproduce diagnostics",
    "tab:wt103_lr": "reproduce lr-pilot",
}
# The only task of the tables that have one task.
TASK = {"tab:main": "T1", "tab:extrap": "T2", "tab:state": "T3", "tab:sthard": "T4"}
# Which of `speed_tables` belong to a table of the paper.
SPEED = {"tab:throughput": slice(0, 2)}
NOTES = """\
Cost: the steps of all cells, and the time they take one after the other as far as finished runs tell it: a cell's step
takes the median of the experiment's runs with the same mixer and sizes, whatever their budget, on the machines they had
and with what ran beside them there. In parentheses: how many cells have such runs, where not all do; a step of the
others counts with the median of these. Tables of one command share cells.
Filled are cells at the paper's budget, on the whole of WikiText-103 where it is about language models; runs with other
budgets and texts are in the report.
tab:throughput: filled are those of the paper's numbers that one of ours stands beside."""


@dataclass(frozen=True, kw_only=True)
class ListExperiments:
    """Every table of the paper with its command, its cost, and how much of it is there."""

    runs: Path = Path("runs")
    """Folder of the run store."""
    results: Path = Path("results")
    """Folder with copies of results, in it or in folders in it."""
    rows: Path = RESULTS
    """Folder of the benchmarks' rows."""


class Cost(NamedTuple):
    """Of a grid: its cells, how many are finished, all their steps, and hours where finished runs let one estimate:
    those that are like `timed` of the cells."""

    cells: int
    finished: int
    steps: int
    timed: int
    hours: float

    def __str__(self) -> str:
        if not self.cells:
            return "none"
        if not self.timed:
            return f"{self.steps:,} steps"
        time = f"{self.hours:.1f} h" if self.hours >= 1 else f"{60 * self.hours:.0f} min"
        part = "" if self.timed == self.cells else f" ({self.timed} of {self.cells})"
        return f"{self.steps:,} steps, about {time}{part}"


Result = Mapping[str, Any]


class Finished:
    """The finished runs of a run store and of all copies: their names, and how long a step takes in those alike."""

    def __init__(self, options: ListExperiments) -> None:
        self.names: set[tuple[str, str]] = set()
        times: dict[tuple[str, ...], list[float]] = {}
        for name, result in _results(options):
            experiment = str(result.get("experiment", EXPERIMENT))
            self.names.add((experiment, name))
            seconds = _seconds_a_step(result)
            if seconds is not None:
                times.setdefault(_likeness(experiment, result.get("config")), []).append(seconds)
        self.seconds_a_step = {alike: median(found) for alike, found in times.items()}

    def cost(self, experiment: Experiment, cells: Sequence[StoredCell]) -> Cost:
        finished = sum((experiment.name, cell.name) in self.names for cell in cells)
        times = [self.seconds_a_step.get(_likeness(experiment.name, cell.to_json())) for cell in cells]
        known = [seconds for seconds in times if seconds is not None]
        usual = median(known) if known else 0.0
        total = sum(
            cell.steps * (usual if seconds is None else seconds) for cell, seconds in zip(cells, times, strict=True)
        )
        return Cost(len(cells), finished, sum(cell.steps for cell in cells), len(known), total / 3600)


def _results(options: ListExperiments) -> Iterator[tuple[str, Result]]:
    """With the names of their runs, which are those of folders or files; without what is no result of a cell."""
    store = RunStore(options.runs)
    copies = [path for pattern in ("*.json", "*/*.json") for path in options.results.glob(pattern)]
    found = [(run.name, run.result()) for run in store.runs()]
    found += [(path.stem, Results(store, path.parent.name, path.parent).get(path.stem)) for path in copies]
    return ((name, result) for name, result in found if result is not None and set(CELL) <= set(result))


def _seconds_a_step(result: Result) -> float | None:
    """None of runs that diverged or did not fit into memory, whatever their files say instead."""
    steps, seconds = result.get("steps"), result.get("seconds")
    if not isinstance(steps, int) or not isinstance(seconds, int | float) or steps < 1:
        return None
    return seconds / steps


def _likeness(experiment: str, config: Any) -> tuple[str, ...]:
    """What the time of a step depends on, but for the machine."""
    known = config if isinstance(config, Mapping) else {}
    options = known.get("mixer_options", known.get("options"))
    more = options if isinstance(options, Mapping) else {}
    task = LRA.get(str(known.get("task")))
    reads_pairs = task is not None and task.has_pairs  # of texts, each of the task's length
    sizes = [known.get(name) for name in ("mixer", "d_model", "n_layers", "length", "batch_size")]
    sizes += [more.get(name) for name in ("d_state", "gate_rank")]
    return experiment, str(reads_pairs), *map(str, sizes)


def list_experiments(options: ListExperiments) -> None:
    finished = Finished(options)
    rows = [["table", "command", "filled", "full run", "quick run", "what it is"]]
    rows += [
        [label, f"naju {COMMANDS[label]}", *_standing(label, options, finished), _title(label)] for label in COMMANDS
    ]
    print(f"{aligned(rows)}\n\n{NOTES}")


def _title(label: str) -> str:
    return paper_tables()[label].title


def _standing(label: str, options: ListExperiments, finished: Finished) -> tuple[str, str, str]:
    """What is filled, the cost in full, the quick cost."""
    if label in SPEED:
        return _measured(label, options), "minutes on a GPU", "seconds on a CPU"
    command = COMMANDS[label].removeprefix("reproduce ")
    found = next(((kind, one) for kind, one in EXPERIMENTS.items() if one.command == command), None)
    if found is None:
        return "–", "–", "–"
    kind, experiment = found
    full = finished.cost(experiment, _cells(kind, label, options))
    told = f"{full.finished} of {full.cells}", str(full)
    if issubclass(kind, LanguageGrid):
        return *told, "by --budget"
    return *told, str(finished.cost(experiment, _of_table(kind(quick=True).cells(), label)))


def _measured(label: str, options: ListExperiments) -> str:
    pairs = [pair for table in speed_tables(options.rows)[SPEED[label]] for row in table.rows for pair in row.cells]
    printed = [pair for pair in pairs if pair.is_printed]
    return f"{sum(pair.ours is not None for pair in printed)} of {len(printed)}"


def _cells(kind: type[Any], label: str, options: ListExperiments) -> list[StoredCell]:
    """Those of the command that this table is about."""
    if issubclass(kind, LanguageGrid):
        grid = GridOptions(runs=options.runs, results=_copied_pilots(options))
        return list(kind(grid=grid).cells_on(Text(WIKITEXT, {})))
    return _of_table(kind().cells(), label)


def _copied_pilots(options: ListExperiments) -> Path:
    """The folder from which learning rates come. Copies of language models may lie together, whichever of their
    commands made them."""
    folders = (options.results / name for name in (PILOT, LANGUAGE))
    return next((folder for folder in folders if folder.is_dir()), options.results)


def _of_table(cells: Sequence[StoredCell], label: str) -> list[StoredCell]:
    task = TASK.get(label)
    return [cell for cell in cells if task is None or cell.to_json()["task"] == task]
