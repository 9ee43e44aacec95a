"""Timing and memory: the same few lines under every benchmark."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender over all rounds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The middle half of the rounds: first and third quartile."""
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        first, _, third = statistics.quantiles(self.seconds, n=4)
        return first, third


def time_in_turn(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Run every contender in every round, so that a disturbance of the machine falls on all alike.

    Its timed run follows an untimed one: what its predecessor left in the caches and in the allocator is not its doing.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, but is {rounds}")
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in tqdm(range(rounds), desc="rounds", leave=False, disable=None):
        for name, run in contenders.items():
            run()
            _wait_for_device()
            start = time.perf_counter()
            run()
            _wait_for_device()
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes(run: Callable[[], object]) -> int | None:
    """How far `run` raises the memory of this process at its highest, or None where the system does not tell."""
    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # hand freed memory back, or the run would reuse it unseen
        Path("/proc/self/clear_refs").write_text("5")  # forget the highest mark so far
        before = _status("VmRSS")
        result = run()
        peak = _status("VmHWM") - before
        del result
    except (OSError, KeyError, AttributeError):
        return None
    return peak


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)
