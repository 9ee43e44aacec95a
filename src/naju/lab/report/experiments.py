"""A page for each experiment beside the diagnostic suite: its tables with the paper's, its budget, what is missing."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from naju.bench.forward import ForwardBench
from naju.bench.training import TrainingBench
from naju.lab.ablations import (
    COLUMNS,
    PAPER_SEEDS,
    SWEEPS,
    TASKS,
    Sweep,
    SweepRow,
    SweepTable,
    paper_cell,
    sweep_tables,
)
from naju.lab.comparison import Comparison, told_seeds
from naju.lab.diagnostic_run import EXPERIMENT
from naju.lab.diagnostics import FULL, QUICK, SUCCESS, Protocol
from naju.lab.lra import CHOICES, COMPARED, Lra, LraCell, departures, lra_rows, model_label
from naju.lab.lra_run import EXPERIMENT as LRA
from naju.lab.lra_run import OUT_OF_MEMORY
from naju.lab.mqar import EPOCHS, RATES, Mqar
from naju.lab.mqar import FULL as FULL_MQAR
from naju.lab.mqar_run import EXPERIMENT as MQAR
from naju.lab.mqar_run import MqarRun
from naju.lab.mqar_tables import RecallRow, RecallTable, papers_table, recall_tables
from naju.lab.pages import Chart
from naju.lab.paper import paper_tables
from naju.lab.report.charts import run_curves
from naju.lab.report.gaps import deviations
from naju.lab.report.readings import CELLS, INTERVAL, LRA_READING, RECALL_READING, SPEED_READING, SWEEP_READING
from naju.lab.report.results import Reading, Result, Written, curve_of, group_models
from naju.lab.throughput import RAN_OUT, Pair, SpeedTable, speed_tables
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
    "throughput": "Time and memory of a forward pass and of a training step",
}


class Cell(NamedTuple):
    """Lines of text, the first one large."""

    lines: tuple[str, ...]
    shade: str = ""

    @property
    def is_empty(self) -> bool:
        return self.lines[0] in ("-", "–")


class Row(NamedTuple):
    label: str
    cells: tuple[Cell, ...]


class Table(NamedTuple):
    """`note` stands below it."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[Row, ...]
    note: str = ""


@dataclass(frozen=True)
class Page:
    """`standing` says in words how much is there, `reading` how to read it."""

    command: str
    title: str
    about: str
    standing: str
    tables: tuple[Table, ...]
    notes: tuple[str, ...]
    charts: tuple[Chart, ...] = ()
    legend: tuple[tuple[str, int], ...] = ()  # labels with their styles
    reading: tuple[str, ...] = ()

    @property
    def is_coloured(self) -> bool:
        shades = {cell.shade for table in self.tables for row in table.rows for cell in row.cells}
        return bool(shades - {"", "none"})

    @property
    def file(self) -> str:
        return f"{self.command}.html"


def experiment_pages(reading: Reading, benchmarks: Path) -> list[Page]:
    sweeps = [_sweep_page(command, sweep, reading) for command, sweep in SWEEPS.items()]
    return [_mqar_page(reading), *sweeps, _lra_page(reading), _throughput_page(benchmarks)]


def _sweep_page(command: str, sweep: type[Sweep], reading: Reading) -> Page:
    tables = sweep_tables(sweep, reading.of(EXPERIMENT))
    own, quick = (_of_sweep(sweep, protocol, reading.results) for protocol in (FULL, QUICK))
    cells = 2 * PAPER_SEEDS * len(sweep.settings)
    notes = (*_sweep_notes(own, cells), *_told_precision([*own, *quick]), INTERVAL)
    standing = f"{len(own)} of {cells} runs{f', {len(quick)} quick' if quick else ''}"
    made = tuple(map(_sweep_table, tables))
    return Page(command, page_title(command), doc_of(sweep), standing, made, notes, reading=SWEEP_READING)


def _of_sweep(sweep: type[Sweep], protocol: Protocol, results: Sequence[Result]) -> list[Result]:
    wanted = {(setting.mixer, setting.run(protocol, "T4", 0, "cpu").variant) for setting in sweep.rows(protocol)}
    return [one for one in results if (one.mixer, one.variant) in wanted and one.task in ("T2", "T4")]


