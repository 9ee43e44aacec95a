"""Checkpoints without pickle: one safetensors file with a checksum, and the one before it in case it is damaged."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from naju.training.files import write_whole

NEWEST, BEFORE = "checkpoint.safetensors", "checkpoint.before.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """`tensors` are named `model.*`, `optimizer.*` and `loop.*`; a finished run keeps the first kind only."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    def model(self) -> dict[str, Tensor]:
        """For `load_state_dict` of the model alone."""
        prefix = "model."
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}


class Checkpoints:
    """The last `keep` checkpoints of one run. `allow` is called before every write and may refuse by raising."""

    def __init__(self, folder: Path, allow: Callable[[], None] = lambda: None, keep: int = 2) -> None:
        if keep < 2:
            raise ValueError(f"keep must be at least 2, so that one is good while another is written, but is {keep}")
        older = [folder / BEFORE.replace("before", f"before-{age}") for age in range(2, keep)]
        self.paths, self.allow = [folder / NEWEST, folder / BEFORE, *older], allow

    def save(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Killed at any moment, this leaves a good file under one of the names."""
        content = _in_file(tensors, facts)
        self.allow()
        newest = self.paths[0]
        fresh = newest.with_name(f"{newest.name}.fresh")
        write_whole(fresh, content)
        for older, newer in itertools.pairwise(reversed(self.paths)):
            if newer.exists():
                os.replace(newer, older)
        os.replace(fresh, newest)

    def load(self, report: Callable[[str], None]) -> Checkpoint | None:
        """The newest good one; a damaged one is reported and put aside, lest it take a good one's place later."""
        for path in self.paths:
            if path.exists():
                try:
                    return read_checkpoint(path)
                except ValueError as error:
                    aside = path.with_name(f"{path.name}.damaged")
                    report(f"{error}; it is kept as {aside.name}")
                    os.replace(path, aside)
        return None

    def keep_only(self, checkpoint: Checkpoint) -> None:
        """Put a smaller one in place of all; the newest is there all the time."""
        self.allow()
        write_whole(self.paths[0], _in_file(checkpoint.tensors, checkpoint.facts))
        for path in self.paths[1:]:
            path.unlink(missing_ok=True)


def read_checkpoint(path: Path) -> Checkpoint:
    """A damaged file is a ValueError that names it."""
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except SafetensorError as error:
        raise ValueError(f"checkpoint {path.name} is damaged: {error}") from error
    facts = about.get("facts", "")
    if about.get("checksum") != _checksum(tensors, facts):
        raise ValueError(f"checkpoint {path.name} is damaged: its checksum does not fit its content")
    return Checkpoint(tensors, json.loads(facts))


def _in_file(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> bytes:
    own = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    told = json.dumps(facts)
    return save(own, {"facts": told, "checksum": _checksum(own, told)})


def _checksum(tensors: Mapping[str, Tensor], facts: str) -> str:
    digest = hashlib.blake2b(facts.encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
