"""A language model as a folder: `config.json` with the fields of its ModelConfig, and `model.safetensors`."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from naju.models import LanguageModel, ModelConfig
from naju.training.files import write_whole

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def save_model(model: LanguageModel, folder: str | os.PathLike[str]) -> None:
    """Write the model, in place of one that is there; a tied embedding is stored once.

    Killed at any moment, this leaves the old model, the new one, or, where their configs differ, a folder without a
    config, which `load_model` refuses: never the weights of one under the config of the other.
    """
    folder, described = Path(folder), _described(model.config)
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / CONFIG
    if config.exists() and config.read_bytes() != described:
        config.unlink()
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    write_whole(folder / WEIGHTS, save(tensors, {"format": "pt"}))
    write_whole(config, described)


def load_model(folder: str | os.PathLike[str], device: str | torch.device = "cpu") -> LanguageModel:
    """The model that `save_model` wrote, in the precision it was saved in."""
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            hint = "; its best one is in best/" if (folder / "best" / WEIGHTS).is_file() else ""
            raise FileNotFoundError(f"{folder} holds no language model: it has no {name}{hint}")
    config, weights = _read_config(folder / CONFIG), _read_weights(folder / WEIGHTS)
    if config.n_layers > len(weights):  # before a model of any size that a file may claim is built
        raise ValueError(f"{folder / WEIGHTS} has {len(weights)} tensors, too few for {config.n_layers} layers")
    try:
        with torch.device("meta"):  # every value comes from the file
            model = LanguageModel(config)
        model.load_state_dict(weights, assign=True)
    except (RuntimeError, OverflowError, TypeError) as error:
        told = " ".join(str(error).split())[:500]
        raise ValueError(f"{folder / WEIGHTS} does not fit its {CONFIG}: {told}") from error
    return model.to(device)


def is_huggingface(config: Path) -> bool:
    """Whether this is the config.json of a Hugging Face model."""
    if not config.is_file():
        return False
    described = _read_json(config)
    return isinstance(described, dict) and "model_type" in described


def _described(config: ModelConfig) -> bytes:
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return (json.dumps(values, indent=1, allow_nan=False, default=_plain) + "\n").encode()


def _plain(value: Any) -> Any:
    """Mappings and sequences of kinds that JSON has no word for."""
    return dict(value) if hasattr(value, "keys") else list(value)


def _read_config(path: Path) -> ModelConfig:
    if is_huggingface(path):
        raise ValueError(f"{path} is of a Hugging Face model; `naju lm export --to plain` makes a plain folder of it")
    try:
        return ModelConfig(**_read_json(path))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} does not hold the fields of a ModelConfig: {error}") from error


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a readable JSON file: {error}") from error


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
