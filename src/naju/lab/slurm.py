"""Grids on a Slurm cluster: one array job, each of whose tasks works through the cells of the shared run store.

A task is the very command that was given, without `--on slurm`. Locks keep two tasks from one cell, so there may be any
number of them, they may end at any moment, and giving the command again goes on with what is open.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOGS = "slurm"
REQUEUES = 100  # of a task, before something other than the time must be wrong
# submitit's other executors, "local" and "debug", take the same jobs without a cluster.
EXECUTOR = "slurm"


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What an array job asks for."""

    gpus: int = 1
    """Array tasks at once, each with one GPU (or none with --device cpu); never more than there are cells to fill."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str = "24:00:00"
    """Of one task, as [days-]hours:minutes:seconds; a task that runs out of it saves, is queued again, and goes on."""
    cpus: int = 8
    """CPU cores of a task."""
    memory: int = 32
    """GB of a task."""
    slurm: tuple[str, ...] = ()
    """More of sbatch's options as name=value, such as constraint=h200."""

    def __post_init__(self) -> None:
        for name in ("gpus", "cpus", "memory"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive integer, but is {getattr(self, name)}")
        minutes(self.time)
        self.more()

    def more(self) -> dict[str, str]:
        pairs = [option.partition("=") for option in self.slurm]
        if not all(name and equals for name, equals, _ in pairs):
            raise ValueError(f"slurm must be options such as name=value, but they are {' '.join(self.slurm)}")
        return {name: value for name, _, value in pairs}


def minutes(time: str) -> int:
    """Of [days-]hours:minutes:seconds, rounded up."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", time)
    if found is None:
        raise ValueError(f"time must look like 24:00:00 or 2-12:00:00, but is {time!r}")
    days, hours, rest, seconds = (int(part or 0) for part in found.groups())
    return (24 * days + hours) * 60 + rest + (seconds > 0)


class ArrayTask:
    """Callable by submitit, which asks for a `checkpoint` shortly before time is up: the same again, which goes on with
    what it left."""

    def __init__(self, work: Callable[[], int]) -> None:
        self.work = work

    def __call__(self) -> int:
        return self.work()

    def checkpoint(self) -> Any:
        return _submitit().helpers.DelayedSubmission(self)


def submit(
    work: Callable[[], int], name: str, options: SlurmOptions, runs: Path, *, cells: int, gpu: bool
) -> list[Any]:
    """Queue `work`, which has to be picklable, as one array job; submitit's jobs, one a task. Logs go into the run
    store."""
    executor = _executor(name, options, runs / LOGS, gpu=gpu)
    try:
        with executor.batch():
            return [executor.submit(ArrayTask(work)) for _ in range(min(options.gpus, cells))]
    except RuntimeError as error:  # sbatch refuses
        raise OSError(f"Slurm does not take the job: {error}") from error


def _executor(name: str, options: SlurmOptions, logs: Path, *, gpu: bool) -> Any:
    try:
        executor = _submitit().AutoExecutor(folder=logs, cluster=EXECUTOR, slurm_max_num_timeout=REQUEUES)
    except RuntimeError as error:  # no srun
        raise OSError(f"on 'slurm' has to be given where Slurm is: {error}") from error
    executor.update_parameters(
        name=f"naju-{name}",
        timeout_min=minutes(options.time),
        cpus_per_task=options.cpus,
        mem_gb=options.memory,
        gpus_per_node=1 if gpu else None,
        slurm_partition=options.partition,
        slurm_account=options.account,
        slurm_qos=options.qos,
        slurm_additional_parameters=options.more() or None,
    )
    return executor


def _submitit() -> Any:
    try:
        import submitit
    except ImportError as error:
        raise ImportError("on 'slurm' needs submitit; install with: pip install 'naju[slurm]'") from error
    return submitit
