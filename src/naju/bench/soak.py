"""`naju bench soak`: does a process that reads for hours stay as it was? And do a thousand streams keep their states?

Each promise is looked at as a number and, where it was not kept, becomes a sentence: those are the command's failure.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from naju.bench.measure import process_bytes
from naju.bench.rows import RESULTS, print_table, save_rows
from naju.models import LanguageModel, ModelConfig
from naju.models.backbone import ModelState

WINDOWS = 40
LONGEST_PIECE = 2048
GROUP = 32
# Two ways of computing the same thing in float32: streams are read in other batches and pieces than alone.
SAME = 1e-5


@dataclass(frozen=True, kw_only=True)
class SoakBench:
    """Stream tokens through one model in one process, then a thousand streams that are saved and restored at random."""

    tokens: int = 10_000_000
    streams: int = 1000
    """streams that take turns"""
    turns: int = 8
    """how often each stream is read on"""
    turn_tokens: int = 16
    """tokens of one turn"""
    mixer: str = "naju"
    n_layers: int = 2
    d_model: int = 64
    d_state: int = 16
    vocab_size: int = 256
    memory_growth: float = 0.02
    """share by which memory may grow after the first window"""
    slowdown: float = 0.1
    """share by which a token may take more processor time in the last quarter than in the first"""
    seed: int = 0
    out: Path = RESULTS
    """folder for the rows"""

    def __post_init__(self) -> None:
        if self.tokens < WINDOWS:
            raise ValueError(f"tokens must be at least {WINDOWS}, but is {self.tokens}")
        for name in ("streams", "turns", "turn_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive integer, but is {getattr(self, name)}")


@dataclass(frozen=True)
class Soaked:
    """What one long stream did; shares are relative to the first window, or to the first quarter of them."""

    tokens: int
    seconds: float
    tokens_per_s: float
    resident_bytes: int
    memory_growth: float
    slowdown: float
    largest_state: float


@dataclass(frozen=True)
class Shuffled:
    """What many streams did; `worst_error` is that of the state farthest from the same stream's, read in one go."""

    streams: int
    turns: int
    saves: int
    restores: int
    mixed_up: int
    worst_error: float


def run_soak_bench(bench: SoakBench) -> None:
    model = build(bench)
    soaked, shuffled = soak(bench, model), shuffle_streams(bench, model)
    about = {name: getattr(bench, name) for name in ("mixer", "n_layers", "d_model", "d_state", "vocab_size", "seed")}
    for name, result in (("soak", asdict(soaked)), ("soaked streams", asdict(shuffled))):
        path = save_rows("soak", [{"bench": name, **about, **result}], bench.out)
        print(name)
        print_table([result], list(result))
    print(f"rows appended to {path}")
    complaints = broken_promises(bench, soaked, shuffled)
    if complaints:
        print(*complaints, sep="\n", file=sys.stderr)
        sys.exit(1)


def build(bench: SoakBench) -> LanguageModel:
    torch.manual_seed(bench.seed)
    options = {"d_state": bench.d_state}
    return LanguageModel(ModelConfig(bench.vocab_size, bench.d_model, bench.n_layers, bench.mixer, options)).eval()


def broken_promises(bench: SoakBench, soaked: Soaked, shuffled: Shuffled) -> list[str]:
    """A sentence for each promise that was not kept."""
    promises = {
        f"memory grew by {soaked.memory_growth:.1%}": soaked.memory_growth <= bench.memory_growth,
        f"a token became slower by {soaked.slowdown:.1%}": soaked.slowdown <= bench.slowdown,
        f"the largest value of the state is {soaked.largest_state}": math.isfinite(soaked.largest_state),
        f"{shuffled.mixed_up} of {shuffled.streams} streams have a state that is not theirs": shuffled.mixed_up == 0,
    }
    return [complaint for complaint, kept in promises.items() if not kept]


