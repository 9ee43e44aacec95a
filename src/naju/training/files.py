"""Files that are whole or not there."""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: bytes) -> None:
    """Written beside, forced to the disk and renamed: a reader finds the old content or the new, whatever is killed."""
    new = beside(path)
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as error:  # a full disk does not name the file
        raise OSError(error.errno, f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        new.unlink(missing_ok=True)
    sync_folder(path.parent)


def beside(path: Path) -> Path:
    """A name for what will become `path`, that no other process has, on whatever machine or in whatever container."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.new")


def clear_away(folder: Path) -> None:
    """What processes that were killed had begun to write, here and in folders below; nobody may be writing."""
    for left in folder.rglob(".*.new"):
        left.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    write_whole(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def sync_folder(folder: Path) -> None:
    """Make renames in it survive a power failure, where the system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_writable(folder: Path) -> None:
    """Find out before the work, not after it, that nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"output folder {str(folder)!r} cannot be written: {error.strerror}") from error
