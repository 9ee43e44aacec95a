"""What a training run is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """AdamW on fresh sequences; the defaults are the paper's shared protocol, `steps` excepted."""

    steps: int
    length: int = 512
    batch_size: int = 32
    lr: float = 3e-4
    weight_decay: float = 1e-4
    warmup_ratio: float = 0.05
    clip: float | None = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "length", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive integer, but is {getattr(self, name)}")
        if not 0 <= self.warmup_ratio <= 1:
            raise ValueError(f"warmup_ratio must lie in [0, 1], but is {self.warmup_ratio}")
        if not self.lr > 0:
            raise ValueError(f"lr must be positive, but is {self.lr}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be positive or None, but is {self.clip}")