@torch.no_grad()
def soak(bench: SoakBench, model: LanguageModel) -> Soaked:
    """One stream in pieces of 1 to 2,048 tokens, the same sizes in every window so that windows can be compared."""
    noise = torch.Generator().manual_seed(bench.seed)
    sizes = piece_sizes(bench.tokens // WINDOWS, bench.seed)
    state, largest = model.init_state(1), 0.0
    memory, cost, began = [], [], time.perf_counter()
    for _ in tqdm(range(WINDOWS), desc="windows", leave=False, disable=None):
        start = time.process_time()
        for size in sizes:
            state = read(model, torch.randint(bench.vocab_size, (1, size), generator=noise), state)
        cost.append((time.process_time() - start) / sum(sizes))
        memory.append(process_bytes("VmRSS"))
        largest = largest_value(state, largest)
    seconds, tokens = time.perf_counter() - began, WINDOWS * sum(sizes)
    quarter = WINDOWS // 4
    return Soaked(
        tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        resident_bytes=memory[-1],
        memory_growth=max(memory[1:]) / memory[0] - 1,
        slowdown=statistics.median(cost[-quarter:]) / statistics.median(cost[:quarter]) - 1,
        largest_state=largest,
    )


def piece_sizes(tokens: int, seed: int) -> list[int]:
    """Sizes that add up to `tokens`, as many between 1 and 10 as between 100 and 1,000."""
    rng, sizes = random.Random(seed), []
    while tokens > 0:
        sizes.append(min(tokens, round(LONGEST_PIECE ** rng.random())))
        tokens -= sizes[-1]
    return sizes


def read(model: LanguageModel, tokens: Tensor, state: ModelState) -> ModelState:
    """A single token as generation reads it."""
    return model.step(tokens[:, 0], state)[1] if tokens.shape[1] == 1 else model(tokens, state)[1]


def largest_value(state: ModelState, before: float) -> float:
    """NaN, once seen, stays."""
    values = [float(tensor.abs().max()) for tensor in state.tensors().values()]
    return math.nan if any(math.isnan(value) for value in (before, *values)) else max(before, *values)


@torch.no_grad()
def shuffle_streams(bench: SoakBench, model: LanguageModel) -> Shuffled:
    """Streams are read on in random groups, and half of a group goes into files until its next turn."""
    rng, noise = random.Random(bench.seed), torch.Generator().manual_seed(bench.seed)
    tokens = torch.randint(bench.vocab_size, (bench.streams, bench.turns, bench.turn_tokens), generator=noise)
    turns_done = [0] * bench.streams
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(model.init_state(bench.streams), Path(folder))
        while waiting := [stream for stream, done in enumerate(turns_done) if done < bench.turns]:
            group = rng.sample(waiting, min(GROUP, len(waiting)))
            their_tokens = tokens[group, [turns_done[stream] for stream in group]]
            pool.put(group, read(model, their_tokens, pool.get(group)))
            pool.put_away([stream for stream in group if rng.random() < 0.5])
            for stream in group:
                turns_done[stream] += 1
        errors = row_errors(pool.get(range(bench.streams)), model(tokens.flatten(1))[1])
    return Shuffled(
        streams=bench.streams,
        turns=sum(turns_done),
        saves=pool.saves,
        restores=pool.restores,
        mixed_up=int((~(errors <= SAME)).sum()),
        worst_error=float(errors.max()),
    )


class Pool:
    """The state of every stream: a row in memory, or a file; a row whose stream is in a file is NaN."""

    def __init__(self, state: ModelState, folder: Path) -> None:
        self.state, self.folder = state, folder
        self.saves = self.restores = 0

    def get(self, streams: Sequence[int]) -> ModelState:
        for stream in streams:
            file = self._file(stream)
            if file.exists():
                self.state[stream].restore(ModelState.load(file))
                file.unlink()
                self.restores += 1
        return self.state[torch.tensor(streams)]

    def put(self, streams: Sequence[int], state: ModelState) -> None:
        for row, stream in enumerate(streams):
            self.state[stream].restore(state[row])

    def put_away(self, streams: Sequence[int]) -> None:
        for stream in streams:
            self.state[stream].save(self._file(stream))
            self.state[stream].map(lambda tensor: tensor.fill_(math.nan))  # rows are views
            self.saves += 1

    def _file(self, stream: int) -> Path:
        return self.folder / f"{stream}.safetensors"


def row_errors(got: ModelState, want: ModelState) -> Tensor:
    """The relative error of each stream's state."""
    have, wanted = (torch.cat([t.flatten(1) for t in state.tensors().values()], dim=1) for state in (got, want))
    errors: Tensor = (have - wanted).norm(dim=1) / wanted.norm(dim=1)
    return errors
