"""Checkpoints of a sharded model: every process writes its part, and any other number of processes can read them.

Each is a folder of torch's distributed checkpoint format. Its metadata is a pickle, which torch would run whatever it
says; here it can only build the few classes that such metadata consist of, and names files of its own folder.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from naju.lm.distributed import Place
from naju.training.checkpoint import Checkpoint
from naju.training.files import sync_folder, write_json

FOLDER, COMPLETE, METADATA, DAMAGED = "sharded", "complete.json", ".metadata", ".damaged"


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
        whole = self.folder / _name(facts)
        partial = whole.with_name(f".{whole.name}.partial")
        if self.place.is_first:
            self.allow()
            for left in self.folder.glob(".*.partial"):  # by processes that were killed
                shutil.rmtree(left)
            partial.mkdir(parents=True)
        self.place.wait_for_all()
        save(dict(tensors), checkpoint_id=partial)
        files = self._gathered(_hashes(partial, f"__{self.place.rank}_*"))
        if self.place.is_first:
            files |= _hashes(partial, METADATA)
            write_json(partial / COMPLETE, {"facts": dict(facts), "files": files})
            shutil.rmtree(whole, ignore_errors=True)
            os.replace(partial, whole)
            sync_folder(self.folder)
            for old in self.found()[self.keep :]:
                shutil.rmtree(old)
        self.place.wait_for_all()

    def load(self, report: Callable[[str], None]) -> Checkpoint | None:
        """The newest good one; a damaged one is reported and put aside, where it takes no other's place."""
        for path in self.place.agree(self.found()):
            problem = self._problem(path)
            if self.place.any(problem is not None):
                report(problem or f"checkpoint {path.name} is damaged: another process found it so")
                self._put_aside(path)
                continue
            tensors = {name: torch.empty_like(tensor) for name, tensor in self.tensors().items()}
            load(tensors, storage_reader=PlainReader(path))
            return Checkpoint(tensors, _read_complete(path)["facts"])
        return None

    def begin_again(self) -> None:
        """Nothing that is there belongs to the run any more."""
        for path in self.place.agree(self.found()):
            self._put_aside(path)

    def found(self) -> list[Path]:
        """Newest first."""
        there = self.folder.glob("step-*")
        return sorted((path for path in there if path.suffix != DAMAGED), reverse=True)

    def _put_aside(self, path: Path) -> None:
        if self.place.is_first:
            aside = path.with_name(f"{path.name}{DAMAGED}")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(path, aside)
        self.place.wait_for_all()

    def _problem(self, path: Path) -> str | None:
        """Each process looks at its share of the files."""
        try:
            complete = _read_complete(path)
            PlainReader(path).read_metadata()
        except (OSError, ValueError) as error:
            return f"checkpoint {path.name} is damaged: {error}"
        if path.name != _name(complete["facts"]):
            return f"checkpoint {path.name} is damaged: its {COMPLETE} is of step {complete['facts']['step']}"
        files = complete["files"]
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


class PlainReader(FileSystemReader):
    """Reads what `save` wrote, and refuses whatever else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            content = Path(self.path, METADATA).read_bytes()
            metadata = _MetadataUnpickler(io.BytesIO(content)).load()
            if not isinstance(metadata, Metadata):
                raise TypeError(f"it holds a {type(metadata).__name__}")
            places = [place.relative_path for place in metadata.storage_data.values()]
        except FileNotFoundError:
            raise
        except Exception as error:  # damaged bytes can ask a pickle for anything
            raise ValueError(f"{METADATA} cannot be read ({error})") from error
        strangers = [place for place in places if Path(place).name != place]
        if strangers:
            raise ValueError(f"{METADATA} names a file outside its folder, {strangers[0]!r}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle._Unpickler):
    """Builds shapes, precisions, places and paths; a pickle that wants to import anything else is refused.

    Of the two that Python has this is the one in Python: a few damaged bytes have the other one fill the memory.
    """

    RECORDS = ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING")
    ALLOWED: Mapping[str, Sequence[str]] = {
        "torch": ("Size", "bfloat16", "float16", "float32", "float64", "int32", "int64", "uint8", "bool"),
        "torch.serialization": ("_get_layout",),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch.distributed.checkpoint.metadata": (*RECORDS, "TensorStorageMetadata", "ChunkStorageMetadata"),
        "pathlib": ("PosixPath", "WindowsPath"),
        "pathlib._local": ("PosixPath", "WindowsPath"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if name not in self.ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a checkpoint has no use for")
        return super().find_class(module, name)


def _name(facts: Mapping[str, Any]) -> str:
    return f"step-{facts['step']:09d}"


def _read_complete(folder: Path) -> dict[str, Any]:
    try:
        complete = json.loads((folder / COMPLETE).read_bytes())
        steps, names = complete["facts"]["step"], [str.encode(name) for name in complete["files"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{COMPLETE} cannot be read ({error})") from error
    if type(steps) is not int or not names:
        raise ValueError(f"{COMPLETE} does not say what it is of")
    return dict(complete)


def _hashes(folder: Path, pattern: str) -> dict[str, str]:
    return {path.name: _hash(path) for path in folder.glob(pattern)}


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
