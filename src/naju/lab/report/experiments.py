"""A page for each experiment beside the diagnostic suite: its tables with the paper's, its budget, what is missing."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from naju.lab.ablations import PAPER_SEEDS, SWEEPS, Sweep, SweepRow, SweepTable, paper_cell, sweep_tables
from naju.lab.comparison import Comparison, told_seeds
from naju.lab.diagnostic_run import EXPERIMENT
from naju.lab.diagnostics import FULL, SUCCESS
from naju.lab.lra import CHOICES, COMPARED, Lra, LraCell, departures, lra_rows, model_label
from naju.lab.lra_run import EXPERIMENT as LRA
from naju.lab.lra_run import OUT_OF_MEMORY
from naju.lab.mqar import EPOCHS, RATES, Mqar, RecallRow, RecallTable, recall_tables
from naju.lab.mqar import FULL as FULL_MQAR
from naju.lab.mqar_run import EXPERIMENT as MQAR
from naju.lab.pages import Chart
from naju.lab.paper import paper_tables
from naju.lab.report.charts import run_curves
from naju.lab.report.gaps import deviations
from naju.lab.report.results import Reading, Result, Written, curve_of, group_models
from naju.lab.throughput import RIVAL, Pair, SpeedTable, speed_tables
from naju.tasks.lra import LRA as LRA_TASKS

# The table of the paper that each page is about, or a title where it has none.
TITLES = {
    "mqar": "tab:mqar",
    "bias-f": "tab:bf_sweep",
    "bias-i": "tab:bi_sweep",
    "readout": "tab:norm_state",
    "mamba-factorial": "tab:mamba_factorial",
    "gate-rank-recall": "Low-rank gate projections in Naju on T2 and T4",
    "lra": "tab:lra",
    "throughput": "tab:throughput",
}
INTERVAL = (
    "In brackets after a difference: its 95 % interval over seeds, by Student's t with the smaller number of seeds "
    "less one as its degrees of freedom, and wider by half of the paper's last digit. A single seed of ours has none. "
    "Deviations are sample standard deviations; the paper does not always say which it prints."
)


class Cell(NamedTuple):
    """Lines of text, the first one large."""

    lines: tuple[str, ...]
    shade: str = ""


class Row(NamedTuple):
    label: str
    cells: tuple[Cell, ...]


class Table(NamedTuple):
    title: str
    headings: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Page:
    """`standing` says in words how much is there."""

    command: str
    title: str
    about: str
    standing: str
    tables: tuple[Table, ...]
    notes: tuple[str, ...]
    charts: tuple[Chart, ...] = ()
    legend: tuple[tuple[str, int], ...] = ()  # labels with their styles

    @property
    def file(self) -> str:
        return f"{self.command}.html"


def experiment_pages(reading: Reading, benchmarks: Path) -> list[Page]:
    sweeps = [_sweep_page(command, sweep, reading) for command, sweep in SWEEPS.items()]
    return [_mqar_page(reading), *sweeps, _lra_page(reading), _throughput_page(benchmarks)]


def _sweep_page(command: str, sweep: type[Sweep], reading: Reading) -> Page:
    tables = sweep_tables(sweep, reading.of(EXPERIMENT))
    wanted = {(setting.mixer, setting.run(FULL, "T4", 0, "cpu").variant) for setting in sweep.settings}
    own = [
        result for result in reading.results if (result.mixer, result.variant) in wanted and result.task in ("T2", "T4")
    ]
    cells = 2 * PAPER_SEEDS * len(sweep.settings)
    notes = (*_sweep_notes(own, cells), INTERVAL)
    standing = f"{len(own)} of {cells} runs"
    return Page(command, page_title(command), doc_of(sweep), standing, tuple(map(_sweep_table, tables)), notes)


def _sweep_notes(own: Sequence[Result], cells: int) -> list[str]:
    missing = f"{cells - len(own)} of {cells} runs with {PAPER_SEEDS} seeds on T2 and T4 are missing."
    differs = [
        f"{one.setting}: {one.paper} in the paper; here {'; '.join(one.here)}." for one in deviations(group_models(own))
    ]
    return [missing, *differs]


def _sweep_table(table: SweepTable) -> Table:
    title = "At the suite's budget" if table.protocol is FULL else "Quick: small tasks, beside nothing of the paper's"
    headings = ("seeds", *table.headings, f"T4 seeds above {SUCCESS}")
    return Table(title, headings, tuple(map(_sweep_row, table.rows)))


def _sweep_row(row: SweepRow) -> Row:
    paper = row.told_paper_passed
    passed = Cell((row.told_passed, *([f"paper {paper}"] if paper != "-" else [])))
    seeds = max(len(number.values) for number in row.numbers)
    numbers = [_compared(number, told_paper=paper_cell(row, place)) for place, number in enumerate(row.numbers)]
    return Row(row.setting.label, (Cell((str(seeds),)), *numbers, passed))


def _mqar_page(reading: Reading) -> Page:
    results, papers = reading.of(MQAR), {cell.name for cell in Mqar().cells()}
    tables, cells = recall_tables(results), len(papers)
    finished = sum(f"{one['mixer']}-{one['variant']}-s{one['seed']}" in papers for one in results)
    notes = [
        f"The protocol has {EPOCHS} epochs of {sum(s.examples for s in FULL_MQAR.data.training):,} sequences and "
        f"{len(RATES)} learning rates, one seed: {cells} runs. Two mixer blocks for every model, embeddings that "
        "begin with a deviation of 0.02 and mixers that begin as everywhere here, which the paper does not say; all "
        "batches are full, and their order is one random order in every epoch.",
        *(f"Reduced or changed here: {table.title}." for table in tables if not table.is_papers),
        *(note for table in tables for note in _rate_notes(table)),
        "A model's rate is the one with the best last validation, never the best test.",
        INTERVAL,
    ]
    standing = f"{finished} of {cells} runs at the paper's budget, {len(results)} in all"
    return Page("mqar", page_title("mqar"), doc_of(Mqar), standing, tuple(map(_recall_table, tables)), tuple(notes))


def _rate_notes(table: RecallTable) -> list[str]:
    fewer = [f"{row.contender.label} d{row.width} ({row.tried})" for row in table.rows if row.tried < len(RATES)]
    return [f"Fewer than {len(RATES)} rates finished ({table.title}): {', '.join(fewer)}."] if fewer else []


def _recall_table(table: RecallTable) -> Table:
    headings = ("width", "seeds", "rates", "best rate", "all slices", table.hardest)
    return Table(table.title[0].upper() + table.title[1:], headings, tuple(map(_recall_row, table.rows)))


def _recall_row(row: RecallRow) -> Row:
    rates = ", ".join(f"{rate:g}" for rate in dict.fromkeys(row.rates.values())) or "diverged"
    facts = (str(row.width), told_seeds(len(row.rates), row.diverged), str(row.tried), rates)
    numbers = (_compared(row.overall, 3), _compared(row.hardest, 3))
    return Row(row.contender.label, (*(Cell((fact,)) for fact in facts), *numbers))


def _lra_page(reading: Reading) -> Page:
    results, cells = reading.of(LRA), len(Lra().cells())
    rows = [
        Row(row.label, (*(_lra_cell(row.cells[task]) for task in LRA_TASKS), _average(row.average, row.paper_average)))
        for row in lra_rows(results)
    ]
    about = "Test accuracy of six bidirectional layers; published rows are the literature's, with other recipes."
    table = Table("Test accuracy", (*LRA_TASKS, "average"), tuple(rows))
    finished = sum(one["mixer"] in COMPARED and one["variant"] == "default" for one in results)
    standing = f"{finished} of {cells} runs at the paper's budget, {len(results)} in all"
    reduced = [f"Reduced or changed here: {one}." for one in departures(results)]
    notes = (*reduced, CHOICES, INTERVAL)
    return Page("lra", page_title("lra"), about, standing, (table,), notes, *_lra_charts(results))


def _lra_charts(results: Sequence[Written]) -> tuple[tuple[Chart, ...], tuple[tuple[str, int], ...]]:
    """Validation accuracies, a chart a task, and the labels of all models that are in them with their styles."""
    styles = {row.label: style for style, row in enumerate(lra_rows(results))}
    curves: dict[str, dict[tuple[str, int | str], Sequence[tuple[float, float]]]] = {task: {} for task in LRA_TASKS}
    for one in results:
        points = [(step, share) for step, _, share in curve_of(one.get("curve", [])) if share is not None]
        if points and one["task"] in curves:
            curves[one["task"]][model_label(one["mixer"], one["variant"]), str(one["seed"])] = points
    charts = [run_curves(f"{task}: validation accuracy", found, styles) for task, found in curves.items() if found]
    shown = {label for found in curves.values() for label, _ in found}
    return tuple(charts), tuple((label, style) for label, style in styles.items() if label in shown)


def _lra_cell(cell: LraCell) -> Cell:
    ours, *rest = (told := _compared(cell.comparison, 3)).lines
    rest += [f"paper {OUT_OF_MEMORY}"] if cell.paper_ran_out else []
    seeds = len(cell.comparison.values)
    if seeds == 0:
        return Cell((OUT_OF_MEMORY if cell.ran_out else ours, *rest), told.shade)
    return Cell((ours, f"{seeds} seed{'' if seeds == 1 else 's'}", *rest), told.shade)


def _average(ours: float | None, paper: float | None) -> Cell:
    own = "–" if ours is None else f"{ours:.3f}"
    return Cell((own, *([] if paper is None else [f"paper {paper:.3f}"])))


def _throughput_page(benchmarks: Path) -> Page:
    tables = speed_tables(benchmarks)
    pairs = [pair for table in tables for row in table.rows for pair in row.cells if pair.paper is not None]
    machines = sorted({machine for table in tables for machine in table.machines})
    about = f"Time and memory of a forward pass and of a training step. The small numbers are ratios to {RIVAL}'s."
    notes = (
        f"The paper's machine is one RTX 5090; ours: {', '.join(machines) or 'nothing measured yet'}. Ratios compare, "
        "milliseconds do not.",
        "The paper does not name Mamba's N in its forward table; its numbers fit N = 16 and stand beside ours with 16.",
    )
    standing = f"{sum(pair.ours is not None for pair in pairs)} of the paper's {len(pairs)} numbers"
    return Page("throughput", page_title("throughput"), about, standing, tuple(map(speed_table_of, tables)), notes)


def speed_table_of(table: SpeedTable) -> Table:
    rows = tuple(Row(row.label, tuple(map(_speed_cell, row.cells))) for row in table.rows)
    return Table(table.title, tuple(map(str, table.lengths)), rows)


def _speed_cell(pair: Pair) -> Cell:
    ours = _number(pair.ours, pair.our_ratio)
    return Cell((ours, *([] if pair.paper is None else [f"paper {_number(pair.paper, pair.paper_ratio)}"])))


def _number(value: float | None, ratio: float | None) -> str:
    if value is None:
        return "–"
    told = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return told if ratio is None else f"{told} ({ratio:.2f})"


def _compared(number: Comparison, digits: int = 2, told_paper: str | None = None) -> Cell:
    """`digits` are those that the paper prints; `told_paper` replaces what is told of its number."""
    if number.ours is None and number.paper is None:
        return Cell(("–",), "none")
    lines = ["–"] if number.ours is None else [_mean(number)]
    if number.ours is not None and len(number.values) > 1:
        lines.append(f"worst {number.ours.worst:.3f}")
    if number.paper is not None:
        lines.append(f"paper {told_paper or number.told_paper(digits)}")
    if number.difference is not None:
        lines.append(number.told_difference().replace("-", "−"))
    return Cell(tuple(lines), number.shade)


def _mean(number: Comparison) -> str:
    assert number.ours is not None
    std = "" if number.ours.std is None else f" ± {number.ours.std:.3f}"
    return f"{number.ours.mean:.3f}{std}"


def page_title(command: str) -> str:
    named = TITLES[command]
    return paper_tables()[named].title if named in paper_tables() else named


def doc_of(options: type) -> str:
    return " ".join((inspect.getdoc(options) or "").split())
