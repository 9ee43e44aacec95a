"""`naju reproduce`: the paper's experiments as grids of runs that fill in any number of sittings."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from naju.lab.ablations import SWEEPS, told_sweep
from naju.lab.diagnostic_run import EXPERIMENT, DiagnosticRun, run_diagnostic
from naju.lab.diagnostics import FULL, QUICK, SUITE, UNCHANGED, Changes, aligned, diagnostic_run, in_order, tables
from naju.lab.grid import Cell, Grid, Outcome
from naju.lab.lra import Lra, describe_lra, told_lra
from naju.lab.lra_run import EXPERIMENT as LRA
from naju.lab.lra_run import LraRun, run_lra
from naju.lab.mqar import Mqar
from naju.lab.mqar_run import EXPERIMENT as MQAR
from naju.lab.mqar_run import MqarRun, run_mqar
from naju.lab.mqar_tables import told_mqar
from naju.lab.options import MATRIX_DECAY, PAPER_NAMES, GridOptions, check_names, check_options, parse_seeds
from naju.lab.runs import RESULT, Results, RunStore
from naju.lab.side_by_side import side_by_side
from naju.lab.signals import Signals
from naju.lab.slurm import LOGS, submit
from naju.lab.wikitext import (
    LanguageGateRank,
    LanguageGrid,
    LrPilot,
    WikitextContext,
    WikitextEfficiency,
    WikitextWidth,
)
from naju.lab.wikitext_run import WikitextRun, describe_wikitext, run_wikitext
from naju.lab.wikitext_tables import told_costs, told_perplexities, told_pilots
from naju.lm.config import parse_options
from naju.mixers import MIXERS
from naju.training import Reporter
from naju.training.files import check_writable


@dataclass(frozen=True, kw_only=True)
class Diagnostics:
    """T1 to T4: retention and overwriting, learned at length 512 and examined up to 8192."""

    mixers: tuple[str, ...] = ()
    """Names of mixers; xlstm is mlstm. Without any: the whole suite, and the Transformer once more with three times the
    epochs."""
    tasks: tuple[str, ...] = ()
    """Some of T1, T2, T3, T4; without any: all, or T2 and T4 for the quick grid."""
    seeds: tuple[str, ...] = ()
    """Numbers and ranges, such as 1-3 5; without any: 1-5, or 1 for the quick grid."""
    size: str | None = None
    """Another model size, such as d128-n16 (d_model, d_state)."""
    options: tuple[str, ...] = ()
    """Options of the mixers as name=number, such as d_conv=4 for gla."""
    decay_all: bool = True
    """Weight decay on every parameter, biases and norms too; without: on matrices alone."""
    head: Literal["linear", "hidden"] = "linear"
    """The classifier's last layer, or that after a hidden one of d_model units."""
    epochs: int | None = None
    """Instead of the task's own number of epochs."""
    epochs_factor: int = 1
    """Times as many epochs."""
    sequences: int | None = None
    """Instead of the task's own number of training sequences."""
    quick: bool = False
    """Small models and tasks for two CPU cores; where none are named naju, coupled and mamba2 on T2 and T4."""
    grid: GridOptions = field(default_factory=GridOptions)

    def cells(self) -> list[DiagnosticRun]:
        """In the order in which they are filled."""
        protocol = QUICK if self.quick else FULL
        mixers = self.mixers or (tuple(protocol.settings) if self.quick else SUITE)
        check_names("mixers", mixers, MIXERS)
        tasks = self.tasks or protocol.usual
        check_names("tasks", tasks, protocol.budgets)
        seeds = parse_seeds(self.seeds or (("1",) if self.quick else ("1-5",)))
        device, changes = self.grid.chosen_device(), self.changes()
        cells = [
            diagnostic_run(protocol, *cell, device=device, changes=changes) for cell in in_order(mixers, tasks, seeds)
        ]
        if self.options or self.size:
            check_options(cell.model for cell in cells)
        if not self.decay_all:
            return [_on_matrices(cell) for cell in cells]
        if not self.mixers and not self.quick and changes == UNCHANGED:
            longer = Changes(epochs_factor=3)
            cells += [
                diagnostic_run(protocol, *cell, device=device, changes=longer)
                for cell in in_order(("transformer",), tasks, seeds)
            ]
        return cells

    def changes(self) -> Changes:
        return Changes(
            size=self.size,
            epochs=self.epochs,
            epochs_factor=self.epochs_factor,
            sequences=self.sequences,
            head=self.head,
            mixer_options=parse_options(self.options),
        )


def _on_matrices(run: DiagnosticRun) -> DiagnosticRun:
    """The same with weight decay on matrices alone, and a mark of that in its name."""
    marks = [mark for mark in (run.variant, MATRIX_DECAY) if mark != "default"]
    return replace(run, variant="-".join(marks), training=replace(run.training, decay_all=False))


class StoredCell(Cell, Protocol):
    """A cell of a grid with its config."""

    @property
    def device(self) -> str: ...

    def to_json(self) -> dict[str, Any]: ...


