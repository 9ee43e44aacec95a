"""The learning rate over a run."""

from __future__ import annotations

import math


def cosine_with_warmup(step: int, steps: int, warmup_ratio: float) -> float:
    """The factor on the learning rate at step 0 … steps-1: up linearly over the first share of steps, then half a
    cosine down to zero."""
    warmup = math.ceil(warmup_ratio * steps)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
