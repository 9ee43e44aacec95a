"""What a language-model run is made of: the model, the protocol it is trained by, and how it is carried out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from naju.models import ModelConfig
from naju.models.device import usable_device
from naju.training import TrainConfig

# What the paper's language models differ in from the mixers' own defaults.
PAPER_OPTIONS: Mapping[str, Mapping[str, Any]] = {"transformer": {"positions": "rotary"}}


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Tied embeddings and pre-norm blocks around any registered mixer."""

    mixer: str = "naju"
    """registered mixer: naju, mamba, mamba2, transformer (rotary, 4x feed-forward), ..."""
    options: tuple[str, ...] = ()
    """options of the mixer as name=value, such as gate_rank=64, gate_reparam=true, d_state=64"""
    d_model: int = 256
    n_layers: int = 6

    def mixer_options(self) -> dict[str, Any]:
        return {**PAPER_OPTIONS.get(self.mixer, {}), **parse_options(self.options)}

    def config(self, vocab_size: int) -> ModelConfig:
        return ModelConfig(vocab_size, self.d_model, self.n_layers, self.mixer, self.mixer_options())


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The paper's, which leaves weight decay and betas open: these are the usual ones for language models.

    All of it, with the model and the data, determines a run; nothing of `Execution` does, but for rounding.
    """

    length: int = 1024
    """tokens of context"""
    tokens: int = 1_200_000_000
    """budget: target tokens of the whole run"""
    tokens_per_update: int = 32_768
    """target tokens of one optimizer step"""
    lr: float = 4e-3
    """peak of the cosine schedule"""
    warmup_ratio: float = 0.05
    """share of the updates in which the rate rises linearly"""
    weight_decay: float = 0.1
    """of matrices only: biases (those of the gates among them), D, A_log and norms have none; see --decay-all"""
    decay_all: bool = False
    """weight decay on every parameter"""
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float | None = 1.0
    """largest norm of the gradient; None leaves it as it is"""
    seed: int = 0
    """of the parameters and of the order of the text, which is the same for every mixer"""
    documents: Literal["run-on", "reset"] = "run-on"
    """whether the state runs on from one document to the next or is reset where one begins"""
    carry_state: bool = False
    """read the text in order and carry the state from update to update, without its gradient"""

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length must be a positive integer, but is {self.length}")
        if self.tokens_per_update < 1 or self.tokens_per_update % self.length != 0:
            raise ValueError(
                f"tokens_per_update must be a positive multiple of the length {self.length}, "
                f"but is {self.tokens_per_update}"
            )
        if self.tokens < self.tokens_per_update:
            raise ValueError(
                f"tokens must allow one update of {self.tokens_per_update:,} tokens, but is {self.tokens:,}"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), but are {', '.join(map(str, self.betas))}")
        self.training(bf16=False)

    @property
    def rows(self) -> int:
        """Sequences of one update."""
        return self.tokens_per_update // self.length

    @property
    def updates(self) -> int:
        return self.tokens // self.tokens_per_update

    def training(self, *, bf16: bool) -> TrainConfig:
        return TrainConfig(
            steps=self.updates,
            length=self.length,
            batch_size=self.rows,
            lr=self.lr,
            weight_decay=self.weight_decay,
            decay_all=self.decay_all,
            warmup_ratio=self.warmup_ratio,
            clip=self.clip,
            seed=self.seed,
            bf16=bf16,
        )


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a run is carried out; under `torchrun` on as many processes as that starts."""

    device: str = "auto"
    """auto is the GPU where there is one, of `LOCAL_RANK` under torchrun"""
    precision: Literal["auto", "bf16", "float32"] = "auto"
    """bf16 is autocast around float32 weights; auto is bf16 on a GPU"""
    micro_tokens: int = 32_768
    """most tokens a process reads at once; gradients of several such micro-batches add up to an update"""
    compile: bool = False
    """torch.compile of every block"""
    cuda_graph: Literal["auto", "on", "off"] = "auto"
    """record an update as one CUDA graph, so that launching its kernels takes no time; auto is on with one GPU, unless
    documents reset the state"""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """fsdp shards weights, gradients and optimizer, and saves sharded checkpoints, also with one process"""
    context_ranks: int = 1
    """processes that share one sequence, each with a stretch of it, the state handed from one to the next"""
    log_every: int = 10
    """updates from one line of metrics.jsonl to the next"""
    validations: int = 20
    """how often the run is validated, evenly spread"""
    save_seconds: float = 300.0
    """seconds from one checkpoint to the next; every validation saves one too"""
    keep: int = 3
    """checkpoints to keep; the best model is kept beside them"""

    def __post_init__(self) -> None:
        for name in ("micro_tokens", "context_ranks", "log_every", "validations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive integer, but is {getattr(self, name)}")
        if self.keep < 2:
            raise ValueError(f"keep must be at least 2, so that one is good if another is not, but is {self.keep}")
        if self.parallel == "fsdp" and self.context_ranks > 1:
            raise ValueError(
                f"context_ranks must be 1 with parallel 'fsdp', but is {self.context_ranks}: shards are gathered in "
                "lockstep, which would make the processes of one sequence wait for each other"
            )

    def chosen_device(self, local_rank: int) -> torch.device:
        device = usable_device(self.device)
        return torch.device("cuda", local_rank) if self.device == "auto" and device.type == "cuda" else device

    def uses_bf16(self, device: torch.device) -> bool:
        return self.precision == "bf16" or (self.precision == "auto" and device.type == "cuda")


@dataclass(frozen=True, kw_only=True)
class LanguageRun:
    """One run on one text."""

    data: Path
    """folder that `naju lm prepare` wrote"""
    model: ModelSettings = field(default_factory=ModelSettings)
    protocol: Protocol = field(default_factory=Protocol)
    execution: Execution = field(default_factory=Execution)

    def __post_init__(self) -> None:
        if self.protocol.carry_state and self.execution.context_ranks > 1:
            raise ValueError(
                f"carry_state must be off with context_ranks {self.execution.context_ranks}: the state at the end of a "
                "sequence is not on the process that reads the next one's beginning"
            )

    def to_json(self) -> dict[str, Any]:
        """All that determines the run, the data's content excepted, without nesting."""
        model = {**asdict(self.model), "options": self.model.mixer_options()}
        return {**model, **asdict(self.protocol), "betas": list(self.protocol.betas)}


def parse_options(texts: Iterable[str]) -> dict[str, Any]:
    """Each `name=value` once, with the value as JSON has it, or else as a string."""
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ValueError(f"options must look like name=value, but one is {text!r}")
        if name in options:
            raise ValueError(f"options has {name} twice: {options[name]} and {value}")
        options[name] = _value(name, value)
    return options


def _value(name: str, text: str) -> Any:
    """Infinite numbers, which JSON has no word for, could not be written into the run's files."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"options must be finite, but {name} is {text}") from error
    return value
