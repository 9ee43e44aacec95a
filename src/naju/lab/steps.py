"""`naju bench steps`: training steps a second of the diagnostic suite, one run alone and several at once."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from naju.bench.measure import default_device
from naju.bench.rows import RESULTS, print_table, save_rows
from naju.lab.diagnostic_run import DiagnosticRun
from naju.lab.diagnostics import FULL, QUICK, diagnostic_run
from naju.lab.options import check_names
from naju.lab.side_by_side import side_by_side
from naju.mixers import MIXERS
from naju.training import FixedSet, Learner
from naju.training.children import deaf_to_ctrl_c
from naju.training.loop import executables

SEQUENCES = 4096  # as many as it takes to draw batches from
AT_ONCE = 20  # steps between two looks at the clock


@dataclass(frozen=True, kw_only=True)
class StepsBench:
    """Count the training steps that the diagnostic suite makes in a second, all runs together."""

    mixers: tuple[str, ...] = ("naju",)
    task: str = "T2"
    jobs: tuple[int, ...] = (1, 4)
    """runs at once, each in a process of its own; several on one GPU compute side by side where the machine can"""
    seconds: float = 5.0
    """how long each number of runs is counted"""
    quick: bool = False
    """the small models and sequences of the quick grid"""
    device: str = field(default_factory=default_device)
    out: Path = RESULTS
    """folder for the rows"""


def run_steps_bench(bench: StepsBench) -> None:
    check_names("mixers", bench.mixers, MIXERS)
    if not 0 < bench.seconds < math.inf:
        raise ValueError(f"seconds must be positive and finite, but is {bench.seconds}")
    protocol, device = QUICK if bench.quick else FULL, torch.device(bench.device).type
    rows: list[dict[str, Any]] = []
    for mixer in bench.mixers:
        run = diagnostic_run(protocol, mixer, bench.task, 1, device=device)
        rows += [_row(bench, run, jobs) for jobs in bench.jobs]
    print_table(rows, ["mixer", "task", "jobs", "steps_per_s", "slowest", "execution"])
    print(f"rows appended to {save_rows('steps', rows, bench.out)}")


def _row(bench: StepsBench, run: DiagnosticRun, jobs: int) -> dict[str, Any]:
    with side_by_side(run.device, jobs):
        told = _measured(run, jobs, bench.seconds)
    return {
        "bench": "steps",
        "mixer": run.model.mixer,
        "task": run.task,
        "jobs": jobs,
        "quick": bench.quick,
        "steps_per_s": sum(rate for rate, _ in told),
        "slowest": min(rate for rate, _ in told),
        "execution": told[0][1],
    }


def _measured(run: DiagnosticRun, jobs: int, seconds: float) -> list[tuple[float, str]]:
    """Steps a second of each process, and how it executes them. All begin when the last one is ready."""
    context = multiprocessing.get_context("spawn")
    lines, processes = [], []
    for _ in range(jobs):
        line, theirs = context.Pipe()
        process = context.Process(target=_step_for, args=(run, seconds, theirs), daemon=True)
        with deaf_to_ctrl_c():
            process.start()
        theirs.close()
        lines.append(line)
        processes.append(process)
    try:
        for line in lines:
            line.recv()
        for line in lines:
            line.send("go")
        told: list[tuple[float, str]] = [line.recv() for line in lines]
    except (EOFError, OSError) as error:
        raise ChildProcessError("a process of this bench died; what it said is above") from error
    for process in processes:
        process.join()
    return told


def _step_for(run: DiagnosticRun, seconds: float, line: Connection) -> None:
    torch.set_num_threads(1)
    task = run.build_task()
    settings = replace(run.training, sequences=min(SEQUENCES, run.training.sequences or SEQUENCES))
    learner = Learner(run.model.build(task, run.training.seed).to(run.device), settings)
    learner.model.train()
    data = FixedSet(task, settings, learner.device)
    data.shuffle(0)
    steps, execution = executables(learner, data, print)
    steps[0]()
    _wait(learner)
    line.send("ready")
    line.recv()
    line.send((_rate(steps[0], lambda: _wait(learner), seconds), execution))


def _rate(step: Callable[[], object], wait: Callable[[], None], seconds: float) -> float:
    began, done = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        for _ in range(AT_ONCE if done else 1):
            step()
        wait()
        done += AT_ONCE if done else 1
    return done / passed


def _wait(learner: Learner) -> None:
    int(learner.steps_done)
