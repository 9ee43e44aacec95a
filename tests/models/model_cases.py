"""Small models of every stack of mixers, tokens, and comparisons of what a model remembers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memories import D_MODEL, SMALL, assert_states_agree, difference, unsettle
from naju import Classifier, LanguageModel, ModelConfig, ModelState
from naju.mixers import MIXERS

VOCABULARY = 13
HYBRID = ["naju", "attention", "coupled"]
# Two layers of each mixer alone, and three different ones in one stack.
STACKS: dict[str, list[str]] = {name: [name, name] for name in MIXERS} | {"hybrid": HYBRID}


def small_config(layers: list[str], **options: Any) -> ModelConfig:
    mixer_options = {name: SMALL[name] for name in layers if name in SMALL}
    return ModelConfig(
        vocab_size=VOCABULARY,
        d_model=D_MODEL,
        n_layers=len(layers),
        mixer=layers,
        mixer_options=mixer_options,
        **({"embedding_std": 1.0} | options),
    )


def small_model(
    layers: list[str], dtype: torch.dtype = torch.float64, *, seed: int = 0, **options: Any
) -> LanguageModel:
    torch.manual_seed(seed)
    model = LanguageModel(small_config(layers, **options))
    unsettle(model)
    return model.to(dtype)


def small_classifier(layers: list[str], **options: Any) -> Classifier:
    torch.manual_seed(0)
    model = Classifier(small_config(layers, **options), 3)
    unsettle(model)
    return model.double()


def sentences(batch: int, length: int, *, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_same_memory(model: LanguageModel, got: ModelState, want: ModelState, tolerance: float) -> None:
    """The states read the same future alike; layers without a cache, which may hold padding, also agree as tensors."""
    probe = sentences(want.batch, 4, seed=3)
    assert difference(model(probe, got)[0], model(probe, want)[0]) <= tolerance
    for mine, theirs, block in zip(got.layers, want.layers, model.backbone.blocks, strict=True):
        if block.mixer.state_size is not None:
            assert_states_agree(mine, theirs, tolerance)
