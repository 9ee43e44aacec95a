"""`naju bench model`: training and decoding steps beside transformers' Mamba-2, and cost per token as context grows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from naju.bench.measure import Run, time_in_turn
from naju.bench.peers import mamba2_config
from naju.bench.rows import (
    RESULTS,
    package_version,
    print_table,
    rows_by_length,
    save_rows,
    timing_row,
    told,
    with_spread,
)
from naju.bench.training import training_step
from naju.models import LanguageModel, ModelConfig

PEER = "mamba2 (transformers, torch path)"
STEPS = 50  # that a round decodes


@dataclass(frozen=True, kw_only=True)
class ModelBench:
    """Time training and decoding steps of a small language model against Mamba-2's, and reading as context grows."""

    batch: int = 4
    length: int = 512
    d_model: int = 128
    n_layers: int = 4
    d_state: int = 64
    vocab_size: int = 512
    rounds: int = 7
    """timed rounds; every timed run follows an untimed one"""
    lengths: tuple[int, ...] = field(default=(1024, 4096, 16384, 65536))
    """lengths at which time and memory per token are measured (batch 1, forward, no gradient)"""
    contexts: tuple[int, ...] = field(default=(100, 100_000))
    """context lengths after which one decoding step is timed"""
    out: Path = RESULTS
    """folder for the rows"""


def run_model_bench(bench: ModelBench) -> None:
    torch.manual_seed(0)
    model = LanguageModel(
        ModelConfig(
            vocab_size=bench.vocab_size,
            d_model=bench.d_model,
            n_layers=bench.n_layers,
            mixer_options={"d_state": bench.d_state},
        )
    )
    rows = _training(bench, model) + _reading(bench, model) + _decoding(bench, model)
    print(f"rows appended to {save_rows('model', rows, bench.out)}")


def _training(bench: ModelBench, model: LanguageModel) -> list[dict[str, Any]]:
    tokens = torch.randint(bench.vocab_size, (bench.batch, bench.length + 1))
    contenders = {"naju": training_step(lambda inputs: model(inputs)[0], model.parameters(), tokens, torch.float32)}
    peer = _mamba2(bench)
    if peer is None:
        print(f"{PEER} is left out: transformers is not installed (pip install 'naju[hf]')")
    else:
        contenders[PEER] = training_step(
            lambda inputs: peer(inputs, use_cache=False).logits, peer.parameters(), tokens, torch.float32
        )
    timings = time_in_turn(contenders, bench.rounds)
    shape = {"batch": bench.batch, "length": bench.length, "d_model": bench.d_model, "n_layers": bench.n_layers}
    shape |= {"d_state": bench.d_state, "vocab_size": bench.vocab_size}
    rows = [
        {"bench": "model training step", "model": name, **shape, "dtype": "float32"}
        | timing_row(timing)
        | {"time_over_naju": timing.median / timings["naju"].median}
        for name, timing in timings.items()
    ]
    print(f"training step (forward, backward, AdamW), float32, {told(shape)}")
    print_table(with_spread(rows, "median_s"), ["model", "median_s", "time_over_naju"])
    return rows


def _mamba2(bench: ModelBench) -> nn.Module | None:
    """The peer at the same width, depth, state size and vocabulary; it says on stderr that it has no fast kernels."""
    if package_version("transformers") is None:
        return None
    from transformers import Mamba2ForCausalLM

    config = mamba2_config(
        d_model=bench.d_model, d_state=bench.d_state, n_layers=bench.n_layers, vocab_size=bench.vocab_size
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Mamba2ForCausalLM(config)


def _reading(bench: ModelBench, model: LanguageModel) -> list[dict[str, Any]]:
    def at(length: int) -> Run:
        return torch.no_grad()(partial(model, torch.randint(bench.vocab_size, (1, length))))

    return rows_by_length(at, bench.lengths, bench.rounds, {"bench": "model forward by length", "model": "naju"})


def _decoding(bench: ModelBench, model: LanguageModel) -> list[dict[str, Any]]:
    def after(context: int) -> Callable[[], object]:
        _, state = model.prefill(torch.randint(bench.vocab_size, (1, context)))
        return lambda: _decode(model.step, state)

    contenders = {("naju", context): after(context) for context in bench.contexts}
    peer = _mamba2(bench)
    if peer is not None:
        contenders[PEER, bench.contexts[0]] = _peer_decoding(
            peer, torch.randint(bench.vocab_size, (1, bench.contexts[0]))
        )
    timings = time_in_turn(contenders, bench.rounds)
    first = timings["naju", bench.contexts[0]].median
    rows = [
        {"bench": "model decoding step", "model": name, "batch": 1, "context": context}
        | timing_row(timing)
        | {"microseconds_per_token": timing.median / STEPS * 1e6, "time_over_naju": timing.median / first}
        for (name, context), timing in timings.items()
    ]
    print(f"\none decoding step, batch 1 ({STEPS} steps a round)")
    lines = with_spread(rows, "microseconds_per_token")
    print_table(lines, ["model", "context", "microseconds_per_token", "time_over_naju"])
    return rows


@torch.no_grad()
def _peer_decoding(peer: nn.Module, prompt: Tensor) -> Callable[[], object]:
    """Goes on from where the round before it ended: the cache is one object, and no larger for it."""
    cache = peer(prompt, use_cache=True).cache_params

    def step(token: Tensor, cache: Any) -> tuple[Tensor, Any]:
        return peer(token.unsqueeze(1), cache_params=cache, use_cache=True).logits[:, 0], cache

    return lambda: _decode(step, cache)


@torch.no_grad()
def _decode(step: Callable[[Tensor, Any], tuple[Tensor, Any]], state: Any) -> Tensor:
    token = torch.zeros(1, dtype=torch.long)
    for _ in range(STEPS):
        logits, state = step(token, state)
        token = logits.argmax(-1)
    return token
