"""The paper's sweeps over Naju's initialisation and over sizes, on T2 and T4.

Their cells are runs of the diagnostic suite and live among its runs: a setting that two tables share, or that is the
suite's own, is trained once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, NamedTuple

from naju.lab.comparison import Comparison
from naju.lab.diagnostic_run import DiagnosticRun
from naju.lab.diagnostics import FULL, QUICK, SUCCESS, Changes, Protocol, aligned, diagnostic_run
from naju.lab.options import GridOptions, check_names, parse_seeds
from naju.lab.paper import mean_std, paper_tables
from naju.mixers import MIXERS

TASKS = ("T4", "T2")
PAPER_SEEDS = 5
# The quick protocol's width over the full one's; a gate's rank shrinks with it.
QUICK_SHARE = QUICK.d_model / FULL.d_model
DEFAULTS = {"f_bias": 5, "i_bias": -2}


@dataclass(frozen=True)
class Setting:
    """One row of a sweep: a model, what it has otherwise than by default, and the paper's row about it."""

    mixer: str
    d_model: int
    d_state: int
    options: Mapping[str, float] = field(default_factory=dict)
    paper: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        options = "".join(f" {name} {value:g}" for name, value in self.options.items())
        return f"{self.mixer} d{self.d_model} N{self.d_state}{options}"

    def changes(self, protocol: Protocol) -> Changes:
        """From a protocol, none where it has this very setting."""
        usual = {"d_model": protocol.d_model, **protocol.settings.get(self.mixer, {})}
        d_state = usual.get("d_state", inspect.signature(MIXERS[self.mixer]).parameters["d_state"].default)
        is_usual = (usual["d_model"], d_state) == (self.d_model, self.d_state)
        options = {name: value for name, value in self.options.items() if DEFAULTS.get(name) != value}
        return Changes(size=None if is_usual else f"d{self.d_model}-n{self.d_state}", mixer_options=options)

    def run(self, protocol: Protocol, task: str, seed: int, device: str) -> DiagnosticRun:
        return diagnostic_run(protocol, self.mixer, task, seed, device=device, changes=self.changes(protocol))

    def quick(self) -> Setting:
        """For the quick protocol, and apart from the paper's row."""
        options = {name: v * QUICK_SHARE if name == "gate_rank" else v for name, v in self.options.items()}
        options = {name: int(v) if name == "gate_rank" else v for name, v in options.items()}
        return Setting(self.mixer, round(self.d_model * QUICK_SHARE), self.d_state, options)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Rows of settings, each learned on T2 and T4 with every seed."""

    seeds: tuple[str, ...] = ()
    """Numbers and ranges, such as 1-3 5; without any: 1-5, or 1 for the quick grid."""
    tasks: tuple[str, ...] = TASKS
    """T4, T2 or both, in the order in which they are filled; without any: both."""
    states: tuple[int, ...] = ()
    """Only rows with one of these sizes of the state, such as 64; without any: all."""
    quick: bool = False
    """The narrow rows at a quarter of the width, with the small tasks of the quick diagnostics: minutes on a CPU."""
    grid: GridOptions = field(default_factory=GridOptions)

    settings: ClassVar[tuple[Setting, ...]]

    @classmethod
    def rows(cls, protocol: Protocol) -> tuple[Setting, ...]:
        if protocol is not QUICK:
            return cls.settings
        return tuple(setting.quick() for setting in cls.settings if setting.d_model == FULL.d_model)

    def cells(self) -> list[DiagnosticRun]:
        """In the order in which they are filled: a seed of everything before the next."""
        tasks = self.tasks or TASKS
        check_names("tasks", tasks, TASKS)
        protocol = QUICK if self.quick else FULL
        seeds = parse_seeds(self.seeds or (("1",) if self.quick else ("1-5",)))
        device, rows = self.grid.chosen_device(), self.rows(protocol)
        check_names("states", self.states, dict.fromkeys(row.d_state for row in rows))
        rows = tuple(row for row in rows if not self.states or row.d_state in self.states)
        return [row.run(protocol, task, seed, device) for seed in seeds for task in tasks for row in rows]


def _settings(table: str, options: Callable[[Mapping[str, Any]], dict[str, float]]) -> tuple[Setting, ...]:
    rows = paper_tables()[table].rows
    return tuple(Setting(row["model"], row["d_model"], row["d_state"], options(row), row) for row in rows)


def _readout(row: Mapping[str, Any]) -> dict[str, float]:
    return {"f_bias": row["b_f"], **({"alpha": 1.0} if row["alpha"] == "1" else {})}


class BiasF(Sweep):
    """The forget gate's bias at initialisation, 4, 5 and 6, with two sizes of the state."""

    settings = _settings("tab:bf_sweep", lambda row: {"f_bias": row["b_f"]})


class BiasI(Sweep):
    """The write gate's bias at initialisation, from -1 to -4."""

    settings = _settings("tab:bi_sweep", lambda row: {"i_bias": row["b_i"]})


class Readout(Sweep):
    """The readout's gain, 1 or 1/sqrt(d_state), with two sizes of the state and two forget biases."""

    settings = _settings("tab:norm_state", _readout)


class MambaFactorial(Sweep):
    """Mamba at two widths and three sizes of the state, and Naju at four of these sizes."""

    settings = _settings("tab:mamba_factorial", lambda row: {})


