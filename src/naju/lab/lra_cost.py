"""`naju bench lra`: what one training step of the arena costs in time and memory, with and without checkpointing.

Every measurement has a process of its own, so that its memory is that of one model, and running out of it ends nothing
else.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from naju.bench.compare import at_least_one
from naju.bench.measure import Timing, default_device, free_bytes, limit_memory, process_bytes
from naju.bench.rows import RESULTS, print_table, save_rows, timing_row
from naju.lab.lra import COMPARED, SETTINGS
from naju.lab.lra_run import OUT_OF_MEMORY, LraModel, ran_out_of_memory
from naju.lab.options import check_names
from naju.mixers import MIXERS
from naju.tasks.lra import LRA, LraTask
from naju.training import Learner, TrainConfig
from naju.training.children import deaf_to_ctrl_c, end_with_parent

WARM_UP = 3  # untimed steps
TAKEN = 0.75  # of the memory that is free; the rest is left to others

Dtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True, kw_only=True)
class LraBench:
    """Measure a training step of the Long Range Arena at full length, with and without checkpointing of the blocks."""

    task: str = "retrieval"
    mixers: tuple[str, ...] = ("naju",)
    batches: tuple[int, ...] = (32,)
    """examples a step; one of Retrieval has two sequences"""
    dtypes: tuple[Dtype, ...] | None = None
    """weights are float32, bfloat16 is by autocast; by default as in training: bfloat16 on a GPU, else float32"""
    length: int | None = None
    """tokens of a sequence, by default as many as the task's longest have"""
    rounds: int = 3
    """timed steps, after untimed ones"""
    memory: float | None = None
    """GB that a step on a CPU may take before it counts as out of memory, by default three quarters of what is free"""
    device: str = field(default_factory=default_device)
    out: Path = RESULTS
    """folder for the rows"""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One thing to be measured."""

    task: LraTask
    model: LraModel
    batch: int
    dtype: Dtype
    rounds: int
    device: str
    most_bytes: int | None  # of the process, on a CPU

    def about(self) -> dict[str, Any]:
        model = self.model
        return {
            "bench": "lra step",
            "task": self.task.name,
            "mixer": model.mixer,
            "batch": self.batch,
            "sequences": self.batch * (1 + self.task.has_pairs),
            "length": self.task.length,
            "d_model": model.d_model,
            "n_layers": model.n_layers,
            "d_state": model.mixer_options.get("d_state"),
            "checkpointed": model.checkpoint_blocks,
            "dtype": self.dtype,
            "most_bytes": self.most_bytes,
        }


class StepCost(NamedTuple):
    timing: Timing
    processor: Timing  # seconds of all cores: what others do on the machine does not count
    peak_bytes: int | None  # of the whole process; on a GPU of what torch holds there


def run_lra_bench(bench: LraBench) -> None:
    rows = []
    for step in steps(bench):
        rows.append(step.about() | _told(measured(step)))
        path = save_rows("lra", rows[-1:], bench.out)
    shown = [row | {"GB": row["peak_bytes"] and row["peak_bytes"] / 1e9} for row in rows]
    print_table(shown, ["task", "mixer", "batch", "dtype", "checkpointed", "median_s", "processor_s", "GB", "reason"])
    print(f"rows appended to {path}")


def steps(bench: LraBench) -> list[Step]:
    check_names("task", [bench.task], LRA)
    check_names("mixers", bench.mixers, MIXERS)
    device = torch.device(bench.device).type
    task = replace(LRA[bench.task], length=bench.length or LRA[bench.task].length)
    dtypes: Sequence[Dtype] = bench.dtypes or (("bfloat16",) if device == "cuda" else ("float32",))
    most_bytes = _most_bytes(bench.memory) if device == "cpu" else None
    kinds = product(bench.mixers or COMPARED[:1], at_least_one("batches", bench.batches), dtypes, (True, False))
    return [
        Step(
            task=task,
            model=_model(mixer, checkpointed),
            batch=batch,
            dtype=dtype,
            rounds=bench.rounds,
            device=bench.device,
            most_bytes=most_bytes,
        )
        for mixer, batch, dtype, checkpointed in kinds
    ]


def _model(mixer: str, checkpointed: bool) -> LraModel:
    return LraModel(mixer=mixer, mixer_options=SETTINGS.get(mixer, {}), checkpoint_blocks=checkpointed)


def _most_bytes(gigabytes: float | None) -> int | None:
    if gigabytes is None:
        free = free_bytes()
        return None if free is None else int(TAKEN * free)
    if not 0 < gigabytes < 1e9:
        raise ValueError(f"memory must be a positive number of gigabytes, but is {gigabytes}")
    return int(gigabytes * 1e9)


def _told(cost: StepCost | str) -> dict[str, Any]:
    if isinstance(cost, str):
        return {"median_s": None, "peak_bytes": None, "reason": cost}
    return timing_row(cost.timing) | {"processor_s": cost.processor.median, "peak_bytes": cost.peak_bytes}


def measured(step: Step) -> StepCost | str:
    """In a fresh process: the cost, or that memory did not suffice."""
    context = multiprocessing.get_context("spawn")
    line, theirs = context.Pipe()
    process = context.Process(target=_measure, args=(step, theirs), daemon=True)
    with deaf_to_ctrl_c():
        process.start()
    theirs.close()
    try:
        cost: StepCost | str = line.recv()
    except (EOFError, OSError) as error:
        process.join()
        if process.exitcode == -signal.SIGKILL:
            return f"{OUT_OF_MEMORY}: the system ended the process"
        raise ChildProcessError("the process of this bench died; what it said is above") from error
    process.join()
    return cost


def _measure(step: Step, line: Connection) -> None:
    end_with_parent()
    if step.most_bytes is not None:
        limit_memory(step.most_bytes)
    try:
        cost: StepCost | str = step_cost(step)
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        cost = OUT_OF_MEMORY
    line.send(cost)


def step_cost(step: Step) -> StepCost:
    """Of the paper's model on random tokens without any padding, which is the most that a step can cost."""
    task, device = step.task, torch.device(step.device)
    config = TrainConfig(
        steps=WARM_UP + step.rounds, length=task.length, batch_size=step.batch, bf16=step.dtype == "bfloat16"
    )
    learner = Learner(step.model.build(task, seed=0).to(device), config)
    learner.model.train()
    shape = (step.batch, 2, task.length) if task.has_pairs else (step.batch, task.length)
    tokens = torch.randint(1, task.vocab_size, shape, device=device)
    targets = torch.randint(task.n_classes, (step.batch,), device=device)
    # A GPU's allocator has to see the whole step before it is timed; on a CPU one example loads all there is to load.
    some = slice(None) if device.type == "cuda" else slice(1)
    for _ in range(WARM_UP):
        _timed(learner, tokens[some], targets[some])
    seconds, processor = zip(*(_timed(learner, tokens, targets) for _ in range(step.rounds)), strict=True)
    return StepCost(Timing(seconds), Timing(processor), _peak_bytes(device))


def _timed(learner: Learner, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
    """Forward, backward and the optimizer's step, until the device is done: by the clock, and on all cores."""
    if learner.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began, worked = time.perf_counter(), time.process_time()
    learner.learn(tokens, targets).item()
    return time.perf_counter() - began, time.process_time() - worked


def _peak_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    try:
        return process_bytes("VmHWM")
    except (OSError, KeyError):
        return None
