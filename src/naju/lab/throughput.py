"""`naju reproduce throughput`: the paper's efficiency tables, measured by `naju bench`, ours beside the paper's.

The machines differ, so what can be compared is the ratio to Mamba-2 in the same table, not milliseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from naju.bench.compare import OUT_OF_MEMORY
from naju.bench.forward import ForwardBench, run_forward_bench
from naju.bench.forward_plot import draw_times
from naju.bench.peers import USUAL
from naju.bench.rows import RESULTS, told
from naju.bench.training import TrainingBench, run_training_bench
from naju.lab.diagnostics import aligned
from naju.lab.paper import paper_tables

RIVAL = "mamba2"
FORWARD_MODELS = (*USUAL, "rwkv6")
TRAINING_MODELS = (
    "naju",
    "naju-rank64",
    "naju-rank32",
    "mamba2",
    "mamba",
    "mamba-16",
    "transformer-math",
    "transformer-flash",
)
# Models whose N is a choice of the bench; the others have one of their own.
SIZED = ("naju", "naju-rank64", "naju-rank32", "mamba2", "mamba")
# The paper's names of models that the benches call otherwise. Where it names no N for Mamba, its numbers fit N = 16.
NAMES = {
    "xlstm": "mlstm",
    "rwkv": "rwkv6",
    "mamba None": "mamba-16",
    "mamba 16": "mamba-16",
    "transformer math": "transformer-math",
    "transformer flash": "transformer-flash",
    "naju rank 64": "naju-rank64",
    "naju rank 32": "naju-rank32",
}


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Time and memory of a forward pass and of a training step, against the peers."""

    quick: bool = False
    """Small sizes of Naju alone, a minute on a CPU: shows that it runs, and stands beside nothing of the paper's."""
    show: bool = False
    """Measure nothing; only print the tables from the rows that are there."""
    rows: Path = RESULTS
    """Folder of the benchmarks' rows."""
    plot: Path | None = None
    """Draw a token's time in the forward pass, as CUDA graphs, into this file: the rows of one day, that on which most
    models were timed."""


FORWARD_SHAPE = ("batch", "n_layers", "dtype")  # what rows have to share
# In place of a number where a model did not fit into the memory, which the tables of the paper leave empty.
RAN_OUT = math.inf


class Pair(NamedTuple):
    """A number of ours and the paper's, each also over the rival's in the same column; None where there is none, and
    RAN_OUT where the memory did not suffice."""

    ours: float | None
    paper: float | None
    our_ratio: float | None
    paper_ratio: float | None

    @property
    def is_printed(self) -> bool:
        """Whether the paper has a number."""
        return self.paper not in (None, RAN_OUT)


class SpeedRow(NamedTuple):
    label: str
    cells: tuple[Pair, ...]


class SpeedTable(NamedTuple):
    title: str
    lengths: tuple[int, ...]
    rows: tuple[SpeedRow, ...]
    machines: tuple[str, ...]


class Contender(NamedTuple):
    """A model in one size, run in one way."""

    model: str
    d_model: int
    mode: str

    @property
    def label(self) -> str:
        return f"{self.model} d{self.d_model} {self.mode}"


Numbers = dict[Contender, dict[int, float]]  # by length
MEASURED = ("median_s", "tokens_per_s", "peak_bytes")
LARGEST = 1e15  # of any time, speed or size that a file may claim


def run_throughput(options: Throughput) -> None:
    """Measure, then print every table of the paper about speed with ours beside it."""
    if options.quick and options.show:
        raise ValueError("quick measures small sizes and show measures nothing: give one of them")
    if not (options.quick or options.show or torch.cuda.is_available()):
        raise ValueError("the paper's sizes need a GPU, and torch has none: try --quick, or --show what is there")
    if options.quick:
        _measure_quickly(options.rows)
    elif not options.show:
        _measure(options.rows)
    if not options.quick:
        print("\n\n".join(map(told_speed, speed_tables(options.rows))))
    if options.plot is not None:
        _draw(options.rows, options.plot)
        print(f"picture in {options.plot}")


def _measure(folder: Path) -> None:
    run_forward_bench(ForwardBench(models=FORWARD_MODELS, out=folder))
    run_forward_bench(ForwardBench(models=("naju", RIVAL), d_model=128, out=folder))
    run_training_bench(TrainingBench(models=TRAINING_MODELS, out=folder))


