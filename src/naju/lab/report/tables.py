"""The report's tables: ours beside the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from naju.lab.paper import Fit, MeanStd, PaperModel, diagnostics
from naju.lab.report.results import BOARDS, Model, Seeds

# From these differences on a cell is coloured faintly, clearly, strongly.
STEPS = (0.02, 0.1, 0.3)


@dataclass(frozen=True)
class Cell:
    """One number of ours, the paper's for the same thing, or only one of them."""

    ours: Seeds | None
    paper: MeanStd | None

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's to two digits, which is all that the paper prints."""
        return round(self.ours.mean - self.paper.mean, 2) if self.ours and self.paper else None

    @property
    def shade(self) -> str:
        """The style sheet's class."""
        difference = self.difference or 0.0
        strength = sum(abs(difference) >= step for step in STEPS)
        return "" if strength == 0 else f"{'better' if difference > 0 else 'worse'}{strength}"


@dataclass(frozen=True)
class TaskRow:
    label: str
    seeds: int
    successes: int
    train: float | None  # means over the seeds, at the training length
    validation: float | None
    paper_fit: Fit | None
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class TaskTable:
    board: str
    lengths: tuple[int, ...]
    rows: tuple[TaskRow, ...]


@dataclass(frozen=True)
class MainRow:
    label: str
    cells: tuple[Cell, ...]  # a board each
    joint: Cell  # min(T2, T4)


@dataclass(frozen=True)
class CostRow:
    label: str
    parameters: tuple[int, int]  # smallest and largest over the tasks, whose vocabularies differ
    state_size: int | None
    paper: PaperModel | None
    runs: int
    steps: int
    seconds: float
    machines: str

    @property
    def steps_per_second(self) -> float:
        return self.steps / self.seconds if self.seconds > 0 else 0.0


Pairing = tuple[str, Model | None, PaperModel | None]


def side_by_side(models: Sequence[Model]) -> list[Pairing]:
    """All of our models with the paper's rows about them, then the paper's rows that nothing of ours stands beside."""
    ours: list[Pairing] = [(model.label, model, model.paper) for model in models]
    shown = [model.paper for model in models]
    return ours + [(row.label, None, row) for row in diagnostics().models if row not in shown]


def task_table(board: str, models: Sequence[Model]) -> TaskTable | None:
    """None without any run of the task. The paper's other lengths and models join where it shares a length with us.

    The growing rule has no rows of the paper alone: it names no rule.
    """
    own = {length for model in models for length in model.lengths(board)}
    if not own:
        return None
    paper = set(diagnostics().lengths)
    lengths = tuple(sorted(own | paper if own & paper else own))
    pairs = [pair for pair in side_by_side(models) if _has(board, lengths, *pair[1:])]
    return TaskTable(board, lengths, tuple(_task_row(board, lengths, *pair) for pair in pairs))


def main_table(models: Sequence[Model]) -> list[MainRow]:
    return [_main_row(*pair) for pair in side_by_side(models)]


def cost_table(models: Sequence[Model]) -> list[CostRow]:
    return [_cost_row(model) for model in models]


def cell(board: str, length: int, model: Model | None, row: PaperModel | None) -> Cell:
    ours = model.at(board, length) if model else None
    return Cell(ours, row.at(board.split()[0], length) if row else None)


def _has(board: str, lengths: Sequence[int], model: Model | None, row: PaperModel | None) -> bool:
    if model is not None:
        return bool(model.of(board))
    return row is not None and any(length in row.accuracy.get(board, {}) for length in lengths)


def _task_row(board: str, lengths: Sequence[int], label: str, model: Model | None, row: PaperModel | None) -> TaskRow:
    runs = model.of(board) if model else []
    return TaskRow(
        label,
        len(runs),
        model.successes(board) if model else 0,
        fmean(run.train_accuracy for run in runs) if runs else None,
        fmean(run.best_validation for run in runs) if runs else None,
        row.fit.get(board.split()[0]) if row else None,
        tuple(cell(board, length, model, row) for length in lengths),
    )


def _main_row(label: str, model: Model | None, row: PaperModel | None) -> MainRow:
    far = model.far if model else diagnostics().lengths[-1]
    cells = {board: cell(board, far, model, row) for board in BOARDS}
    return MainRow(label, tuple(cells.values()), _joint(cells["T2"], cells["T4"]))


def _joint(retention: Cell, overwriting: Cell) -> Cell:
    """The weaker of the two, by its mean."""
    ours = paper = None
    if retention.ours and overwriting.ours:
        ours = min(retention.ours, overwriting.ours, key=lambda seeds: seeds.mean)
    if retention.paper and overwriting.paper:
        paper = min(retention.paper, overwriting.paper)
    return Cell(ours, paper)


def _cost_row(model: Model) -> CostRow:
    counts = [run.parameters for run in model.runs]
    return CostRow(
        model.label,
        (min(counts), max(counts)),
        model.runs[0].state_size,
        model.paper,
        len(model.runs),
        sum(run.steps for run in model.runs),
        sum(run.seconds for run in model.runs),
        ", ".join(sorted({run.machine for run in model.runs if run.machine})),
    )
