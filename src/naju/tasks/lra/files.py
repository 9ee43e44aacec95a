"""What all readers of downloaded data share: finding them, saying where they come from, and noticing damage."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

READ_AT_ONCE = 1 << 20


class MissingDataError(FileNotFoundError):
    """The message says what was looked for and where it can be had."""


class DamagedDataError(ValueError):
    """Something is there, but it is not, or not all of, the published data."""


def first_existing(folder: Path, names: Iterable[str], source: str) -> Path:
    """The first of `names` that the folder has."""
    names = list(names)
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise MissingDataError(f"{folder} has no {' and no '.join(names)}; {source}")


def check_count(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise DamagedDataError(f"{what} must be {expected:,}, but are {found:,}: the data are truncated or not these")


def check_digest(what: str, content: Iterable[bytes], expected: str) -> None:
    """`expected` is a hexadecimal MD5 (32 digits, as CIFAR-10 publishes them) or SHA-256."""
    digest = hashlib.md5(usedforsecurity=False) if len(expected) == 32 else hashlib.sha256()
    for piece in content:
        digest.update(piece)
    if digest.hexdigest() != expected:
        raise DamagedDataError(f"{what} differs from the published data (checksum {digest.hexdigest()[:12]}…)")


def pieces_of(path: Path) -> Iterable[bytes]:
    with path.open("rb") as file:
        while piece := file.read(READ_AT_ONCE):
            yield piece


class PlainUnpickler(pickle._Unpickler):
    """Builds containers, strings, numbers and numpy arrays; whatever else a pickle wants to import is refused.

    Of the two that Python has this is the one in Python: a few damaged bytes have the other one fill the memory.
    """

    ALLOWED: Mapping[tuple[str, str], tuple[str, str]] = {
        ("numpy.core.multiarray", "_reconstruct"): ("numpy._core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"): ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"): ("numpy", "ndarray"),
        ("numpy", "dtype"): ("numpy", "dtype"),
        ("_codecs", "encode"): ("_codecs", "encode"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which data have no use for")
        return super().find_class(*self.ALLOWED[module, name])


def unpickled(path: Path, file: IO[bytes]) -> Any:
    try:
        return PlainUnpickler(file, encoding="latin1").load()
    except OSError:
        raise
    except Exception as error:  # damaged bytes can ask a pickle for anything
        raise DamagedDataError(f"{path.name} cannot be read: {error}") from error
