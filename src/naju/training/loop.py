"""The training loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from naju.tasks.base import Task
from naju.training.config import TrainConfig
from naju.training.optimizer import parameter_groups
from naju.training.schedule import cosine_with_warmup
from naju.training.seeding import seeded_generator


class Step(NamedTuple):
    """What one training step has to say; steps count from 1."""

    step: int
    loss: float
    lr: float


def train(
    model: nn.Module, task: Task, config: TrainConfig, on_step: Callable[[Step], None] = lambda step: None
) -> list[float]:
    """Train a classifier (tokens to logits) in place on fresh batches of a task; returns the loss at every step.

    The data depend on `config.seed` alone, so two models trained with one config see the same sequences.
    """
    device = next(model.parameters()).device
    data = seeded_generator(config.seed, "training data", device)
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=config.lr, weight_decay=config.weight_decay), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: cosine_with_warmup(step, config.steps, config.warmup_ratio)
    )
    model.train()
    losses: list[float] = []
    for step in range(1, config.steps + 1):
        batch = task.sample(config.batch_size, config.length, data)
        loss = F.cross_entropy(model(batch.tokens).float(), batch.targets)
        losses.append(_finite(loss.item(), step))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if config.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        lr = float(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
        on_step(Step(step, losses[-1], lr))
    return losses


def _finite(loss: float, step: int) -> float:
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss became {loss} at step {step}; a lower lr or a tighter clip may help")
    return loss
