"""Labelled byte sequences of any length, in flat arrays that load, save and move to a device in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Examples:
    """Sequence k is `values[starts[k] : starts[k + 1]]`. An example has one of them, or a pair (2k, 2k + 1)."""

    values: Bytes  # of all sequences, one after the other
    starts: Integers  # (sequences + 1,)
    labels: Integers  # (examples,)

    def __post_init__(self) -> None:
        sequences = len(self.starts) - 1
        if len(self.labels) == 0 or sequences not in (len(self.labels), 2 * len(self.labels)):
            raise ValueError(f"starts must bound one or two sequences a label, but bound {sequences}")
        if self.starts[0] != 0 or self.starts[-1] != len(self.values) or (np.diff(self.starts) < 0).any():
            raise ValueError("starts must rise from 0 to the number of values")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def width(self) -> int:
        """Sequences of one example: 1, or 2 for pairs."""
        return (len(self.starts) - 1) // len(self.labels)

    @property
    def lengths(self) -> Integers:
        """Of the longest sequence of every example."""
        return np.asarray(np.diff(self.starts).reshape(len(self), -1).max(axis=1))

    def sequence(self, index: int) -> Bytes:
        return self.values[self.starts[index] : self.starts[index + 1]]

    def part(self, start: int, stop: int) -> Examples:
        """Examples `start` to `stop - 1`."""
        starts = self.starts[start * self.width : stop * self.width + 1]
        return Examples(self.values[starts[0] : starts[-1]], starts - starts[0], self.labels[start:stop])

    def chosen(self, rows: Integers) -> Examples:
        sequences = (rows[:, None] * self.width + np.arange(self.width)).ravel()
        return examples_of([self.sequence(int(sequence)) for sequence in sequences], self.labels[rows])


def examples_of(sequences: Sequence[Bytes], labels: Sequence[int] | Integers) -> Examples:
    lengths = [len(sequence) for sequence in sequences]
    values = np.concatenate(sequences) if sequences else np.empty(0, np.uint8)
    return Examples(values, np.cumsum([0, *lengths], dtype=np.int64), np.asarray(labels, np.int64))


def joined(parts: Sequence[Examples]) -> Examples:
    """One after the other."""
    offsets = np.cumsum([0, *(len(part.values) for part in parts)])
    starts = [part.starts[:-1] + offset for part, offset in zip(parts, offsets[:-1], strict=True)]
    values, labels = [part.values for part in parts], [part.labels for part in parts]
    return Examples(np.concatenate(values), np.concatenate([*starts, offsets[-1:]]), np.concatenate(labels))


def byte_examples(texts: Sequence[bytes], labels: Sequence[int], length: int) -> Examples:
    """The first `length` bytes of every text."""
    return examples_of([np.frombuffer(text[:length], np.uint8) for text in texts], labels)
