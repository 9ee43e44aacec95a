"""The paper's diagnostic numbers, to be shown beside ours.

Accuracies are means and standard deviations over five seeds from its per-task tables, parameters and state sizes from
its summary, Mamba at width 128 from its width × state grid. Where two of its tables disagree (Transformer, T3 at 2048:
0.06 and 0.07), the per-task table is taken. Its xLSTM is the mixer called mlstm here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple


class MeanStd(NamedTuple):
    mean: float
    std: float


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