def _measure_quickly(folder: Path) -> None:
    small: dict[str, Any] = {"models": ("naju",), "n_layers": 2, "d_model": 64, "dtype": "float32", "rounds": 3}
    small |= {"modes": ("eager",), "against": "naju", "out": folder}
    run_forward_bench(ForwardBench(**small, lengths=(512, 1024), batch=2))
    run_training_bench(TrainingBench(**small, lengths=(256,), tokens=1024, vocab_size=1000))


def _draw(folder: Path, path: Path) -> None:
    usual = ForwardBench()
    as_graphs = [row for row in _forward_rows(folder) if (row["mode"], row["d_model"]) == ("graph", usual.d_model)]
    rows = _of_one_day([row for row in as_graphs if row.get("median_s") not in (None, RAN_OUT)])
    where = ", ".join({f"{row['machine']['accelerator']}, {_day(row)}" for row in rows})
    shape = {name: getattr(usual, name) for name in FORWARD_SHAPE}
    draw_times(rows, f"Forward on {where}: {told(shape)}, d_model {usual.d_model}", path)


def _of_one_day(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the day and machine that timed most models, the last such, the newest row of each model and length: times
    differ between machines by as much as between models."""
    days: dict[tuple[str, str], dict[tuple[str, int], dict[str, Any]]] = {}
    for row in rows:
        days.setdefault((_day(row), str(row["machine"])), {})[row["model"], row["length"]] = row
    fullest = max(reversed(days.values()), key=lambda day: len({model for model, _ in day}), default={})
    return list(fullest.values())


def _day(row: Mapping[str, Any]) -> str:
    return str(row.get("when"))[:10]


def speed_tables(folder: Path) -> list[SpeedTable]:
    """Forward time and memory, training throughput and memory; the newest row of each kind on a GPU counts, if its
    sizes and the compiler's mode are those that the bench has by default, which are the paper's."""
    step, training = TrainingBench(), _rows(folder / "training.jsonl")
    training = [row for row in training if row.get("batch") == step.tokens / max(row["length"], 1)]
    training = [row for row in training if _is_like(step, row, "n_layers", "d_model", "vocab_size", "dtype")]
    forward, forward_paper = _forward_rows(folder), paper_tables()["tab:throughput"].rows
    by_part = {part: [row for row in forward_paper if row["part"] == part] for part in ("a", "b")}
    return [
        _table("Forward pass, ms", forward, "median_s", 1e3, _by_length(by_part["a"])),
        _table("Forward pass, peak MB", forward, "peak_bytes", 1e-6, _by_length(by_part["b"])),
        *training_tables(training),
    ]


def _forward_rows(folder: Path) -> list[dict[str, Any]]:
    """Of the usual shape, but of any width: the paper has two."""
    return [row for row in _rows(folder / "forward.jsonl") if _is_like(ForwardBench(), row, *FORWARD_SHAPE)]


def _is_like(usual: ForwardBench | TrainingBench, row: Mapping[str, Any], *names: str) -> bool:
    has_usual_state = row["model"] not in SIZED or row.get("d_state") == usual.d_state
    has_usual_mode = row["mode"] != "compiled" or row["compile_mode"] == usual.compile_mode
    return has_usual_state and has_usual_mode and all(row.get(name) == getattr(usual, name) for name in names)


def training_tables(rows: Sequence[Mapping[str, Any]]) -> list[SpeedTable]:
    """Throughput and memory of training from rows with `model`, `mode`, `d_model`, `length` and what was measured."""
    paper = _training_rows()
    return [
        _table("Training, thousand tokens/s", rows, "tokens_per_s", 1e-3, paper("train_ktokens_per_s")),
        _table("Training, peak MB", rows, "peak_bytes", 1e-6, paper("peak_mem_mb")),
    ]


def _rows(path: Path) -> list[dict[str, Any]]:
    """Of a GPU, oldest first: measured ones, and those that ran out of memory."""
    if not path.exists():
        return []
    rows = [_row(line, f"line {number} of {path}") for number, line in enumerate(path.read_bytes().splitlines(), 1)]
    rows = [row | dict.fromkeys(MEASURED, RAN_OUT) if row.get("reason") == OUT_OF_MEMORY else row for row in rows]
    return [row for row in rows if row["machine"]["accelerator"] and row.get("reason") in (None, OUT_OF_MEMORY)]


def _row(line: bytes, where: str) -> dict[str, Any]:
    """A damaged line is a ValueError that names it."""
    try:
        row: dict[str, Any] = json.loads(line)
        known = isinstance(row["machine"]["accelerator"], str | None)
        known &= all(isinstance(row[name], str) for name in ("model", "mode"))
        known &= row["mode"] != "compiled" or isinstance(row["compile_mode"], str)
        known &= all(type(row[name]) is int for name in ("n_layers", "d_model", "length"))
        measured = [row.get(name) for name in MEASURED]
        known &= all(one is None or (isinstance(one, int | float) and 0 < one < LARGEST) for one in measured)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{where} is no row of `naju bench`: {type(error).__name__}, {error}") from error
    if not known:
        raise ValueError(f"{where} is no row of `naju bench`: a value has another type or size than expected")
    return row


def _table(title: str, rows: Sequence[Mapping[str, Any]], key: str, scale: float, paper: Numbers) -> SpeedTable:
    """Of a contender that was measured several times the newest number; its ratio is to the rival of the same run."""
    by_run: dict[str, Numbers] = {}
    newest: dict[Contender, dict[int, str]] = {}  # the run of each number
    for row in rows:
        if row.get(key) is not None:
            contender, run = (
                Contender(row["model"], row["d_model"], row["mode"]),
                f"{row.get('when')} {row.get('command')}",
            )
            by_run.setdefault(run, {}).setdefault(contender, {})[row["length"]] = row[key] * scale
            newest.setdefault(contender, {})[row["length"]] = run
    contenders = list(dict.fromkeys([*newest, *paper]))
    lengths = sorted({length for numbers in (newest, paper) for by in numbers.values() for length in by})

    def pair(contender: Contender, length: int) -> Pair:
        numbers = by_run.get(newest.get(contender, {}).get(length, ""), {})
        (ours, our_ratio), (papers, paper_ratio) = (_measured(one, contender, length) for one in (numbers, paper))
        return Pair(ours, papers, our_ratio, paper_ratio)

    made = [SpeedRow(one.label, tuple(pair(one, length) for length in lengths)) for one in contenders]
    machines = tuple(sorted({row["machine"]["accelerator"] for row in rows}))
    return SpeedTable(title, tuple(lengths), tuple(made), machines)


def _measured(numbers: Numbers, contender: Contender, length: int) -> tuple[float | None, float | None]:
    """A number and its ratio to the rival's of the same width, which the paper has for none but 256."""
    own, rival = (numbers.get(one, {}).get(length) for one in (contender, contender._replace(model=RIVAL)))
    return own, None if own is None or rival is None or RAN_OUT in (own, rival) else own / rival


def _by_length(rows: Sequence[Mapping[str, Any]]) -> Numbers:
    return {
        Contender(_name(row), row["d_model"], "eager"): {
            int(column[1:]): RAN_OUT if value is None else value for column, value in row.items() if column[0] == "L"
        }
        for row in rows
    }


def _training_rows() -> Callable[[str], Numbers]:
    """The table of language models and that of gate ranks, which has the lengths of neither but 1024."""
    rows = [*paper_tables()["tab:wt103_eff"].rows]
    ranks = [row for row in paper_tables()["tab:gate_rank"].rows if row["gate_rank"] != "full"]
    rows += [{**row, "context_length": 1024, "torch_compile": False, "d_state": 64} for row in ranks]

    def numbers(column: str) -> Numbers:
        found: Numbers = {}
        for row in rows:
            mode = "compiled" if row["torch_compile"] else "eager"
            found.setdefault(Contender(_name(row), 256, mode), {})[row["context_length"]] = row[column]
        return found

    return numbers


def _name(row: Mapping[str, Any]) -> str:
    """A row's model as the benches call it."""
    model, detail = str(row["model"]), row.get("attention")
    if model == "mamba":
        detail = row["d_state"]
    if "gate_rank" in row:
        detail = f"rank {row['gate_rank']}"
    return NAMES.get(f"{model} {detail}", NAMES.get(model, model))


def told_speed(table: SpeedTable) -> str:
    """As text."""
    lines = [[table.title, *map(str, table.lengths)]]
    lines += [[row.label, *map(_told_pair, row.cells)] for row in table.rows]
    where = f"ours on {', '.join(table.machines)}" if table.machines else "nothing of ours measured yet"
    return f"{aligned(lines)}\n{where}; in brackets: over {RIVAL} of the same width; then the paper's number and ratio"


def _told_pair(pair: Pair) -> str:
    ours, paper = _told_number(pair.ours, pair.our_ratio), _told_number(pair.paper, pair.paper_ratio)
    return f"{ours} | {paper}"


def _told_number(number: float | None, ratio: float | None) -> str:
    if number is None or number == RAN_OUT:
        return "-" if number is None else OUT_OF_MEMORY
    return f"{number:.4g}" if ratio is None else f"{number:.4g} ({ratio:.2f})"
