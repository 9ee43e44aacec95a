"""`naju bench decode`: one token at a time, after contexts of growing length, beside the peers' own step kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from naju.bench.compare import (
    Failed,
    at_least_one,
    attempt,
    build_all,
    compare,
    default_modes,
    given_or_default,
    print_comparison,
    result_rows,
    sizes_of,
)
from naju.bench.measure import Run, default_device
from naju.bench.peers import PeerMissingError, check_names
from naju.bench.rows import RESULTS, save_rows, told
from naju.bench.shells import ResidualStack, build_stack
from naju.bench.work import rates, work_of_step
from naju.mixers import Mixer, State
from naju.models.backbone import ModelState
from naju.models.graphs import next_buffer, step_between

CONTEXTS = (1024, 16_384, 262_144, 1_048_576)
TOKENS = 8  # a run decodes this many, each fed the output before it
PIECE = 4096

Step = Callable[[Tensor, Any], tuple[Tensor, Any]]


@dataclass(frozen=True, kw_only=True)
class DecodeBench:
    """Time one decoding step of a residual stack; a recurrent memory should cost the same after any context."""

    models: tuple[str, ...] = ("naju", "mamba2", "mamba")
    """names from naju.bench.peers; one that cannot run here becomes a row with the reason"""
    batches: tuple[int, ...] = (1, 64)
    contexts: tuple[int, ...] | None = None
    """tokens that Naju has read, by default 1,024 to 1,048,576 on a GPU; peers begin with an empty memory"""
    n_layers: int = 4
    d_model: int = 256
    d_state: int = 64
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    modes: tuple[Literal["eager", "graph"], ...] = field(default_factory=default_modes)
    against: str = "mamba2"
    """the peer that every time is divided by"""
    rounds: int = 20
    """timed rounds, after a quarter as many untimed ones; every timed run follows an untimed one"""
    device: str = field(default_factory=default_device)
    out: Path = RESULTS
    """folder for the rows"""


def run_decode_bench(bench: DecodeBench) -> None:
    check_names((*bench.models, bench.against))
    contexts = given_or_default("contexts", bench.contexts, CONTEXTS, bench.device)
    stacks = build_all(bench.models, partial(build_stack, bench))
    decoders = {label: decoder for name, stack in stacks.items() for label, decoder in _decoders(name, stack, contexts)}
    if bench.against in bench.models and bench.against not in decoders:
        raise ValueError(
            f"against must be a peer that is timed once, but {bench.against!r} is timed after every context"
        )
    for batch in at_least_one("batches", bench.batches):
        path = save_rows("decode", _at_batch(bench, decoders, batch), bench.out)
    print(f"rows appended to {path}")


class Decoder(nn.Module):
    """A stack and the memory it starts from: Naju's after a context, a peer's own empty cache."""

    def __init__(self, stack: ResidualStack, context: int | None) -> None:
        super().__init__()
        self.stack, self.context, self.d_state = stack, context, stack.d_state
        self.read = None if context is None else _read(stack, context)

    def steps_and_states(self, batch: int) -> tuple[list[Step], list[Any]]:
        """For each layer what advances it by a token, and its state for a batch of this size."""
        mixers = [peer.mixer for peer in self.stack.peers]
        if self.read is None:
            return [_step_in_place(mixer) for mixer in mixers], [_cache(mixer, batch) for mixer in mixers]
        rows = torch.zeros(batch, dtype=torch.long)
        return [mixer.step for mixer in mixers], [state.reorder(rows) for state in self.read]  # type: ignore[misc]

    def states_of_one(self) -> list[list[Tensor]]:
        """What every layer keeps of one sequence, the memory first."""
        if self.read is None:
            return [list(reversed(_cache(peer.mixer, 1))) for peer in self.stack.peers]
        return [list(state.tensors().values()) for state in self.read]


def _decoders(name: str, stack: nn.Module | Failed, contexts: tuple[int, ...]) -> list[tuple[str, Decoder | Failed]]:
    """Naju once after every context, a peer once."""
    if isinstance(stack, Failed):
        return [(name, stack)]
    assert isinstance(stack, ResidualStack)
    if isinstance(stack.peers[0].mixer, Mixer):
        return [(f"{name} after {context:,}", attempt(partial(Decoder, stack, context))) for context in contexts]
    return [(name, Decoder(stack, None))]


def _pieces(stack: ResidualStack, context: int) -> Iterator[Tensor]:
    like = next(stack.norms.parameters())
    generator = torch.Generator(like.device).manual_seed(0)
    for start in range(0, context, PIECE):
        length = min(PIECE, context - start)
        yield torch.randn(1, length, len(like), generator=generator, device=like.device).to(like.dtype)


@torch.no_grad()
def _read(stack: ResidualStack, context: int) -> list[State]:
    """States of one sequence after `context` random inputs."""
    states: list[Any] = [None] * len(stack.peers)
    for u in _pieces(stack, context):
        for index, (norm, peer) in enumerate(zip(stack.norms, stack.peers, strict=True)):
            mixed, states[index] = peer.mixer(norm(u), states[index])
            u = u + mixed
    return states


def _cache(mixer: nn.Module, batch: int) -> tuple[Tensor, Tensor]:
    if not hasattr(mixer, "allocate_inference_cache"):
        raise PeerMissingError(f"{type(mixer).__name__} has no step for one token here")
    cache: tuple[Tensor, Tensor] = mixer.allocate_inference_cache(batch, 0)  # type: ignore[operator]
    return cache


def _step_in_place(mixer: nn.Module) -> Step:
    """A step of mamba_ssm: it takes a length of one and writes its cache."""

    def step(u: Tensor, cache: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, *_ = mixer.step(u.unsqueeze(1), *cache)  # type: ignore[operator]
        return out.squeeze(1), cache

    return step


def _at_batch(bench: DecodeBench, decoders: Mapping[str, Decoder | Failed], batch: int) -> list[dict[str, Any]]:
    shape = {"batch": batch, "n_layers": bench.n_layers, "d_model": bench.d_model, "dtype": bench.dtype}
    u = torch.randn(batch, bench.d_model, device=bench.device, dtype=getattr(torch, bench.dtype))
    results = compare(decoders, lambda decoder: _run(decoder, u), bench.modes, rounds=bench.rounds, device=bench.device)

    def about(name: str) -> dict[str, Any]:
        decoder = decoders[name]
        context = decoder.context if isinstance(decoder, Decoder) else None
        return {**shape, "context": context, "tokens_a_run": TOKENS, **sizes_of(decoder)}

    rows = result_rows(results, about, bench.against)
    sizes = {"batch": batch, "d_model": bench.d_model, "n_layers": bench.n_layers, "itemsize": u.itemsize}
    rows = [{"bench": "decode", **row, **_per_step(row, decoders[row["model"]], sizes)} for row in rows]
    print(f"\none decoding step, {told(shape)}")
    print_comparison(rows, bench.against, "microseconds_per_step", "us")
    return rows


def _per_step(row: Mapping[str, Any], decoder: Decoder | Failed, sizes: Mapping[str, int]) -> dict[str, float]:
    """Its time, and the work of as many steps as a run has."""
    if "median_s" not in row:
        return {}
    assert isinstance(decoder, Decoder)
    work = {name: TOKENS * one for name, one in work_of_step(decoder, decoder.states_of_one(), **sizes).items()}
    return {"microseconds_per_step": row["median_s"] / TOKENS * 1e6, **work, **rates({**row, **work})}


def _run(decoder: nn.Module, first: Tensor) -> Run:
    """TOKENS steps from where the run before ended. As a graph Naju decodes like `generate`, between two buffers;
    TOKENS is even, so that it ends in the one it began in."""
    assert isinstance(decoder, Decoder)
    steps, states = decoder.steps_and_states(len(first))
    step = partial(_token, decoder.stack, steps)
    own = ModelState(tuple(states))
    if decoder.read is None:  # a peer, which writes its own cache
        return torch.no_grad()(lambda: _plainly(step, first, own)[0])
    buffers = [own, next_buffer(own)]

    @torch.no_grad()
    def run() -> object:
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            u, after = _plainly(step, first, own)
            own.restore(after)
            return u
        u = first
        for _ in range(TOKENS):
            u = step_between(step, u, *buffers)
            buffers.reverse()
        return u

    return run


def _plainly(step: Step, u: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
    for _ in range(TOKENS):
        u, state = step(u, state)
    return u, state


def _token(stack: ResidualStack, steps: list[Step], u: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
    after = []
    for norm, step, layer in zip(stack.norms, steps, state.layers, strict=True):
        mixed, layer = step(norm(u), layer)
        u = u + mixed
        after.append(layer)
    return u, ModelState(tuple(after))
