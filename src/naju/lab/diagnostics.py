"""The diagnostic suite: its protocol, the runs of a grid in the order in which it fills, and its tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, NamedTuple

from naju.lab.diagnostic_run import DiagnosticRun, Examination, ModelSettings
from naju.training import TrainConfig

SUITE = ("naju", "coupled", "mamba2", "gla", "mlstm", "mamba", "transformer", "hgrn", "retnet", "rwkv")
# A grid first gets this many seeds of each mixer, one where nothing is said, and the other seeds last.
FIRST_SEEDS = {"naju": 5, "mamba2": 2, "gla": 2, "mlstm": 2, "mamba": 2, "coupled": 2}
TASKS = ("T1", "T2", "T3", "T4")
CONTESTED = ("T2", "T4")
SUCCESS = 0.9
# The paper's main table has these two wider than the rest. The positions of the Transformer reach the longest test.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "mamba": {"d_model": 256, "d_state": 16},
    "transformer": {"d_model": 256, "max_length": 8192},
    "naju": {"d_state": 64},
    "coupled": {"d_state": 64},
    "mamba2": {"d_state": 64},
}


class Budget(NamedTuple):
    """How many different sequences, and how often each is seen."""

    sequences: int
    epochs: int


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What all mixers of a grid share; only `settings` name a mixer. `usual` are the tasks where none are asked for."""

    budgets: Mapping[str, Budget]
    usual: tuple[str, ...] = TASKS
    task_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: SETTINGS)
    d_model: int = 128
    n_layers: int = 4
    length: int = 512
    lr: float = 3e-4
    examination: Examination = field(default_factory=Examination)


# The paper leaves the number of sequences open; with fewer different ones every model memorises T2 and T4.
FULL = Protocol(
    budgets={
        "T1": Budget(10_000, 50),
        "T2": Budget(50_000, 30),
        "T3": Budget(10_000, 50),
        "T4": Budget(100_000, 15),
    }
)
SMALL = {"n_entities": 16, "n_values": 8}
# A few minutes on two CPU cores; the three mixers that it names have states of one size.
QUICK = Protocol(
    budgets={
        "T1": Budget(16_000, 3),
        "T2": Budget(16_000, 3),
        "T3": Budget(16_000, 1),
        "T4": Budget(16_000, 5),
    },
    usual=CONTESTED,
    task_options={
        "T1": {**SMALL, "min_facts": 4, "max_facts": 8},
        "T2": {**SMALL, "n_facts": 8},
        "T3": {**SMALL, "min_updates": 2, "max_updates": 4},
        "T4": {**SMALL, "n_events": 8, "min_updates": 2, "max_updates": 4},
    },
    settings={mixer: {"d_state": 64} for mixer in ("naju", "coupled", "mamba2")},
    d_model=32,
    n_layers=2,
    length=64,
    lr=5e-3,
    examination=Examination(test_lengths=(64, 128, 256), test_sequences=1000, validation_sequences=500),
)
QUICK_MARK = "quick"  # the names of its variants begin with it


def _numbers(option: float | Sequence[float]) -> Sequence[float]:
    return option if isinstance(option, list | tuple) else [option]  # type: ignore[list-item]


