"""Text as tokens on the disk: a folder that many processes read without loading it.

    manifest.json      what the files are, how many tokens and documents they hold, and the sha256 of each
    <split>.tokens     every document of the split, one after the other, each closed by its end-of-text token
    <split>.documents  offsets into them: document k is tokens[documents[k] : documents[k + 1]]

Numbers are little-endian; tokens are uint16 where the vocabulary allows it, else uint32, and offsets are uint64. The
manifest is written last: a folder without one holds nothing that is taken for whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from naju.training.files import beside, sync_folder, write_json

FORMAT = "naju-tokens-1"
MANIFEST = "manifest.json"
OFFSET = np.dtype("<u8")

Tokens = NDArray[Any]  # uint16 or uint32
Offsets = NDArray[np.uint64]


@dataclass(frozen=True)
class Vocabulary:
    """What the files need to know of a tokenizer: how many ids it has, and the one that ends a document."""

    size: int
    end_of_text: int

    def __post_init__(self) -> None:
        if not 0 <= self.end_of_text < self.size:
            raise ValueError(f"end_of_text must be one of the {self.size} ids, but is {self.end_of_text}")

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2") if self.size <= 2**16 else np.dtype("<u4")


@dataclass(frozen=True)
class TokenSplit:
    """One split, read from the disk as it is used; `documents` has one offset more than there are documents."""

    tokens: Tokens
    documents: Offsets
    vocab_size: int
    end_of_text: int

    def document(self, index: int) -> Tokens:
        """One document, its end-of-text token included."""
        return self.tokens[int(self.documents[index]) : int(self.documents[index + 1])]


@dataclass(frozen=True)
class Part:
    """Some tokens of a split in order; `ends` are the places in them right after an end-of-text token."""

    tokens: Tokens
    ends: Offsets


def open_split(folder: Path, split: str, *, verify: bool = False) -> TokenSplit:
    """The sizes of the files are always checked, their hashes (which reads them whole) with `verify`."""
    manifest = read_manifest(folder)
    if split not in manifest["splits"]:
        raise ValueError(f"{folder} has no split {split!r}; it has {', '.join(manifest['splits'])}")
    tokens, documents = file_names(split)
    for name in (tokens, documents):
        check_file(folder / name, manifest["files"][name], verify=verify)
    counts, vocabulary = manifest["splits"][split], Vocabulary(manifest["vocab_size"], manifest["end_of_text"])
    expected = {tokens: counts["tokens"] * vocabulary.dtype.itemsize, documents: 8 * (counts["documents"] + 1)}
    for name, size in expected.items():
        if size != manifest["files"][name]["bytes"] or min(counts.values()) < 1:
            raise ValueError(f"{folder / MANIFEST} is damaged: its counts and the size of {name} do not agree")
    opened = TokenSplit(
        np.memmap(folder / tokens, vocabulary.dtype, mode="r"),
        np.fromfile(folder / documents, OFFSET),
        vocabulary.size,
        vocabulary.end_of_text,
    )
    offsets = opened.documents
    if offsets[-1] != len(opened.tokens) or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(f"{folder / documents} is damaged: its offsets do not rise to the number of tokens")
    return opened


def file_names(split: str) -> tuple[str, str]:
    return f"{split}.tokens", f"{split}.documents"


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"{folder} has no {MANIFEST}: no token files are there, or `naju lm prepare` did not finish them"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise ValueError(f"{path} is of format {found!r}, but {FORMAT!r} was expected")
    try:
        _check_manifest(manifest)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged, it does not describe token files: {type(error).__name__}, {error}"
        ) from error
    return dict(manifest)


def _check_manifest(manifest: Mapping[str, Any]) -> None:
    """Whoever wrote it, it has all that is read of it, and names files of its own folder only."""
    vocabulary = Vocabulary(_whole(manifest["vocab_size"]), _whole(manifest["end_of_text"]))
    if manifest["dtype"] != vocabulary.dtype.str:
        raise ValueError(f"dtype must be {vocabulary.dtype.str!r}, but is {manifest['dtype']!r}")
    for split, counts in manifest["splits"].items():
        if not split or set(split) & {"/", "\\", "\0"}:
            raise ValueError(f"a split must have a plain name, but one is called {split!r}")
        for count in ("tokens", "documents"):
            _whole(counts[count])
        for name in file_names(split):
            _check_facts(manifest["files"][name])
    if "tokenizer" in manifest:
        _check_facts(manifest["tokenizer"])
        str.encode(manifest["tokenizer"]["name"])


def _check_facts(facts: Mapping[str, Any]) -> None:
    _whole(facts["bytes"])
    str.encode(facts["sha256"])


def _whole(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise TypeError(f"{number!r} is no count")
    return number


def check_file(path: Path, expected: Mapping[str, Any], *, verify: bool) -> None:
    """Refuse a file that is missing, of another size than the manifest says, or, with `verify`, of other content."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing, though {MANIFEST} lists it; prepare the folder again")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise ValueError(f"{path} is damaged: it has {size:,} bytes, but {MANIFEST} says {expected['bytes']:,}")
    if verify and _sha256(path) != expected["sha256"]:
        raise ValueError(f"{path} is damaged: its sha256 is not the one in {MANIFEST}")


def write_token_files(
    folder: Path, splits: Mapping[str, Iterable[Part]], vocabulary: Vocabulary, about: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write every split and then the manifest, which also keeps `about`; returns the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    counts: dict[str, dict[str, int]] = {}
    files: dict[str, Any] = {}
    for split, parts in splits.items():
        counts[split], written = _write_split(folder, split, parts, vocabulary)
        files |= written
    manifest = {
        "format": FORMAT,
        **(about or {}),
        "vocab_size": vocabulary.size,
        "end_of_text": vocabulary.end_of_text,
        "dtype": vocabulary.dtype.str,
        "splits": counts,
        "files": files,
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def _write_split(
    folder: Path, split: str, parts: Iterable[Part], vocabulary: Vocabulary
) -> tuple[dict[str, int], dict[str, Any]]:
    """The counts of a split, and the size and hash of its two files."""
    total, offsets = 0, [np.zeros(1, OFFSET)]
    tokens_name, documents_name = file_names(split)
    with _new_file(folder / tokens_name) as file:
        for part in parts:
            file.write(part.tokens.astype(vocabulary.dtype).tobytes())
            offsets.append(part.ends.astype(OFFSET) + OFFSET.type(total))
            total += len(part.tokens)
    documents = np.concatenate(offsets)
    if total == 0 or documents[-1] != total:
        raise ValueError(f"split {split!r} must hold tokens and end with the end of a document, but does not")
    with _new_file(folder / documents_name) as index:
        index.write(documents.tobytes())
    return (
        {"tokens": total, "documents": len(documents) - 1},
        {tokens_name: file.facts(), documents_name: index.facts()},
    )


class _Hashed:
    """A file that is written once from its start to its end, and hashed on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest, self._bytes = file, hashlib.sha256(), 0

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._digest.update(content)
        self._bytes += len(content)

    def facts(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[_Hashed]:
    """Like `write_whole`, for content that does not fit in memory: the name appears when all of it is on the disk."""
    new = beside(path)
    try:
        with new.open("wb") as file:
            yield _Hashed(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
    sync_folder(path.parent)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