def _sweep_notes(own: Sequence[Result], cells: int) -> list[str]:
    missing = f"{cells - len(own)} of {cells} runs with {PAPER_SEEDS} seeds on T2 and T4 are missing."
    differs = [
        f"{one.setting}: {one.paper} in the paper; here {'; '.join(one.here)}." for one in deviations(group_models(own))
    ]
    open_choice = "The paper does not say how many training sequences it used."
    return [missing, _told_budget(FULL), open_choice, *(line[0].upper() + line[1:] for line in differs)]


def _told_budget(protocol: Protocol) -> str:
    told = (
        f"{task} on {b.sequences:,} sequences for {b.epochs} epochs"
        for task in TASKS
        for b in (protocol.budgets[task],)
    )
    return f"Trained at length {protocol.length}, {', '.join(told)}; the same for every row."


def _told_precision(runs: Sequence[Result]) -> list[str]:
    """The paper's were in bfloat16."""
    lower = sum(bool(run.config.get("bf16")) for run in runs)
    others = f", {len(runs) - lower} in float32" if lower < len(runs) else ""
    return [f"{lower} of these runs computed under bfloat16 autocast, as the paper's did{others}."] if runs else []


def _sweep_table(table: SweepTable) -> Table:
    title = "The full protocol"
    if table.protocol is not FULL:
        title = (
            f"Quick runs of narrow models on small tasks at length {table.protocol.length}: not the paper's protocol"
        )
    headings = ("seeds", *table.headings, f"T4 seeds above {SUCCESS}")
    return Table(title, headings, tuple(map(_sweep_row, table.rows)))


def _sweep_row(row: SweepRow) -> Row:
    paper = row.told_paper_passed
    passed = Cell((row.told_passed, *([f"paper {paper}"] if paper != "-" else [])))
    counts = {column.task: len(number.values) for column, number in zip(COLUMNS, row.numbers, strict=True)}
    seeds = ", ".join(f"{count} {task}" for task, count in counts.items())
    if len(set(counts.values())) == 1:
        seeds = str(counts["T4"])
    numbers = [_compared(number, told_paper=paper_cell(row, place)) for place, number in enumerate(row.numbers)]
    return Row(row.setting.label, (Cell((seeds,)), *numbers, passed))


def _mqar_page(reading: Reading) -> Page:
    results, papers = reading.of(MQAR), {cell.name: cell for cell in Mqar().cells()}
    tables, cells = recall_tables(results), len(papers)
    finished = sum(f"{one['mixer']}-{one['variant']}-s{one['seed']}" in papers for one in results)
    notes = [
        f"The protocol has {EPOCHS} epochs of {sum(s.examples for s in FULL_MQAR.data.training):,} sequences and "
        f"{len(RATES)} learning rates, one seed: {cells} runs. Two mixer blocks for every model, embeddings that "
        "begin with a deviation of 0.02 and mixers that begin as everywhere here, which the paper does not say; all "
        "batches are full, and their order is one random order in every epoch.",
        _told_decay(papers.values()),
        *(
            f"Reduced or changed ({table.title}): {', '.join(table.departures)}."
            for table in tables
            if table.departures
        ),
        *(note for table in tables for note in _rate_notes(table)),
        "A model's rate is the one with the best last validation, never the best test.",
        INTERVAL,
    ]
    standing = f"{finished} of {cells} runs at the paper's budget, {len(results)} in all"
    shown = tuple(_shown_recall(tables))
    return Page("mqar", page_title("mqar"), doc_of(Mqar), standing, shown, tuple(notes), reading=RECALL_READING)


def _told_decay(cells: Iterable[MqarRun]) -> str:
    """What decays, and how strongly at each rate of the paper's protocol."""
    kept = {cell.training.lr: cell.kept for cell in cells}
    left = ", ".join(f"{5 * share:.2f} at {rate:g}" for rate, share in sorted(kept.items()))
    return (
        "Weight decay is 0.1 on every parameter, biases, norms and the gates' biases too, as in Zoology's code; the "
        "paper does not say what decays. Where nothing else moved it, a bias of 5 would end at this after "
        f"{EPOCHS} epochs, by learning rate: {left}. With `--no-decay-all` it is on matrices alone; such runs have "
        "tables of their own."
    )


