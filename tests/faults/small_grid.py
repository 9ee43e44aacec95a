"""A grid of runs that take a fraction of a second, filled by processes that start at once and can be disturbed.

They are forked from a server that has imported everything, and the grid's workers from them: a new interpreter would
take seconds to import torch.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import sys

import torch

from naju.lab import diagnostic_run, grid, reproduce
from naju.lab.diagnostic_run import DiagnosticRun, Examination, ModelSettings, run_diagnostic
from naju.lab.diagnostics import QUICK
from naju.lab.options import GridOptions
from naju.lab.runs import RunFolder
from naju.training import Reporter, Rhythm, TrainConfig

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["naju.cli", "torch._dynamo"])  # the second by torch itself, at its first step
PATIENCE = 300  # seconds; on an idle machine none of them takes more than a few
# What an attempt leaves to chance: how long it took, when it ended, and whether it had any steps left to execute.
BY_CHANCE = ("seconds", "when", "machine")


def cell(mixer="naju", task="T2", seed=1, steps=4):
    return DiagnosticRun(
        task=task,
        task_options=QUICK.task_options[task],
        variant="small",
        model=ModelSettings(mixer=mixer, mixer_options={"d_state": 4}, d_model=8, n_layers=1),
        training=TrainConfig(steps=steps, length=64, batch_size=4, sequences=12, seed=seed),
        examination=Examination(test_lengths=(64,), test_sequences=8, validation_sequences=8),
    )


def cells(steps):
    return [cell(mixer, task, seed, steps) for seed in (1, 2) for task in ("T2", "T4") for mixer in ("naju", "coupled")]


def run_cell(path, run=None):
    """In this process; a line and a checkpoint after every step."""
    torch.set_num_threads(1)
    diagnostic_run.rhythm = lambda training: Rhythm(log_every=1, validate_every=2, save_seconds=0)
    return run_diagnostic(run or cell(), RunFolder(path), Reporter())


def start(function, *args):
    """In a process of its own, and in a group of its own with those that it starts."""
    process = CONTEXT.Process(target=_in_own_group, args=(function, *args))
    process.start()
    return process


def _in_own_group(function, *args):
    os.setpgid(0, 0)
    code = function(*args)
    sys.exit(code if isinstance(code, int) else 0)


def fill(root, steps, jobs=2):
    """`naju reproduce diagnostics` with the cells of this grid; its exit code."""
    diagnostic_run.rhythm = lambda training: Rhythm(log_every=1, validate_every=8, save_seconds=0)
    reproduce.Diagnostics.cells = lambda options: cells(steps)
    grid.multiprocessing = Forks()
    options = GridOptions(jobs=jobs, device="cpu", runs=root / "runs", results=root / "results")
    return reproduce.reproduce(reproduce.Diagnostics(grid=options))


class Forks:
    """In the place of `multiprocessing`, as far as a grid uses it. A worker that is forked closes what a spawned one
    would not have: the grid's ends of all lines, without which nobody would hear that the grid is gone."""

    parent_process = staticmethod(multiprocessing.parent_process)

    def __init__(self):
        self.ends = []

    def get_context(self, kind):
        return self

    def Pipe(self):  # noqa: N802 (the name is given)
        here, there = multiprocessing.Pipe()
        self.ends.append(here)
        return here, there

    def Process(self, *, target, args, daemon):  # noqa: N802
        return multiprocessing.get_context("fork").Process(target=self._serve, args=(target, args), daemon=daemon)

    def _serve(self, target, args):
        for end in self.ends:
            end.close()
        target(*args)


def kill_group(process):
    """It and all that it has started, as a power failure would."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def outcome(folder):
    """What a finished run has to leave, whatever happened to it."""
    result = json.loads((folder / "result.json").read_text())
    return {key: value for key, value in result.items() if key not in BY_CHANCE}, (
        folder / "metrics.jsonl"
    ).read_bytes()


def outcomes(root):
    return {path.parent.name: outcome(path.parent) for path in sorted((root / "runs").glob("*/*/result.json"))}
