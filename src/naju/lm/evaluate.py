"""`naju lm eval`: how well a model predicts a text, overall and by how much it has read before.

The text is cut into windows, each read from an empty state. Inside a window the state is carried from piece to piece,
so that a window may be as long as the text itself and memory stays the same, attention layers excepted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from naju.lm.batches import Batch, read_batch
from naju.lm.folder import load_model
from naju.lm.loss import CHUNK_LOGITS, IGNORED, LARGEST_LOSS, perplexity
from naju.lm.token_files import TokenSplit, open_split, read_manifest
from naju.lm.tokenizer import TOKENIZER, load_tokenizer
from naju.models import LanguageModel, ModelState
from naju.models.device import usable_device
from naju.training.files import write_json

PIECE = 1024


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Perplexity of a model on prepared text, and its loss by position."""

    model: Path
    """Folder with config.json and model.safetensors."""
    data: Path = Path("data")
    """Folder that `naju lm prepare` has written."""
    split: str = "validation"
    length: int = 1024
    """Tokens that are read with one state, which starts empty; 0 reads the whole split with one."""
    documents: Literal["run-on", "reset"] = "run-on"
    """Whether the state runs on from one document to the next or is reset where one begins."""
    batch: int = 8
    """How many such stretches are read side by side."""
    out: Path | None = None
    """JSON file for the result, the loss at every position included."""
    device: str = "auto"
    """auto is the GPU where there is one."""
    bf16: bool = False
    """Products in bfloat16."""

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ValueError(f"length must be positive, or 0 for the whole split, but is {self.length}")
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1, but is {self.batch}")
        if self.out is not None and not self.out.parent.is_dir():
            raise ValueError(f"out must lie in a folder that exists, but is {self.out}")


@dataclass(frozen=True)
class Evaluation:
    """Losses in nats, summed over `counts` tokens for every number of tokens read before: 1, 2, ..."""

    sums: NDArray[np.float64]
    counts: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def loss(self) -> float:
        return self.between(0, len(self.sums))

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    def between(self, start: int, stop: int) -> float:
        """Mean loss at some positions."""
        return float(self.sums[start:stop].sum() / self.counts[start:stop].sum())

    def doubling(self) -> Iterator[tuple[int, int]]:
        """Ranges of positions that end at 1, 2, 4, 8, ... and at the last."""
        start = 0
        while start < len(self.sums):
            stop = min(max(1, 2 * start), len(self.sums))
            yield start, stop
            start = stop


def run_evaluate(config: EvaluateConfig) -> None:
    model = load_model(config.model, usable_device(config.device)).eval()
    split = open_split(config.data, config.split)
    _check_tokenizer(config.model / TOKENIZER, config.data)
    reset = config.documents == "reset"
    result = evaluate(model, split, length=config.length or None, reset=reset, batch=config.batch, bf16=config.bf16)
    if not result.loss < LARGEST_LOSS:
        raise FloatingPointError(f"the loss is {result.loss}, which has no finite perplexity: the weights are damaged")
    print(f"{'tokens read':>15}  {'loss':>7}  {'perplexity':>10}")
    for start, stop in result.doubling():
        loss = result.between(start, stop)
        before = f"{stop:,}" if stop == start + 1 else f"{start + 1:,}-{stop:,}"
        print(f"{before:>15}  {loss:7.4f}  {perplexity(loss):10.3f}")
    print(f"{config.split}: perplexity {result.perplexity:.3f}, loss {result.loss:.4f} over {result.tokens:,} tokens")
    if config.out is not None:
        write_json(config.out, _written(config, result))


def _check_tokenizer(of_model: Path, data: Path) -> None:
    """Where both say which one they have: equal ids of different tokens would give a number without a meaning."""
    of_data = read_manifest(data).get("tokenizer")
    if of_data is None or not of_model.is_file():
        return
    same = hashlib.sha256(of_model.read_bytes()).hexdigest() == of_data["sha256"]
    if not same and not load_tokenizer(of_model).has_the_ids_of(load_tokenizer(data)):
        raise ValueError(f"data must have the tokens of the model, but {data} and {of_model} have other tokenizers")


def _written(config: EvaluateConfig, result: Evaluation) -> dict[str, Any]:
    return {
        "model": str(config.model),
        "data": str(config.data),
        "split": config.split,
        "length": config.length,
        "documents": config.documents,
        "tokens": result.tokens,
        "loss": result.loss,
        "perplexity": result.perplexity,
        "loss_by_position": (result.sums / result.counts).tolist(),
    }


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    split: TokenSplit,
    *,
    length: int | None = None,
    reset: bool = False,
    batch: int = 8,
    bf16: bool = False,
) -> Evaluation:
    """Every token but the first is predicted once. `length=None` reads the whole split with one state; `reset` empties
    it where a document begins."""
    if split.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"the model must know the {split.vocab_size:,} tokens of the data, but its vocabulary has "
            f"{model.config.vocab_size:,}"
        )
    total = len(split.tokens) - 1
    if total < 1:
        raise ValueError("the split must hold at least two tokens, but has one")
    length = min(length or total, total)
    device = model.backbone.embedding.weight.device
    sums = torch.zeros(length, dtype=torch.float64, device=device)
    counts = torch.zeros(length, dtype=torch.int64, device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16), tqdm(total=total, disable=None, unit="tok") as bar:
        for starts in _groups(np.arange(0, total, length), batch):
            for position, losses, real in _read(model, split, starts, length, reset):
                here = slice(position, position + losses.shape[1])
                sums[here] += losses.sum(0, dtype=torch.float64)
                counts[here] += real.sum(0)
                bar.update(losses.numel())
    return Evaluation(sums.cpu().numpy(), counts.cpu().numpy())


def _groups(starts: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    return (starts[first : first + size] for first in range(0, len(starts), size))


def _read(
    model: LanguageModel, split: TokenSplit, starts: NDArray[np.int64], length: int, reset: bool
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Windows side by side, piece after piece: the piece's position, its losses (b, l), and which targets exist."""
    state, device = model.init_state(len(starts)), model.backbone.embedding.weight.device
    for position in range(0, length, PIECE):
        if starts[0] + position + 1 >= len(split.tokens):
            return
        piece = min(PIECE, length - position)
        batch = read_batch(split, starts + position, piece, reset=reset).to(device)
        features, state = _features(model, batch, state)
        yield position, token_losses(model, features, batch.targets), batch.targets != IGNORED


def _features(model: LanguageModel, batch: Batch, state: ModelState) -> tuple[Tensor, ModelState]:
    """Features (b, l, m) and the state after each row."""
    if batch.packing is None:
        features, after = model.backbone(batch.tokens, state)
        return features, after
    opened = batch.packing.open(state, model.init_state(1))
    features, after = model.backbone(batch.tokens.reshape(1, -1), opened, None, batch.packing.cu_seqlens)
    return features.view(*batch.tokens.shape, -1), batch.packing.close(after)


def token_losses(model: LanguageModel, features: Tensor, targets: Tensor) -> Tensor:
    """The loss of every target (b, l), 0 where it is IGNORED; logits exist for some of them at a time."""
    rows = max(1, CHUNK_LOGITS // model.config.vocab_size)
    chunks = zip(features.flatten(0, 1).split(rows), targets.flatten().long().split(rows), strict=True)
    losses = [F.cross_entropy(model.logits(f).float(), t, ignore_index=IGNORED, reduction="none") for f, t in chunks]
    return torch.cat(losses).view(targets.shape)
