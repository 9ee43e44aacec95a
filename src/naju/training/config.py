"""What a training run is made of."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """AdamW; the defaults are the paper's shared protocol, `steps` excepted.

    `sequences` is the size of a training set that is drawn once and shuffled every epoch; None draws fresh sequences
    at every step. `decay_all` is weight decay on every parameter, biases, norms and the gates' biases among them;
    without it, on matrices alone. `bf16` runs the model under bfloat16 autocast.
    """

    steps: int
    length: int = 512
    batch_size: int = 32
    lr: float = 3e-4
    weight_decay: float = 1e-4
    decay_all: bool = True
    warmup_ratio: float = 0.05
    clip: float | None = 1.0
    seed: int = 0
    sequences: int | None = None
    bf16: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "length", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive integer, but is {getattr(self, name)}")
        if not 0 <= self.warmup_ratio <= 1:
            raise ValueError(f"warmup_ratio must lie in [0, 1], but is {self.warmup_ratio}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be {'finite' if self.lr > 0 else 'positive'}, but is {self.lr}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be finite and not negative, but is {self.weight_decay}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be positive or None, but is {self.clip}")
        if self.sequences is not None and self.sequences < self.batch_size:
            raise ValueError(f"sequences must fill a batch of {self.batch_size}, but is {self.sequences}")

    @property
    def epoch_steps(self) -> int:
        """Steps of one epoch; what does not fill a batch waits for the next shuffle."""
        if self.sequences is None:
            raise ValueError("sequences is None: fresh sequences have no epochs")
        return self.sequences // self.batch_size

    def to_json(self) -> dict[str, Any]:
        """Without `decay_all` where it holds: configs of before there was a choice mean the same."""
        fields = asdict(self)
        if self.decay_all:
            del fields["decay_all"]
        return fields


@dataclass(frozen=True, kw_only=True)
class Rhythm:
    """How often a run speaks, in steps, and saves itself, in seconds; no result depends on it but the metrics' lines.

    Every `validate_every` is a log point too.
    """

    log_every: int
    validate_every: int
    save_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("log_every", "validate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive integer, but is {getattr(self, name)}")

    def logs(self, step: int, last: int) -> bool:
        return step == last or step % self.log_every == 0 or self.validates(step, last)

    def validates(self, step: int, last: int) -> bool:
        return step == last or step % self.validate_every == 0
