"""Timing and memory: the same few lines under every benchmark."""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from tqdm import tqdm

if sys.platform == "linux":
    import resource

Run = Callable[[], object]
Name = TypeVar("Name")
MOST_RUNS = 1000


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


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def time_in_turn(
    contenders: Mapping[Name, Run], rounds: int, at_least: float = 0.0, warm_up: int = 0
) -> dict[Name, Timing]:
    """Run every contender in every round, so that a disturbance of the machine falls on all alike.

    Its timed run follows an untimed one: what its predecessor left in the caches and in the allocator is not its doing.
    A timed run shorter than `at_least` seconds is repeated to fill them, and its share is what counts. `warm_up` rounds
    without a timed run come first.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, but is {rounds}")
    repeats = {name: _repeats(run, at_least) for name, run in contenders.items()}
    seconds: dict[Name, list[float]] = {name: [] for name in contenders}
    for _ in range(warm_up):
        for run in contenders.values():
            run()
    for _ in tqdm(range(rounds), desc="rounds", leave=False, disable=None):
        for name, run in contenders.items():
            run()
            seconds[name].append(_seconds(run, repeats[name]) / repeats[name])
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def _repeats(run: Run, at_least: float) -> int:
    if at_least <= 0:
        return 1
    return min(MOST_RUNS, max(1, math.ceil(at_least / max(_seconds(run, 1), 1e-9))))


def _seconds(run: Run, repeats: int) -> float:
    """On a GPU by its own clock, which waiting for the device does not disturb."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def first_call_seconds(run: Run) -> float:
    """Wall time of a call that may still have to compile or to tune itself."""
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def captured(run: Run) -> Run:
    """`run` as one CUDA graph. It runs on a side stream first, as capture requires, to compile and tune its kernels."""
    if not torch.cuda.is_available():
        raise RuntimeError("a CUDA graph needs an NVIDIA GPU")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return _Replay(graph, run)


@dataclass(frozen=True)
class _Replay:
    """A graph, and the run whose tensors it reads by their address: they must live as long."""

    graph: torch.cuda.CUDAGraph
    run: Run

    def __call__(self) -> None:
        self.graph.replay()


def peak_bytes(run: Run, device: str = "cpu") -> int | None:
    """How far `run` raises the memory in use at its highest, or None where the system does not tell.

    On a GPU this is torch's memory, elsewhere the process's; what was there before, such as weights, does not count.
    """
    gc.collect()
    return _peak_on_gpu(run) if torch.device(device).type == "cuda" else _peak_of_process(run)


def _peak_on_gpu(run: Run) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _peak_of_process(run: Run) -> int | None:
    try:
        ctypes.CDLL(None).malloc_trim(0)  # hand freed memory back, or the run would reuse it unseen
        Path("/proc/self/clear_refs").write_text("5")  # forget the highest mark so far
        before = process_bytes("VmRSS")
        result = run()
        peak = process_bytes("VmHWM") - before
        del result
    except (OSError, KeyError, AttributeError):
        return None
    return peak


def process_bytes(key: str) -> int:
    """Memory of this process by its name in /proc/self/status; a KeyError or OSError where the system does not tell."""
    return _told_bytes("/proc/self/status", key)


def free_bytes() -> int | None:
    """Memory that can be had without taking any from others, or None where the system does not tell."""
    try:
        return _told_bytes("/proc/meminfo", "MemAvailable")
    except (OSError, KeyError):
        return None


def _told_bytes(path: str, key: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def limit_memory(most: int) -> None:
    """From now on this process is refused what goes beyond `most` bytes, where the system has such limits (Linux).
    Otherwise Linux grants it and, when there is no more, kills some process, not always this one."""
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
