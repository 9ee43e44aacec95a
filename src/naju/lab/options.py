"""What the commands that fill grids have in common: where and how, which seeds, which names and options."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from naju.lab.diagnostic_run import ModelSettings
from naju.lab.slurm import SlurmOptions
from naju.mixers import build_mixer

MOST_SEEDS = 1000
# In the name of a variant: weight decay on matrices alone.
MATRIX_DECAY = "matrix-decay"
# The paper's names of mixers that are called otherwise here.
PAPER_NAMES = {"xlstm": "mlstm"}


@dataclass(frozen=True, kw_only=True)
class GridOptions:
    """Where and how a grid is filled."""

    jobs: int | None = None
    """Runs at once, each in a process of its own; by default one a core, or one on a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" is a GPU where there is one."""
    runs: Path = Path("runs")
    """Folder of the run store; processes and machines may share it."""
    results: Path | None = None
    """Folder for copies of the small results; a cell that has one counts as finished."""
    plan: bool = False
    """Only print the cells in the order in which they will be filled, and where each stands."""
    on: Literal["local", "slurm"] = "local"
    """Fill it here, or submit an array job whose tasks fill it on a cluster; they share the run store."""
    cluster: SlurmOptions = field(default_factory=SlurmOptions)

    def __post_init__(self) -> None:
        if self.jobs is not None and self.jobs < 1:
            raise ValueError(f"jobs must be a positive integer, but is {self.jobs}")

    def chosen_device(self) -> str:
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is 'cuda', but torch finds no GPU it can use")
        return self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"

    def chosen_jobs(self) -> int:
        return self.jobs if self.jobs is not None else 1 if self.chosen_device() == "cuda" else os.cpu_count() or 1


def parse_seeds(parts: Sequence[str]) -> tuple[int, ...]:
    """Numbers and ranges with both ends, each seed once, in the order given."""
    seeds: dict[int, None] = {}
    for part in parts:
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(f"seeds must be numbers or ranges such as 1-5, but one is {part!r}")
        if int(found[2] or found[1]) - int(found[1]) >= MOST_SEEDS:
            raise ValueError(f"seeds must be at most {MOST_SEEDS:,} a range, but one is {part!r}")
        seeds |= dict.fromkeys(range(int(found[1]), int(found[2] or found[1]) + 1))
    if not seeds:
        raise ValueError("seeds must name at least one seed, but names none")
    return tuple(seeds)


def check_names(option: str, names: Sequence[Any], known: Mapping[Any, Any] | Sequence[Any]) -> None:
    """Each of `known` at most once, and nothing else."""
    strangers = [name for name in names if name not in known]
    if strangers or len(set(names)) < len(names):
        told, given = (", ".join(map(str, these)) for these in (known, names))
        raise ValueError(f"{option} must be different ones of {told}, but are {given}")


def check_options(models: Iterable[ModelSettings]) -> None:
    """Before anything is trained, by building a mixer of each kind and width."""
    for settings in {(model.mixer, model.d_model): model for model in models}.values():
        try:
            build_mixer(settings.mixer, settings.d_model, **settings.mixer_options)
        except TypeError as error:
            raise ValueError(str(error)) from error