def _mark(name: str, option: float | Sequence[float]) -> str:
    return name + "to".join(f"{number:g}" for number in _numbers(option))


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Departures from a protocol; each leaves its mark in the name of the variant."""

    size: str | None = None
    epochs: int | None = None
    epochs_factor: int = 1
    sequences: int | None = None
    head: str = "linear"
    mixer_options: Mapping[str, float | Sequence[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.size is not None and re.fullmatch(r"d[1-9]\d*-n[1-9]\d*", self.size) is None:
            raise ValueError(f"size must look like d128-n16 (d_model, d_state), but is {self.size!r}")
        for name in ("epochs", "epochs_factor", "sequences"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be a positive integer, but is {value}")
        for name, option in self.mixer_options.items():
            if not all(isinstance(number, int | float) for number in _numbers(option)):
                raise ValueError(f"options must be numbers or lists of them, but {name} is {option!r}")
        if self.sequences is not None and self.sequences < TrainConfig.batch_size:
            raise ValueError(f"sequences must be at least a batch, {TrainConfig.batch_size}, but is {self.sequences}")

    @property
    def marks(self) -> list[str]:
        marks = {
            self.size: self.size is not None,
            f"{self.sequences}-sequences": self.sequences is not None,
            f"{self.epochs}-epochs": self.epochs is not None,
            f"{self.epochs_factor}x-epochs": self.epochs_factor != 1,
            f"{self.head}-head": self.head != "linear",
        } | {_mark(name, option): True for name, option in self.mixer_options.items()}
        return [str(mark) for mark, differs in marks.items() if differs]

    def budget(self, usual: Budget) -> Budget:
        epochs = (self.epochs or usual.epochs) * self.epochs_factor
        return Budget(self.sequences or usual.sequences, epochs)


UNCHANGED = Changes()


def diagnostic_run(
    protocol: Protocol, mixer: str, task: str, seed: int, *, device: str, changes: Changes = UNCHANGED
) -> DiagnosticRun:
    """One cell of a grid. On a GPU it runs in bfloat16."""
    if task not in protocol.budgets:
        raise ValueError(f"task must be one of {', '.join(protocol.budgets)} here, but is {task!r}")
    sequences, epochs = changes.budget(protocol.budgets[task])
    marks = [*([QUICK_MARK] if protocol is QUICK else []), *changes.marks]
    return DiagnosticRun(
        task=task,
        task_options=protocol.task_options.get(task, {}),
        variant="-".join(marks) or "default",
        model=_model(protocol, mixer, changes),
        training=TrainConfig(
            steps=epochs * (sequences // TrainConfig.batch_size),
            length=protocol.length,
            lr=protocol.lr,
            seed=seed,
            sequences=sequences,
            bf16=device == "cuda",
        ),
        examination=protocol.examination,
        device=device,
    )


def tasks_of(variant: str) -> tuple[str, ...]:
    """The usual ones of the protocol that a variant belongs to."""
    return (QUICK if variant.split("-")[0] == QUICK_MARK else FULL).usual


def _model(protocol: Protocol, mixer: str, changes: Changes) -> ModelSettings:
    options = {"d_model": protocol.d_model, **protocol.settings.get(mixer, {})}
    if changes.size is not None:
        width, state = changes.size.split("-")
        options |= {"d_model": int(width.removeprefix("d")), "d_state": int(state.removeprefix("n"))}
    d_model = options.pop("d_model")
    options |= changes.mixer_options
    return ModelSettings(
        mixer=mixer, d_model=d_model, n_layers=protocol.n_layers, mixer_options=options, head=changes.head
    )


def in_order(mixers: Sequence[str], tasks: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, str, int]]:
    """The cells of a grid as they are filled: the contested tasks before the others, Naju's five seeds before two of
    its rivals' and one of the rest's; then all the other seeds in the same order."""

    def place(cell: tuple[str, str, int]) -> tuple[int, ...]:
        mixer, task, seed = cell
        enough = FIRST_SEEDS.get(mixer, 1)
        later = seeds.index(seed) >= enough
        return later, task not in CONTESTED, -enough, seeds.index(seed), mixers.index(mixer), tasks.index(task)

    return sorted(((mixer, task, seed) for mixer in mixers for task in tasks for seed in seeds), key=place)


class Spread(NamedTuple):
    """One number over seeds; `std` is the sample standard deviation, None for a single seed."""

    mean: float
    std: float | None
    worst: float

    def __str__(self) -> str:
        std = "" if self.std is None else f"±{self.std:.3f}"
        return f"{self.mean:.3f}{std} ({self.worst:.3f})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(fmean(values), stdev(values) if len(values) > 1 else None, min(values))


def tables(results: Iterable[Mapping[str, Any]]) -> str:
    """For each task, and for T4 also with growing events: mean ± sample standard deviation (worst seed) at every
    length, and how many seeds passed 0.9 in their best validation at the training length."""
    found = list(results)
    kinds = [(task, "accuracy") for task in sorted({result["task"] for result in found})]
    kinds += [("T4", "growing")] if any("growing" in result for result in found) else []
    parts = []
    for task, measure in kinds:
        chosen = [result for result in found if result["task"] == task and result.get(measure)]
        if chosen:
            parts.append(_table(task if measure == "accuracy" else f"{task}, growing", measure, chosen))
    return "\n\n".join(parts) or "no results yet"


def _table(title: str, measure: str, results: Sequence[Mapping[str, Any]]) -> str:
    lengths = sorted({int(length) for result in results for length in result[measure]})
    rows = [[title, "variant", "seeds", f">{SUCCESS}", *(f"@{length}" for length in lengths)]]
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["mixer"], result["variant"]), []).append(result)
    for (mixer, variant), runs in sorted(groups.items(), key=lambda group: _row_order(*group[0])):
        passed = sum(run["best_validation"] > SUCCESS for run in runs)
        cells = [_cell([run[measure].get(str(length)) for run in runs]) for length in lengths]
        rows.append([mixer, variant, str(len(runs)), f"{passed}/{len(runs)}", *cells])
    return aligned(rows)


def _row_order(mixer: str, variant: str) -> tuple[int, str, bool, str]:
    return SUITE.index(mixer) if mixer in SUITE else len(SUITE), mixer, variant != "default", variant


def _cell(measured: Sequence[Mapping[str, float] | None]) -> str:
    values = [buckets["all"] for buckets in measured if buckets is not None]
    return str(spread(values)) if values else "-"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
