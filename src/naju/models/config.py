"""What a model is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class ModelConfig:
    """A backbone of pre-norm blocks over a token embedding.

    `mixer` is one name for all layers or a list with one a layer (hybrids); `mixer_options` go to every mixer;
    for a hybrid they are a mapping from a mixer's name to its options. `embedding_std=None` means the usual choice of
    the head on top: 0.02 where the embedding also makes the logits, 1 elsewhere. `pooling` is what a classifier reads:
    the "last" real position or the "mean" of all. `checkpoint_blocks` keeps only the blocks' inputs for the backward
    pass, which computes the rest a second time.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    mixer: str | Sequence[str] = "naju"
    mixer_options: Mapping[str, Any] = field(default_factory=dict)
    tie_embeddings: bool = True
    _: KW_ONLY
    bidirectional: bool = False
    norm_eps: float = 1e-5
    embedding_std: float | None = None
    pooling: Literal["last", "mean"] = "last"
    checkpoint_blocks: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, but is {value!r}")
        names = (self.mixer,) if isinstance(self.mixer, str) else self.mixer
        if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"mixer must be a name or a list of names, but is {self.mixer!r}")
        if not isinstance(self.mixer, str) and len(names) != self.n_layers:
            raise ValueError(f"mixer names {len(names)} layers, but n_layers is {self.n_layers}")
        if not isinstance(self.mixer_options, Mapping):
            raise TypeError(f"mixer_options must be a mapping, but is {self.mixer_options!r}")
        for name, value in self._numbers().items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number from 0 on, but is {value!r}")
        if self.pooling not in ("last", "mean"):
            raise ValueError(f"pooling must be 'last' or 'mean', but is {self.pooling!r}")

    def _numbers(self) -> dict[str, Any]:
        given = {} if self.embedding_std is None else {"embedding_std": self.embedding_std}
        return {"norm_eps": self.norm_eps, **given}

    @property
    def mixers(self) -> tuple[str, ...]:
        """The mixer's name, layer by layer."""
        return (self.mixer,) * self.n_layers if isinstance(self.mixer, str) else tuple(self.mixer)

    def options_of(self, name: str) -> dict[str, Any]:
        """The options of the layers that use this mixer."""
        if isinstance(self.mixer, str):
            return dict(self.mixer_options)
        strangers = set(self.mixer_options) - set(self.mixers)
        if strangers:
            raise ValueError(f"mixer_options of a hybrid are keyed by mixer name; unknown: {', '.join(strangers)}")
        own = self.mixer_options.get(name, {})
        if not isinstance(own, Mapping):
            raise TypeError(f"mixer_options of {name!r} must be a mapping, but are {own!r}")
        return dict(own)
