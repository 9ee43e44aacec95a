"""The loop under every comparison with peers: the same run made of each module, timed in turn, in each mode.

What fails is a result: a peer that is missing, runs out of memory or cannot be captured becomes a row with the reason.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn

from naju.bench.measure import Run, Timing, captured, first_call_seconds, peak_bytes, time_in_turn
from naju.bench.peers import PeerMissingError
from naju.bench.rows import RATES, give_or_take, print_table, timing_row, told_rates

T = TypeVar("T")
Name = TypeVar("Name")
Mode = Literal["eager", "graph", "compiled"]
Make = Callable[[nn.Module], Run]
# Shorter runs are repeated to fill this many seconds, or the clock's grain and a launch's jitter would show.
SHORTEST_TIMED = 0.005
# The paper's. Its CUDA graphs suit both benches: they read weights where they lie, so that they see what the optimizer
# wrote there; gradients, which lie in a graph's memory, are dropped or added to others before its next replay; each
# call copies its input.
COMPILE_MODE = "max-autotune"
OUT_OF_MEMORY = "out of memory"  # as the reason in a row
ROUNDS_A_WARM_UP = 4  # as in the paper: 5 forward passes come before 20 timed ones, and 50 training steps before 200


@dataclass(frozen=True)
class Failed:
    """Why a contender has no result."""

    reason: str


@dataclass(frozen=True)
class Trial:
    """A run that can run. `first_call_s` includes what it had to compile and to tune."""

    run: Run
    first_call_s: float | None
    peak_bytes: int | None


@dataclass(frozen=True)
class Measured:
    """A contender in one mode."""

    timing: Timing
    first_call_s: float | None
    peak_bytes: int | None


Results = dict[tuple[str, Mode], Measured | Failed]


def attempt(action: Callable[[], T]) -> T | Failed:
    """The action's result or, in one line, why there is none."""
    try:
        return action()
    except torch.OutOfMemoryError:
        failed = Failed(OUT_OF_MEMORY)
    except PeerMissingError as error:
        failed = Failed(str(error))
    except Exception as error:  # whatever a peer raises is its result
        first_line = str(error).strip().partition("\n")[0]
        failed = Failed(f"{type(error).__name__}: {first_line}"[:300])
    _forget()
    return failed


def first_try(run: Run, device: str) -> Trial:
    """Shows whether it can run at all, and what that takes."""
    return Trial(run, first_call_seconds(run), peak_bytes(run, device))


