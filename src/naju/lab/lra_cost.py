"""What one training step of the arena costs at full length, in time and memory, with and without checkpointing."""

from __future__ import annotations

import time
from statistics import median
from typing import NamedTuple

import torch

from naju.lab.lra import SETTINGS
from naju.lab.lra_run import LraModel
from naju.tasks.lra import LraTask
from naju.training import Learner, TrainConfig

WARM_UP = 3


class StepCost(NamedTuple):
    seconds: float  # median
    peak_bytes: int | None  # on a GPU: of the step and all that stays between steps


def step_cost(
    task: LraTask, mixer: str, *, checkpoint_blocks: bool, batch_size: int = 32, rounds: int = 10, device: str = "cuda"
) -> StepCost:
    """Of the paper's model on random tokens without any padding, which is the most that a step can cost."""
    model = LraModel(mixer=mixer, mixer_options=SETTINGS.get(mixer, {}), checkpoint_blocks=checkpoint_blocks)
    steps = WARM_UP + rounds
    training = TrainConfig(steps=steps, length=task.length, batch_size=batch_size, bf16=device == "cuda")
    learner = Learner(model.build(task, seed=0).to(device), training)
    shape = (batch_size, 2, task.length) if task.has_pairs else (batch_size, task.length)
    tokens = torch.randint(1, task.vocab_size, shape, device=device)
    targets = torch.randint(task.n_classes, (batch_size,), device=device)
    seconds = [_timed(learner, tokens, targets) for _ in range(steps)]
    peak = torch.cuda.max_memory_allocated() if learner.device.type == "cuda" else None
    return StepCost(median(seconds[WARM_UP:]), peak)


def _timed(learner: Learner, tokens: torch.Tensor, targets: torch.Tensor) -> float:
    """Forward, backward and the optimizer's step, until the device is done."""
    if learner.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    learner.learn(tokens, targets).item()
    return time.perf_counter() - began
