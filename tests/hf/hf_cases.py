"""Small models of every stack, plain and wrapped, and the plain results to compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memories import D_MODEL, SMALL, unsettle
from naju import LanguageModel, ModelConfig
from naju.hf import NajuForCausalLM
from naju.mixers import MIXERS

VOCABULARY = 19
PAD = 0
STACKS: dict[str, list[str]] = {name: [name, name] for name in MIXERS} | {"hybrid": ["naju", "attention", "coupled"]}


def small_config(stack: str = "naju", **options: Any) -> ModelConfig:
    layers = STACKS[stack]
    return ModelConfig(
        vocab_size=VOCABULARY,
        d_model=D_MODEL,
        n_layers=len(layers),
        mixer=layers,
        mixer_options={name: SMALL[name] for name in layers if name in SMALL},
        **({"embedding_std": 1.0} | options),
    )


def plain_model(stack: str = "naju", dtype: torch.dtype = torch.float64, **options: Any) -> LanguageModel:
    """With every parameter away from where it starts, so that losing one shows."""
    torch.manual_seed(0)
    model = LanguageModel(small_config(stack, **options))
    unsettle(model)
    return model.to(dtype).eval()


def wrapped_model(stack: str = "naju", dtype: torch.dtype = torch.float64, **options: Any) -> NajuForCausalLM:
    return NajuForCausalLM.from_plain(plain_model(stack, dtype, **options), pad_token_id=PAD)


def sentences(batch: int, length: int, *, seed: int = 1) -> Tensor:
    """Tokens other than PAD."""
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Prompts of these lengths with padding before them, and their mask."""
    longest = max(lengths)
    mask = torch.stack([(torch.arange(longest) >= longest - length).long() for length in lengths])
    return sentences(len(lengths), longest).masked_fill(mask == 0, PAD), mask
