"""What a run says while it learns: metrics.jsonl always, TensorBoard where it is installed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from naju.training.files import write_whole

METRICS = "metrics.jsonl"


class Metrics:
    """The lines of `metrics.jsonl` up to the step where a run takes off again, and those that follow.

    Lines hold no times, so a run that was killed and resumed leaves the same file as one that was not.
    """

    def __init__(self, folder: Path, last_step: int) -> None:
        self.path = folder / METRICS
        self.rows = [row for row in read_metrics(folder) if row["step"] <= last_step]
        write_whole(self.path, "".join(map(_line, self.rows)).encode())
        self._file = self.path.open("a")
        self._board = _tensorboard(folder, last_step)

    def append(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self._file.write(_line(row))
        self._file.flush()
        if self._board is not None:
            for name in sorted(set(row) - {"step"}):
                if row[name] is not None:
                    self._board.add_scalar(name, row[name], row["step"])

    def sync(self) -> None:
        """Force the lines to the disk before a checkpoint that counts on them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines that are there, up to one that is none: a last one that was cut off by a kill does not count."""
    try:
        lines = (folder / METRICS).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            break
        rows.append(row)
    return rows


def checksum(rows: Iterable[dict[str, Any]]) -> str:
    return hashlib.blake2b("".join(map(_line, rows)).encode(), digest_size=16).hexdigest()


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _tensorboard(folder: Path, last_step: int) -> Any:
    """A writer that hides what an earlier attempt wrote beyond `last_step`, or None."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=last_step + 1)