def _shown_recall(tables: Sequence[RecallTable]) -> Iterator[Table]:
    """At the paper's budget all of its rows, and last where nothing of ours stands beside them."""
    papers = papers_table(tables)
    others = [table for table in tables if table.title != papers.title or table.slices != papers.slices]
    is_filled = any(row.tried for row in papers.rows)
    for table in [papers, *others] if is_filled else [*others, papers]:
        yield _recall_table(table)
        if any(row.tried for row in table.rows):
            yield _slice_table(table)


def _rate_notes(table: RecallTable) -> list[str]:
    fewer = [f"{row.contender.label} d{row.width} ({row.tried})" for row in table.rows if row.tried < len(RATES)]
    unequal = len({row.tried for row in table.rows}) > 1
    chances = " Models with more rates had better chances than those with fewer." if unequal else ""
    told = f"Fewer than {len(RATES)} rates finished ({table.title}): {', '.join(fewer)}.{chances}"
    return [told] if fewer else []


def _recall_table(table: RecallTable) -> Table:
    headings = ("width", "seeds", "rates tried", "best rate", "all slices", table.hardest)
    whose = ": the paper's protocol" if table.is_papers else ""
    title = f"{table.title[0].upper()}{table.title[1:]}{whose}"
    return Table(title, headings, tuple(map(_recall_row, table.rows)), table.note)


def _recall_row(row: RecallRow) -> Row:
    facts = (str(row.width), told_seeds(len(row.rates), row.diverged), str(row.tried), row.told_rates)
    numbers = (_compared(row.overall, 3), _compared(row.hardest, 3))
    return Row(row.contender.label, (*(Cell((fact,)) for fact in facts), *numbers))


def _slice_table(table: RecallTable) -> Table:
    rows = [
        Row(row.contender.label, (Cell((str(row.width),)), *(_compared(Comparison(one.values)) for one in row.slices)))
        for row in table.rows
        if row.tried
    ]
    return Table("The same slice by slice, ours", ("width", *table.slices), tuple(rows))


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
    return Page(
        "lra", page_title("lra"), about, standing, (table,), notes, *_lra_charts(results), reading=(LRA_READING, CELLS)
    )


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
    tables, forward, step = speed_tables(benchmarks), ForwardBench(), TrainingBench()
    pairs = [pair for table in tables for row in table.rows for pair in row.cells if pair.is_printed]
    machines = sorted({machine for table in tables for machine in table.machines})
    about = (
        "Ours, large, and the paper's below; a forward pass without gradients, and a training step of a language model."
    )
    notes = (
        f"The paper's machine is one RTX 5090; ours: {', '.join(machines) or 'nothing measured yet'}. Ratios compare, "
        "milliseconds do not. Several runs may stand in one table, the newest number of each kind.",
        f"Forward: batches of {forward.batch}, {forward.n_layers} layers. Training: {step.tokens:,} tokens a "
        f"micro-step, {step.n_layers} layers, a vocabulary of {step.vocab_size:,}; the paper updates weights after "
        f"every {step.micro_steps} of these, ours as the rows say. All in {forward.dtype}, with N = "
        f"{forward.d_state} where a model's N can be chosen.",
        "The paper does not name Mamba's N in its forward table; its numbers fit N = 16 and stand beside ours with 16.",
    )
    standing = f"{sum(pair.ours is not None for pair in pairs)} of the paper's {len(pairs)} numbers"
    made = tuple(map(speed_table_of, tables))
    return Page("throughput", page_title("throughput"), about, standing, made, notes, reading=(SPEED_READING,))


def speed_table_of(table: SpeedTable) -> Table:
    rows = tuple(Row(row.label, tuple(map(_speed_cell, row.cells))) for row in table.rows)
    return Table(table.title, tuple(map(str, table.lengths)), rows)


def _speed_cell(pair: Pair) -> Cell:
    ours = _number(pair.ours, pair.our_ratio)
    return Cell((ours, *([] if pair.paper is None else [f"paper {_number(pair.paper, pair.paper_ratio)}"])))


def _number(value: float | None, ratio: float | None) -> str:
    if value is None or value == RAN_OUT:
        return "–" if value is None else OUT_OF_MEMORY
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