class GridCommand(Protocol):
    """The options of a command that fills a grid."""

    @property
    def grid(self) -> GridOptions: ...

    def cells(self) -> Sequence[StoredCell]: ...


@dataclass(frozen=True)
class Experiment:
    """How the runs of one command are trained, in which part `name` of the run store they live, and how its results are
    shown; the cells come from its options."""

    command: str
    name: str
    train: Callable[..., dict[str, Any]]
    tables: Callable[[Sequence[Mapping[str, Any]]], str]
    describe: Callable[[dict[str, Any]], str]
    prepare: Callable[[Any], None] = lambda options: None

    def shows(self, result: Mapping[str, Any]) -> bool:
        """Whether it is a result of this experiment, and whole."""
        try:
            self.tables([result])
            self.describe(dict(result))
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError):
            return False
        return True


def _train_diagnostic(runs: Path, run: DiagnosticRun, reporter: Reporter) -> dict[str, Any]:
    return run_diagnostic(run, RunStore(runs).folder(EXPERIMENT, run.name), reporter)


def _train_mqar(runs: Path, run: MqarRun, reporter: Reporter) -> dict[str, Any]:
    return run_mqar(run, RunStore(runs).folder(MQAR, run.name), reporter)


def _train_lra(runs: Path, run: LraRun, reporter: Reporter) -> dict[str, Any]:
    return run_lra(run, RunStore(runs).folder(LRA, run.name), reporter)


def _train_wikitext(runs: Path, run: WikitextRun, reporter: Reporter) -> dict[str, Any]:
    return run_wikitext(run, RunStore(runs).folder(run.part, run.name), reporter)


def _language(
    command: str, options: type[LanguageGrid], tables: Callable[[Sequence[Mapping[str, Any]]], str]
) -> Experiment:
    return Experiment(command, options.part, _train_wikitext, tables, describe_wikitext, options.prepare)


def describe_accuracy(result: Mapping[str, Any]) -> str:
    """A result in one line."""
    told = " ".join(f"{part}: {cell['all']:.3f}" for part, cell in result["accuracy"].items())
    grown = " ".join(f"{length}: {cell['all']:.3f}" for length, cell in result.get("growing", {}).items())
    told = result.get("diverged") or told
    return f"{told}{f' | growing {grown}' if grown else ''} | {result['seconds']:.0f} s"


EXPERIMENTS: Mapping[type[Any], Experiment] = {
    Diagnostics: Experiment("diagnostics", EXPERIMENT, _train_diagnostic, tables, describe_accuracy),
    **{
        sweep: Experiment(command, EXPERIMENT, _train_diagnostic, partial(told_sweep, sweep), describe_accuracy)
        for command, sweep in SWEEPS.items()
    },
    Mqar: Experiment("mqar", MQAR, _train_mqar, told_mqar, describe_accuracy),
    Lra: Experiment("lra", LRA, _train_lra, told_lra, describe_lra, Lra.prepare),
    WikitextContext: _language("wikitext-context", WikitextContext, told_perplexities),
    WikitextWidth: _language("wikitext-width", WikitextWidth, told_perplexities),
    LanguageGateRank: _language("gate-rank", LanguageGateRank, told_perplexities),
    LrPilot: _language("lr-pilot", LrPilot, told_pilots),
    WikitextEfficiency: _language("wikitext-efficiency", WikitextEfficiency, told_costs),
}


def experiment_of(result: Mapping[str, Any]) -> Experiment:
    """Knows how to show it."""
    known = [one for one in EXPERIMENTS.values() if one.name == result["experiment"]]
    if not known:
        raise ValueError(f"no experiment is called {result['experiment']!r}")
    return known[0]


def tables_of(result: Mapping[str, Any]) -> str:
    """One result as its experiment shows it."""
    return experiment_of(result).tables([result])


def reproduce(options: GridCommand) -> int:
    """Fill a grid, here or by a cluster, and print its tables. The exit code is 0 if all cells are finished or
    submitted, 1 if some are not, 128 + n after signal n."""
    options = _in_our_names(options)
    experiment, grid = EXPERIMENTS[type(options)], options.grid
    results = Results(RunStore(grid.runs), experiment.name, grid.results, experiment.shows)
    if grid.on == "slurm" and not grid.plan:
        return _submit(options, experiment, results)
    cells = options.cells()
    if grid.plan:
        print(_plan(cells, results))
        return 0
    for cell in cells:
        results.collect(cell.name)
        _warn_of_another_config(cell, results.get(cell.name))
    missing = _missing(cells, results)
    print(f"{_finished_of(cells, missing)}; {len(missing)} to do on {cells[0].device}.")
    for cell in missing:
        _check_unfinished(cell, results)
    if missing:
        for folder in filter(None, (grid.runs, grid.results)):
            check_writable(folder)
        experiment.prepare(options)
    outcomes, signals = _fill(options, experiment, results, missing)
    found = [result for cell in options.cells() if (result := results.get(cell.name)) is not None]
    shown = shlex.quote(str(grid.results or grid.runs))
    print(f"\n{experiment.tables(found)}\n\n`naju report {shown}` makes a page of what is finished.")
    return _verdict(outcomes, signals)


