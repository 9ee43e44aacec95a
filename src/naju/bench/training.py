"""`naju bench training`: tokens a second of a language model's training step, with each mixer in the same shell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from naju.bench.compare import (
    COMPILE_MODE,
    Failed,
    Mode,
    build_all,
    compare,
    given_or_default,
    print_comparison,
    result_rows,
    sizes_of,
)
from naju.bench.measure import Run, default_device
from naju.bench.peers import USUAL, check_names
from naju.bench.rows import RESULTS, save_rows, told
from naju.bench.shells import LanguageShell, ResidualStack
from naju.bench.work import rates, work_of

LENGTHS = (1024, 2048, 4096)


@dataclass(frozen=True, kw_only=True)
class TrainingBench:
    """Time a training step (forward and backward of some micro-steps, then AdamW) of a small language model, on as many
    tokens at any length."""

    models: tuple[str, ...] = USUAL
    """names from naju.bench.peers; one that cannot run here becomes a row with the reason"""
    lengths: tuple[int, ...] | None = None
    """by default 1024, 2048 and 4096 on a GPU"""
    tokens: int = 8192
    """tokens a micro-step: the batch is this over the length"""
    micro_steps: int = 4
    """an AdamW update comes after this many, 4 in the paper; one timed step is all of it"""
    n_layers: int = 6
    d_model: int = 256
    d_state: int = 64
    vocab_size: int = 50_257
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """weights are float32; bfloat16 is by autocast"""
    modes: tuple[Literal["eager", "compiled"], ...] = ("eager", "compiled")
    compile_mode: str = COMPILE_MODE
    """torch.compile's, for the mode "compiled"; max-autotune tunes for minutes at every shape, default is quicker"""
    against: str = "mamba2"
    """the peer that every time is divided by"""
    rounds: int = 200
    """timed steps, by default the paper's 200 after 50 untimed ones (always a quarter as many); every timed step
    follows an untimed one"""
    device: str = field(default_factory=default_device)
    out: Path = RESULTS
    """folder for the rows"""


def run_training_bench(bench: TrainingBench) -> None:
    check_names((*bench.models, bench.against))
    lengths = given_or_default("lengths", bench.lengths, LENGTHS, bench.device)
    for length in lengths:
        if bench.tokens % length != 0:
            raise ValueError(
                f"tokens must be a multiple of every length, but is {bench.tokens} with a length of {length}"
            )
    modules = build_all(bench.models, lambda name: _shell(bench, name))
    for length in lengths:
        path = save_rows("training", _at_length(bench, modules, length), bench.out)
    print(f"rows appended to {path}")


def _shell(bench: TrainingBench, name: str) -> nn.Module:
    stack = ResidualStack(name, n_layers=bench.n_layers, d_model=bench.d_model, d_state=bench.d_state)
    return LanguageShell(stack, d_model=bench.d_model, vocab_size=bench.vocab_size).to(bench.device)


def _at_length(bench: TrainingBench, modules: Mapping[str, nn.Module | Failed], length: int) -> list[dict[str, Any]]:
    batch = bench.tokens // length
    shape: dict[str, Any] = {"batch": batch, "length": length, "n_layers": bench.n_layers, "d_model": bench.d_model}
    shape |= {"vocab_size": bench.vocab_size, "dtype": bench.dtype, "micro_steps": bench.micro_steps}
    tokens = torch.randint(bench.vocab_size, (batch, length + 1), device=bench.device)
    dtype = getattr(torch, bench.dtype)
    modes: tuple[Mode, ...] = bench.modes
    results = compare(
        modules,
        lambda module: training_step(module, module.parameters(), tokens, dtype, bench.micro_steps),
        modes,
        rounds=bench.rounds,
        device=bench.device,
        compile_mode=bench.compile_mode,
    )
    sizes = {"tokens": bench.tokens, "length": length, "d_model": bench.d_model, "n_layers": bench.n_layers}

    def about(name: str) -> dict[str, Any]:
        work = work_of(modules[name], **sizes, itemsize=dtype.itemsize, passes=3 * bench.micro_steps)
        return {**shape, **sizes_of(modules[name]), **work}

    rows = result_rows(results, about, bench.against, bench.compile_mode)
    rows = [{"bench": "training", **row, **_throughput(row, bench), **rates(row)} for row in rows]
    print(f"\ntraining step (micro-steps of forward and backward, AdamW), {told(shape)}")
    print_comparison(rows, bench.against, "tokens_per_s", "tokens/s")
    return rows


def _throughput(row: Mapping[str, Any], bench: TrainingBench) -> dict[str, float]:
    return {"tokens_per_s": bench.micro_steps * bench.tokens / row["median_s"]} if "median_s" in row else {}


def training_step(
    logits_of: Callable[[Tensor], Tensor],
    parameters: Iterable[nn.Parameter],
    tokens: Tensor,
    dtype: torch.dtype,
    micro_steps: int = 1,
) -> Run:
    """Next-token loss on `tokens` (b, l + 1) and its gradients, `micro_steps` times, and an AdamW step, to which the
    gradients' sum is as good as their mean; below float32 under autocast."""
    learned = list(parameters)
    optimizer = torch.optim.AdamW(learned, lr=1e-4, fused=tokens.is_cuda)

    def micro_step() -> Tensor:
        with torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32):
            logits = logits_of(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    def step() -> object:
        if micro_steps > 1:
            _begin_sums(learned)
        losses = [micro_step() for _ in range(micro_steps)]
        optimizer.step()
        optimizer.zero_grad()
        return losses[-1]

    return step


def _begin_sums(parameters: Sequence[nn.Parameter]) -> None:
    """Memory for the gradients of several micro-steps. The first one's would otherwise be kept where they lie, which in
    a CUDA graph is where its next replay writes."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