class GateRank(Sweep):
    """Naju's gate projections in full, of rank 64 and of rank 32, on T2 and T4. The paper has them as language models
    only, which `naju reproduce gate-rank` trains."""

    settings = (Setting("naju", 128, 64), *(Setting("naju", 128, 64, {"gate_rank": rank}) for rank in (64, 32)))


SWEEPS: Mapping[str, type[Sweep]] = {
    "bias-f": BiasF,
    "bias-i": BiasI,
    "readout": Readout,
    "mamba-factorial": MambaFactorial,
    "gate-rank-recall": GateRank,
}


def is_of_sweep(mixer: str, variant: str) -> bool:
    """Whether runs of this name are a row of a sweep by its options, and not by its size alone."""
    return (mixer, variant) in _swept()


@cache
def _swept() -> frozenset[tuple[str, str]]:
    return frozenset(
        (row.mixer, row.run(protocol, TASKS[0], 1, "cpu").variant)
        for protocol in (FULL, QUICK)
        for sweep in SWEEPS.values()
        for row in sweep.rows(protocol)
        if row.changes(protocol).mixer_options
    )


class SweepRow(NamedTuple):
    """A setting's three numbers, each over its seeds, and in how many of T4's it succeeded."""

    setting: Setting
    numbers: tuple[Comparison, ...]  # in the order of COLUMNS
    passed: int
    seeds: int

    @property
    def told_passed(self) -> str:
        return f"{self.passed}/{self.seeds}" if self.seeds else "-"

    @property
    def told_paper_passed(self) -> str:
        passed = self.setting.paper.get("successful_seeds")
        return "-" if passed is None else f"{passed}/{self.setting.paper['n_seeds']}"


class Column(NamedTuple):
    """A task at a multiple of the training length, and where the paper's tables have it."""

    task: str
    times: int
    paper: str


COLUMNS = (Column("T2", 4, "t2_2048"), Column("T4", 1, "t4_512"), Column("T4", 4, "t4_2048"))


class SweepTable(NamedTuple):
    """Of one protocol: the full one or the quick one."""

    protocol: Protocol
    rows: tuple[SweepRow, ...]

    @property
    def headings(self) -> tuple[str, ...]:
        return tuple(f"{column.task}@{column.times * self.protocol.length}" for column in COLUMNS)


def sweep_tables(sweep: type[Sweep], results: Sequence[Mapping[str, Any]]) -> list[SweepTable]:
    """The full protocol's table, and the quick one's where it has results."""
    found = [SweepTable(protocol, _rows(sweep.rows(protocol), protocol, results)) for protocol in (FULL, QUICK)]
    return [table for table in found if table.protocol is FULL or any(_has_results(row) for row in table.rows)]


def told_sweep(sweep: type[Sweep], results: Sequence[Mapping[str, Any]]) -> str:
    """As text: mean ± sample standard deviation (worst seed), then the paper's mean ± deviation (worst seed)."""
    shown = [table for table in sweep_tables(sweep, results) if any(_has_results(row) for row in table.rows)]
    return "\n\n".join(_told(table) for table in shown) or "no results yet"


def _told(table: SweepTable) -> str:
    with_paper = any(row.setting.paper for row in table.rows)
    own = [*table.headings, f"T4 >{SUCCESS}"]
    lines = [["", *own, *(f"paper {name}" for name in own if with_paper)]]
    for row in table.rows:
        ours = [*map(str, row.numbers), row.told_passed]
        paper = [*(paper_cell(row, place) for place in range(len(COLUMNS))), row.told_paper_passed]
        lines.append([row.setting.label, *ours, *(paper if with_paper else [])])
    return aligned(lines)


def paper_cell(row: SweepRow, place: int) -> str:
    """The paper's number in words, with its worst seed where that is printed."""
    worst = (row.setting.paper.get(COLUMNS[place].paper) or {}).get("min")
    told = row.numbers[place].told_paper()
    return told if worst is None else f"{told} ({worst:.2f})"


def _rows(
    settings: Sequence[Setting], protocol: Protocol, results: Sequence[Mapping[str, Any]]
) -> tuple[SweepRow, ...]:
    return tuple(_row(setting, protocol, results) for setting in settings)


def _row(setting: Setting, protocol: Protocol, results: Sequence[Mapping[str, Any]]) -> SweepRow:
    variant = setting.run(protocol, "T4", 0, "cpu").variant
    own = [result for result in results if (result["mixer"], result["variant"]) == (setting.mixer, variant)]
    numbers = tuple(
        Comparison(_values(own, column, protocol), mean_std(setting.paper.get(column.paper)), PAPER_SEEDS)
        for column in COLUMNS
    )
    validations = [result["best_validation"] for result in own if result["task"] == "T4"]
    return SweepRow(setting, numbers, sum(share > SUCCESS for share in validations), len(validations))


def _values(results: Sequence[Mapping[str, Any]], column: Column, protocol: Protocol) -> tuple[float, ...]:
    length = str(column.times * protocol.length)
    measured = (result["accuracy"].get(length) or {} for result in results if result["task"] == column.task)
    return tuple(cell["all"] for cell in measured if cell.get("all") is not None)


def _has_results(row: SweepRow) -> bool:
    return any(number.values for number in row.numbers)
