"""`naju reproduce ls`: every table of the paper, the command that fills it, what that costs, and what is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from naju.bench.rows import RESULTS
from naju.lab.diagnostics import aligned
from naju.lab.options import GridOptions
from naju.lab.paper import paper_tables
from naju.lab.reproduce import EXPERIMENTS, Experiment, StoredCell
from naju.lab.runs import Results, RunStore
from naju.lab.throughput import speed_tables
from naju.lab.wikitext import LanguageGrid
from naju.lab.wikitext_run import LANGUAGE, PILOT, WIKITEXT, Text
from naju.lab.wikitext_run import SPEED as SPEED_RUNS

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
Cost: the steps of all cells; time is these times the median seconds a step of the finished runs in these folders, one
run after the other, and left out where there are none. Tables of one command share cells.
Filled are cells at the paper's budget, on the whole of WikiText-103 where it is about language models; runs with other
budgets and texts are in the report.
tab:throughput: filled are those of the paper's numbers that one of ours stands beside."""


@dataclass(frozen=True, kw_only=True)
class ListExperiments:
    """Every table of the paper with its command, its cost, and how much of it is there."""

    runs: Path = Path("runs")
    """Folder of the run store."""
    results: Path = Path("results")
    """Folder with copies of results, all in it or each experiment's in a folder of its own."""
    rows: Path = RESULTS
    """Folder of the benchmarks' rows."""


class Cost(NamedTuple):
    """Of a grid: its cells, how many are finished, all their steps, and hours where finished runs let one estimate."""

    cells: int
    finished: int
    steps: int
    hours: float | None

    def __str__(self) -> str:
        if not self.cells:
            return "none"
        if self.hours is None:
            return f"{self.steps:,} steps"
        time = f"{self.hours:.1f} h" if self.hours >= 1 else f"{60 * self.hours:.0f} min"
        return f"{self.steps:,} steps, about {time}"


def list_experiments(options: ListExperiments) -> None:
    rows = [["table", "command", "filled", "full run", "quick run", "what it is"]]
    rows += [[label, f"naju {COMMANDS[label]}", *_standing(label, options), _title(label)] for label in COMMANDS]
    print(f"{aligned(rows)}\n\n{NOTES}")


def _title(label: str) -> str:
    return paper_tables()[label].title


def _standing(label: str, options: ListExperiments) -> tuple[str, str, str]:
    """What is filled, the cost in full, the quick cost."""
    if label in SPEED:
        return _measured(label, options), "minutes on a GPU", "seconds on a CPU"
    command = COMMANDS[label].removeprefix("reproduce ")
    found = next(((kind, one) for kind, one in EXPERIMENTS.items() if one.command == command), None)
    if found is None:
        return "–", "–", "–"
    kind, experiment = found
    full = cost(experiment, _cells(kind, label, options), options)
    quick = cost(experiment, _quick_cells(kind, label), options)
    return f"{full.finished} of {full.cells}", str(full), str(quick)


def cost(experiment: Experiment, cells: Sequence[StoredCell], options: ListExperiments) -> Cost:
    """The time of a step is that of the finished cells among these."""
    store = Results(RunStore(options.runs), experiment.name, _copies(options, experiment.name))
    found = [result for cell in cells if (result := store.get(cell.name)) is not None]
    steps, seconds = sum(cell.steps for cell in cells), _seconds_a_step(found)
    return Cost(len(cells), len(found), steps, None if seconds is None else steps * seconds / 3600)


def _copies(options: ListExperiments, experiment: str) -> Path:
    """Those of language models may lie together, whichever of their commands made them."""
    together = [LANGUAGE] if experiment in (PILOT, SPEED_RUNS) else []
    folders = (options.results / name for name in (experiment, *together))
    return next((folder for folder in folders if folder.is_dir()), options.results)


def _measured(label: str, options: ListExperiments) -> str:
    pairs = [pair for table in speed_tables(options.rows)[SPEED[label]] for row in table.rows for pair in row.cells]
    printed = [pair for pair in pairs if pair.is_printed]
    return f"{sum(pair.ours is not None for pair in printed)} of {len(printed)}"


def _cells(kind: type[Any], label: str, options: ListExperiments) -> list[StoredCell]:
    """Those of the command that this table is about."""
    if issubclass(kind, LanguageGrid):
        grid = GridOptions(runs=options.runs, results=_copies(options, PILOT))
        return list(kind(grid=grid).cells_on(Text(WIKITEXT, {})))
    return _of_table(kind().cells(), label)


def _quick_cells(kind: type[Any], label: str) -> list[StoredCell]:
    return [] if issubclass(kind, LanguageGrid) else _of_table(kind(quick=True).cells(), label)


def _of_table(cells: Sequence[StoredCell], label: str) -> list[StoredCell]:
    task = TASK.get(label)
    return [cell for cell in cells if task is None or cell.to_json()["task"] == task]


def _seconds_a_step(results: Sequence[Mapping[str, Any]]) -> float | None:
    """Results without both, of runs that did not fit into memory, say nothing of it."""
    times = [result["seconds"] / result["steps"] for result in results if result.get("steps") and "seconds" in result]
    return median(times) if times else None
