"""The fields of ModelConfig under a Hugging Face config."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig

from naju.models import ModelConfig


class NajuConfig(PreTrainedConfig):
    """A ModelConfig by its own names, except for `tie_embeddings`, which is `tie_word_embeddings` here."""

    model_type = "naju"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "tie_embeddings": "tie_word_embeddings",
    }

    vocab_size: int = 50257
    d_model: int = 256
    n_layers: int = 6
    mixer: str | list[str] = "naju"
    mixer_options: dict[str, Any] = field(default_factory=dict)
    tie_word_embeddings: bool = True
    bidirectional: bool = False
    norm_eps: float = 1e-5
    embedding_std: float | None = None
    pooling: str = "last"
    checkpoint_blocks: bool = False
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.to_plain()  # refuses what makes no model

    def to_plain(self) -> ModelConfig:
        return ModelConfig(**{known.name: getattr(self, known.name) for known in fields(ModelConfig)})

    @classmethod
    def from_plain(cls, config: ModelConfig, **others: Any) -> Self:
        """`others` are fields that only this config has, such as token ids."""
        values = {known.name: getattr(config, known.name) for known in fields(config)}
        values["mixer"] = config.mixer if isinstance(config.mixer, str) else list(config.mixer)
        values["mixer_options"] = dict(config.mixer_options)
        return cls(**values, **others)
