"""Checkpoints of a sharded model: every process writes its part, and any other number of processes can read them.

Each is a folder of torch's distributed checkpoint format. Its metadata is a pickle, so load only what you trust.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from naju.lm.distributed import Place
from naju.training.checkpoint import Checkpoint
from naju.training.files import sync_folder, write_json

FOLDER, COMPLETE = "sharded", "complete.json"


class ShardedCheckpoints:
    """The last `keep` of one run. `tensors` gives tensors like those that will be loaded, sharded as they will be."""

    def __init__(
        self,
        folder: Path,
        place: Place,
        tensors: Callable[[], Mapping[str, Tensor]],
        *,
        allow: Callable[[], None] = lambda: None,
        keep: int = 2,
    ) -> None:
        self.folder, self.place, self.tensors, self.allow, self.keep = folder / FOLDER, place, tensors, allow, keep

    def save(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """All processes together; the folder gets its name when all of it is there."""
        whole = self.folder / f"step-{facts['step']:09d}"
        partial = whole.with_name(f".{whole.name}.partial")
        if self.place.is_first:
            self.allow()
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self.place.wait_for_all()
        save(dict(tensors), checkpoint_id=partial)
        files = self._gathered(_hashes(partial, f"__{self.place.rank}_*"))
        if self.place.is_first:
            files |= _hashes(partial, ".metadata")
            write_json(partial / COMPLETE, {"facts": dict(facts), "files": files})
            shutil.rmtree(whole, ignore_errors=True)
            os.replace(partial, whole)
            sync_folder(self.folder)
            for old in self._found()[self.keep :]:
                shutil.rmtree(old)
        self.place.wait_for_all()

    def load(self, report: Callable[[str], None]) -> Checkpoint | None:
        """The newest good one; a damaged one is reported and passed over."""
        for path in self.place.agree(self._found()):
            problem = self._problem(path)
            if self.place.any(problem is not None):
                report(problem or f"checkpoint {path.name} is damaged: another process found it so")
                continue
            tensors = {name: torch.empty_like(tensor) for name, tensor in self.tensors().items()}
            load(tensors, checkpoint_id=path)
            return Checkpoint(tensors, json.loads((path / COMPLETE).read_text())["facts"])
        return None

    def _found(self) -> list[Path]:
        """Newest first."""
        return sorted(self.folder.glob("step-*"), reverse=True)

    def _problem(self, path: Path) -> str | None:
        """Each process looks at its share of the files."""
        try:
            files = json.loads((path / COMPLETE).read_text())["files"]
        except (OSError, ValueError, KeyError) as error:
            return f"checkpoint {path.name} is damaged: {COMPLETE} cannot be read ({error})"
        for name in sorted(files)[self.place.rank :: self.place.world]:
            if not (path / name).is_file():
                return f"checkpoint {path.name} is damaged: {name} is missing"
            if _hash(path / name) != files[name]:
                return f"checkpoint {path.name} is damaged: the checksum of {name} does not fit its content"
        return None

    def _gathered(self, own: dict[str, str]) -> dict[str, str]:
        parts: list[Any] = [own] * self.place.world
        if self.place.world > 1:
            dist.all_gather_object(parts, own)
        return {name: digest for part in parts for name, digest in part.items()}


def _hashes(folder: Path, pattern: str) -> dict[str, str]:
    return {path.name: _hash(path) for path in folder.glob(pattern)}


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