def measure_in_turn(tried: Mapping[Name, Trial | Failed], rounds: int) -> dict[Name, Measured | Failed]:
    """Every trial timed beside the others. One that fails there, for want of the memory that they hold, is out."""
    failed = {name: trial for name, trial in tried.items() if isinstance(trial, Failed)}
    trials = {name: trial for name, trial in tried.items() if isinstance(trial, Trial)}

    def run_or_out(name: Name) -> None:
        if name not in failed:
            outcome = attempt(trials[name].run)
            if isinstance(outcome, Failed):
                failed[name] = outcome

    runs = {name: partial(run_or_out, name) for name in trials}
    timings = time_in_turn(runs, rounds, SHORTEST_TIMED, warm_up=rounds // ROUNDS_A_WARM_UP)
    measured = {name: Measured(timings[name], trial.first_call_s, trial.peak_bytes) for name, trial in trials.items()}
    return {name: failed.get(name) or measured[name] for name in tried}


def build_all(names: Sequence[str], build: Callable[[str], nn.Module]) -> dict[str, nn.Module | Failed]:
    """Each module, drawn from the same seed."""

    def seeded(name: str) -> nn.Module:
        torch.manual_seed(0)
        return build(name)

    return {name: attempt(partial(seeded, name)) for name in names}


def compare(
    modules: Mapping[str, nn.Module | Failed],
    make: Make,
    modes: Sequence[Mode],
    *,
    rounds: int,
    device: str,
    compile_mode: str = COMPILE_MODE,
) -> Results:
    """Results of every module in every mode; modules that failed to be built pass their reason on."""
    return {
        (name, mode): result
        for mode in modes
        for name, result in _in_mode(modules, make, mode, rounds, device, compile_mode).items()
    }


def _in_mode(
    modules: Mapping[str, nn.Module | Failed], make: Make, mode: Mode, rounds: int, device: str, compile_mode: str
) -> dict[str, Measured | Failed]:
    tried = {
        name: module if isinstance(module, Failed) else attempt(partial(_try, module, make, mode, device, compile_mode))
        for name, module in modules.items()
    }
    results = measure_in_turn(tried, rounds)
    tried.clear()
    if mode == "compiled":
        torch.compiler.reset()  # or the next sizes would count as a change of these and compile for any size
    _forget()
    return results


def _try(module: nn.Module, make: Make, mode: Mode, device: str, compile_mode: str) -> Trial:
    if mode == "graph":
        return Trial(captured(make(module)), None, None)  # a replay compiles and allocates nothing
    if mode == "compiled":
        module = cast(nn.Module, torch.compile(module, mode=compile_mode))
    return first_try(make(module), device)


def _forget() -> None:
    """Hand back what a failed or finished contender held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def result_rows(
    results: Results, about: Callable[[str], Mapping[str, Any]], against: str, compile_mode: str = COMPILE_MODE
) -> list[dict[str, Any]]:
    """A row for each result: what `about` says of the contender, then its time and ratio to one peer, or a reason."""
    rows = []
    for (name, mode), result in results.items():
        row: dict[str, Any] = {"model": name, "mode": mode}
        row |= {"compile_mode": compile_mode} if mode == "compiled" else {}
        row |= about(name)
        if isinstance(result, Failed):
            rows.append(row | {"reason": result.reason})
            continue
        peer = results.get((against, mode))
        ratio = result.timing.median / peer.timing.median if isinstance(peer, Measured) else None
        rows.append(row | measured_row(result) | {f"time_over_{against}": ratio})
    return rows


def measured_row(measured: Measured) -> dict[str, Any]:
    row = timing_row(measured.timing)
    row["warm_up"] = row["rounds"] // ROUNDS_A_WARM_UP
    return row | {"first_call_s": measured.first_call_s, "peak_bytes": measured.peak_bytes}


def print_comparison(rows: Sequence[Mapping[str, Any]], against: str, key: str, unit: str, scale: float = 1.0) -> None:
    """A line for each model: for every mode `key` times `scale` and its time over the peer's; then the best rates of
    all modes, the most memory, and reasons."""
    lines: dict[str, dict[str, Any]] = {}
    for row in rows:
        line = lines.setdefault(row["model"], {"model": row["model"], "N": row["d_state"]})
        mode = row["mode"]
        if "reason" in row:
            line["reason"] = row["reason"]
            continue
        line[f"{mode} {unit}"] = give_or_take(row, key, scale)
        line[f"{mode} / {against}"] = row[f"time_over_{against}"]
        if row["peak_bytes"] is not None:
            line["MB"] = max(line.get("MB", 0.0), row["peak_bytes"] / 1e6)
        line |= {heading: max(line.get(heading, 0.0), rate) for heading, rate in told_rates(row).items()}
    modes = dict.fromkeys(row["mode"] for row in rows)
    columns = [column for mode in modes for column in (f"{mode} {unit}", f"{mode} / {against}")]
    print(f"± is half the distance between the quartiles; / {against} is a ratio of times")
    print_table(list(lines.values()), ["model", "N", *columns, *RATES, "MB", "reason"])


def sizes_of(module: nn.Module | Failed) -> dict[str, Any]:
    """What a row says of a model's size: its own N and its parameters."""
    if isinstance(module, Failed):
        return {"d_state": None, "parameters": None}
    return {"d_state": getattr(module, "d_state", None), "parameters": sum(p.numel() for p in module.parameters())}


def default_modes() -> tuple[Literal["eager", "graph"], ...]:
    return ("eager", "graph") if torch.cuda.is_available() else ("eager",)


def given_or_default(
    name: str, given: tuple[int, ...] | None, default: tuple[int, ...], device: str
) -> tuple[int, ...]:
    """The defaults are a GPU's; elsewhere they would take hours, so sizes have to be chosen."""
    if given is None and torch.device(device).type != "cuda":
        option = f"--{name.replace('_', '-')}"
        raise ValueError(
            f"{name} has defaults for a GPU only, and the device is {device}: give smaller ones by {option}"
        )
    return at_least_one(name, default if given is None else given)


def check_sizes(bench: Any) -> None:
    """Of the options of any bench: all whole numbers but the seed are sizes and counts, and positive."""
    for name, value in vars(bench).items():
        for number in value if isinstance(value, tuple) else (value,):
            if name != "seed" and type(number) is int and number < 1:
                raise ValueError(f"{name} must be at least 1, but is {number}")


def at_least_one(name: str, values: tuple[T, ...], kind: str = "number") -> tuple[T, ...]:
    if not values:
        raise ValueError(f"{name} must hold at least one {kind}, but is empty")
    return values
