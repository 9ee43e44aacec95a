"""The run store: one folder a run, `<runs>/<experiment>/<name>/`, and copies of small results elsewhere.

A folder holds `config.json` (all that determines the run), `metrics.jsonl`, `checkpoint.safetensors` and, written last,
`result.json`: a run is finished when that is there.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import naju
from naju.lab.lock import BusyError, RunLock, holder
from naju.training.checkpoint import BEFORE, NEWEST, Checkpoint, read_checkpoint
from naju.training.files import clear_away, write_json
from naju.training.metrics import read_metrics

CONFIG, RESULT = "config.json", "result.json"
# What every result of a grid's cell says of it.
CELL = ("mixer", "task", "variant", "seed")


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, which need not exist yet."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    def begin(self, config: Mapping[str, Any]) -> None:
        """Create it, or make sure that it belongs to this very config; for whoever holds its lock."""
        self.path.mkdir(parents=True, exist_ok=True)
        clear_away(self.path)
        found = _read(self.path / CONFIG)
        if found is None and (self.path / CONFIG).exists():
            raise ValueError(
                f"run {self.name} has an unreadable {CONFIG}, so that nobody knows what its checkpoints are of; remove "
                f"its folder {self.path}, or use another"
            )
        if found is None:
            write_json(self.path / CONFIG, dict(config))
        elif found != _as_json(config):
            differs = sorted(key for key in {*found, *config} if found.get(key) != _as_json(config).get(key))
            raise ValueError(
                f"run {self.name} was begun with another {', '.join(differs)}; remove its folder {self.path}, "
                "or use another"
            )

    def config(self) -> dict[str, Any]:
        found = _read(self.path / CONFIG)
        if found is None:
            raise FileNotFoundError(f"{self.path} is no run: it has no readable {CONFIG}")
        return found

    def result(self) -> dict[str, Any] | None:
        return _read(self.path / RESULT)

    def finish(self, result: Mapping[str, Any]) -> None:
        write_json(self.path / RESULT, dict(result))

    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.path)

    def checkpoint(self) -> Checkpoint:
        """The newest; a run that was killed as it changed names has the one before only."""
        newest = self.path / NEWEST
        return read_checkpoint(newest if newest.exists() else self.path / BEFORE)

    def status(self) -> str:
        """In words."""
        if self.result() is not None:
            return "finished"
        rows = self.metrics()
        steps = (_read(self.path / CONFIG) or {}).get("steps", "?")
        where = f"step {rows[-1]['step']} of {steps}" if rows else "before its first line of metrics"
        owner = holder(self.path)
        return f"interrupted, {where}" if owner is None else f"running as {owner}, {where}"

    def check_idle(self) -> None:
        """By taking its lock for a moment, also from a process that died on another machine."""
        try:
            with RunLock(self.path):
                pass
        except BusyError as busy:
            raise ValueError(f"run {busy}; stop that first") from busy

    def remove(self) -> None:
        self.check_idle()
        shutil.rmtree(self.path)


def carry_out(
    folder: RunFolder, config: Mapping[str, Any], work: Callable[[RunLock], dict[str, Any]]
) -> dict[str, Any]:
    """A run's result: `work` makes it, alone in its folder, unless it is there already."""
    folder.path.mkdir(parents=True, exist_ok=True)
    with RunLock(folder.path) as lock:
        found = folder.result()
        if found is not None:
            return found
        folder.begin(config)
        _forget_other_runs()
        return work(lock)


def _forget_other_runs() -> None:
    """A worker carries out one run after the other: what it does and measures must not depend on those before."""
    gc.collect()
    if "torch._dynamo" in sys.modules:  # else code that many models share would at some point not be compiled any more
        torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


@dataclass(frozen=True)
class RunStore:
    """All runs under one folder."""

    root: Path

    def folder(self, experiment: str, name: str) -> RunFolder:
        return RunFolder(self.root / experiment / name)

    def runs(self) -> Iterator[RunFolder]:
        """Every run of every experiment, in the order of their names."""
        for config in sorted(self.root.glob(f"*/*/{CONFIG}")):
            if not is_inside_a_run(config.parent):
                yield RunFolder(config.parent)

    def find(self, name: str) -> RunFolder:
        """A run by its name, or by `experiment/name` where two experiments share it."""
        runs = list(self.runs())
        found = [run for run in runs if name in (run.name, f"{run.path.parent.name}/{run.name}")]
        if len(found) != 1:
            problem = "several runs are" if found else "no run is"
            known = ", ".join(f"{run.path.parent.name}/{run.name}" for run in found or runs) or "none"
            raise ValueError(f"{problem} called {name!r} in {self.root}; there: {known}")
        return found[0]


@dataclass(frozen=True)
class Results:
    """Finished results of one experiment: those in the run store, and the copies `<folder>/<name>.json`. One that
    `shows` says no to is none."""

    store: RunStore
    experiment: str
    copies: Path | None = None
    shows: Callable[[Mapping[str, Any]], bool] = lambda result: True

    def get(self, name: str) -> dict[str, Any] | None:
        copy = None if self.copies is None else _read(self.copies / f"{name}.json")
        found = (self.store.folder(self.experiment, name).result(), copy)
        return next((result for result in found if result is not None and self.shows(result)), None)

    def collect(self, name: str) -> None:
        """Make the copy of a finished run; nothing is written where it is there already."""
        result = self.store.folder(self.experiment, name).result()
        if self.copies is None or result is None or not self.shows(result):
            return
        if _read(self.copies / f"{name}.json") != result:
            self.copies.mkdir(parents=True, exist_ok=True)
            write_json(self.copies / f"{name}.json", result)


def machine() -> dict[str, Any]:
    """What the times of a run depend on; no name and no path."""
    return {
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Of everything whose arithmetic a run may have used."""
    found = {"naju": naju.__version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    packages = {name: _version(name) for name in ("triton", "fla-core", "mamba_ssm", "causal_conv1d", "mlstm_kernels")}
    return found | {name: number for name, number in packages.items() if number is not None}


@functools.cache  # what is installed later, this process does not use
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _as_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """As it reads after writing: tuples are lists."""
    return dict(json.loads(json.dumps(dict(value))))


def is_inside_a_run(folder: Path) -> bool:
    """A language run keeps its best model in a folder of its own, which has a config, too."""
    return (folder.parent / CONFIG).exists()


def _read(path: Path) -> dict[str, Any] | None:
    """None where the file is missing or unreadable as JSON: then it has to be written anew."""
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
