"""The paper's numbers, to be shown beside ours: all of its tables as printed, and the diagnostic ones by model.

In `diagnostics` accuracies are means and standard deviations over five seeds from its per-task tables, parameters and
state sizes from its summary, Mamba at width 128 from its width × state grid. Where two of its tables disagree
(Transformer, T3 at 2048: 0.06 and 0.07), the per-task table is taken. Its xLSTM is the mixer called mlstm here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple


class MeanStd(NamedTuple):
    """`std` is None for a single run."""

    mean: float
    std: float | None


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper: its rows, each from column to value; what it does not print is None."""

    title: str
    rows: tuple[Mapping[str, Any], ...]


@cache
def paper_tables() -> Mapping[str, PaperTable]:
    """By the paper's own labels, in its order."""
    read = json.loads(files("naju.lab").joinpath("paper_tables.json").read_text(encoding="utf-8"))
    return {
        label: PaperTable(table["title"], tuple(dict(zip(table["columns"], row, strict=True)) for row in table["rows"]))
        for label, table in read.items()
    }


def mean_std(value: Mapping[str, float] | float | None) -> MeanStd | None:
    """A cell of `paper_tables` that holds a mean, with or without a deviation."""
    if value is None or isinstance(value, int | float):
        return None if value is None else MeanStd(float(value), None)
    return MeanStd(value["mean"], value.get("std"))


class Fit(NamedTuple):
    """Final training and best validation accuracy at the training length."""

    train: float
    validation: float


@dataclass(frozen=True, kw_only=True)
class PaperModel:
    """One row of the paper's tables.

    `state_size` is None where the memory grows with the length; `extended` says three times the usual epochs.
    """

    family: str
    detail: str
    mixer: str
    d_model: int
    extended: bool
    parameters: int
    state_size: int | None
    accuracy: Mapping[str, Mapping[int, MeanStd]]
    fit: Mapping[str, Fit]

    @property
    def label(self) -> str:
        return f"{self.family} {self.detail}".strip()

    def at(self, task: str, length: int) -> MeanStd | None:
        return self.accuracy.get(task, {}).get(length)

    def is_like(self, *, mixer: str, d_model: int | None, state_size: int | None, extended: bool) -> bool:
        """Whether a model of ours is the one that this row is about."""
        same = (mixer, d_model, extended) == (self.mixer, self.d_model, self.extended)
        return same and self.state_size in (None, state_size)


@dataclass(frozen=True)
class Paper:
    """`protocol` has the names of our configs; lengths are those of the paper's columns."""

    protocol: Mapping[str, Any]
    seeds: int
    models: tuple[PaperModel, ...]
    lengths: tuple[int, ...]


@cache
def diagnostics() -> Paper:
    read = json.loads(files("naju.lab").joinpath("paper_diagnostics.json").read_text(encoding="utf-8"))
    models = tuple(_model(**row) for row in read["models"])
    lengths = sorted({length for model in models for row in model.accuracy.values() for length in row})
    return Paper(read["protocol"], read["seeds"], models, tuple(lengths))


def _model(
    *, accuracy: Mapping[str, Mapping[str, list[float]]], fit: Mapping[str, list[float]], **rest: Any
) -> PaperModel:
    by_length = {task: {int(length): MeanStd(*cell) for length, cell in row.items()} for task, row in accuracy.items()}
    return PaperModel(accuracy=by_length, fit={task: Fit(*cell) for task, cell in fit.items()}, **rest)
