"""`naju lm layers`: how much every layer adds to what it reads, and how much of that Naju's layers take from memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from naju.analysis import layer_sizes
from naju.lm.batches import read_batch
from naju.lm.folder import load_model
from naju.lm.token_files import TokenSplit, open_split
from naju.models.device import usable_device


@dataclass(frozen=True, kw_only=True)
class LayersConfig:
    """What every layer of a model adds on a text, and where Naju's layers take it from."""

    model: Path
    """Folder with config.json and model.safetensors."""
    data: Path = Path("data")
    """Folder that `naju lm prepare` has written."""
    split: str = "validation"
    length: int = 512
    """Tokens of each stretch, which is read from an empty state."""
    sequences: int = 4
    """How many stretches are read, from the beginning of the split."""
    device: str = "auto"
    """auto is the GPU where there is one."""

    def __post_init__(self) -> None:
        for name in ("length", "sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive integer, but is {getattr(self, name)}")


def run_layers(config: LayersConfig) -> None:
    device = usable_device(config.device)
    model = load_model(config.model, device).eval()
    tokens = _tokens(open_split(config.data, config.split), config.sequences, config.length)
    print("layer     reads      adds    memory  write gate  read from x  fed through")
    for number, layer in enumerate(layer_sizes(model.backbone, tokens.to(device))):
        told = f"{number:5}  {layer.reads:8.3f}  {layer.adds:8.3f}"
        if layer.sources is not None:
            memory, write, read, fed_through = layer.sources
            told += f"  {memory:8.1f}  {write:10.3f}  {read:11.3f}  {fed_through:11.3f}"
        print(told)
    print("sizes are root mean squares; memory is in tokens, until 1/e of a write is left at the median forget gate")


def _tokens(split: TokenSplit, sequences: int, length: int) -> Tensor:
    if sequences * length > len(split.tokens):
        raise ValueError(
            f"sequences times length must be at most the split's {len(split.tokens):,} tokens, "
            f"but is {sequences * length:,}"
        )
    return read_batch(split, np.arange(sequences) * length, length, reset=False).tokens