def _in_our_names(options: GridCommand) -> GridCommand:
    """With the paper's xLSTM, where it is asked for, by its name here."""
    mixers: tuple[str, ...] = getattr(options, "mixers", ())
    named = tuple(PAPER_NAMES.get(mixer, mixer) for mixer in mixers)
    return options if named == mixers else replace(options, mixers=named)  # type: ignore[type-var]


def _fill(
    options: GridCommand, experiment: Experiment, results: Results, missing: Sequence[StoredCell]
) -> tuple[list[Outcome], Signals]:
    """Try every cell once, also those that are asked for when others have finished."""
    grid, outcomes = options.grid, list[Outcome]()

    def finish(name: str, result: dict[str, Any]) -> str:
        results.collect(name)
        return experiment.describe(result)

    with Signals() as signals, side_by_side(missing[0].device if missing else "cpu", grid.chosen_jobs()):
        while missing and signals.received is None:
            train = partial(experiment.train, grid.runs)
            outcomes += Grid(train, grid.chosen_jobs(), finish).fill(missing, signals)
            missing = _missing(options.cells(), results, tried=outcomes)
    return outcomes, signals


def _missing(cells: Sequence[StoredCell], results: Results, tried: Sequence[Outcome] = ()) -> list[StoredCell]:
    """Without a result, and not among those tried."""
    names = {outcome.name for outcome in tried}
    return [cell for cell in cells if cell.name not in names and results.get(cell.name) is None]


def _submit(options: GridCommand, experiment: Experiment, results: Results) -> int:
    """The cells are made here once, so that what is wrong with the options is said at once and not in a log; this
    machine need not have the device."""
    grid = options.grid
    here = replace(options, grid=replace(grid, device="cpu"))  # type: ignore[type-var]
    cells = here.cells()
    missing = _missing(cells, results)
    print(f"{_finished_of(cells, missing)}.")
    if not missing:
        return 0
    experiment.prepare(here)
    gpu = grid.device != "cpu"
    filled = replace(
        grid, on="local", device="cuda" if gpu else "cpu", jobs=grid.jobs or (1 if gpu else grid.cluster.cpus)
    )
    work = partial(reproduce, replace(options, grid=filled))  # type: ignore[type-var]
    jobs = submit(work, experiment.command, grid.cluster, grid.runs, cells=len(missing), gpu=gpu)
    print(
        f"job {jobs[0].job_id.split('_')[0]}: {len(jobs)} tasks will fill {len(missing)} cells; logs are in "
        f"{grid.runs / LOGS}, and the same command with --plan says where the cells stand"
    )
    return 0


def _finished_of(cells: Sequence[StoredCell], missing: Sequence[StoredCell]) -> str:
    return f"{len(cells) - len(missing)} of {len(cells)} cells are finished"


def _warn_of_another_config(cell: StoredCell, result: Mapping[str, Any] | None) -> None:
    """A result counts by its name; where the protocol has changed since, the reader has to know."""
    wanted, own = cell.to_json(), {} if result is None else result.get("config", {})
    differs = sorted(key for key in {*wanted, *own} - {"device", "bf16"} if wanted.get(key) != own.get(key))
    if result is not None and differs:
        print(f"{cell.name} counts as finished, but has another {', '.join(differs)} than this grid")


def _check_unfinished(cell: StoredCell, results: Results) -> None:
    """A run that says it is finished would not be trained; a copy is written anew."""
    folder = results.store.folder(results.experiment, cell.name)
    if folder.result() is not None:
        raise ValueError(
            f"{folder.path / RESULT} is damaged: it holds no result of {cell.name}; remove it, and the run is examined "
            "again"
        )
    if results.copies is not None and (copy := results.copies / f"{cell.name}.json").exists():
        print(f"{copy} is damaged and counts as missing: it holds no result of {cell.name}", file=sys.stderr)


def _verdict(outcomes: Sequence[Outcome], signals: Signals) -> int:
    """Say on stderr what is not finished and why."""
    open_cells = [outcome for outcome in outcomes if outcome.kind != "done"]
    for outcome in open_cells:
        if outcome.kind in ("failed", "died", "busy"):
            print(f"{outcome.name} {outcome.kind}: {outcome.text}", file=sys.stderr)
    if signals.received is not None:
        print(
            f"stopped by {signals.received.name}; {len(open_cells)} of {len(outcomes)} cells are open, what they "
            "learned is saved, and the same command goes on from there",
            file=sys.stderr,
        )
        return 128 + signals.received
    return 1 if open_cells else 0


def _plan(cells: Sequence[StoredCell], results: Results) -> str:
    rows = [["", "cell", "steps", "status"]]
    for place, cell in enumerate(cells, 1):
        folder = results.store.folder(results.experiment, cell.name)
        begun = folder.status() if folder.path.exists() else "not begun"
        rows.append([str(place), cell.name, str(cell.steps), "finished" if results.get(cell.name) else begun])
    return aligned(rows)
