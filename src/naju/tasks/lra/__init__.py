"""The Long Range Arena: five classifications of long sequences, two of them generated, three read from a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from naju.tasks.lra import image, listops, pathfinder, retrieval, text
from naju.tasks.lra.examples import Examples, joined
from naju.tasks.lra.files import DamagedDataError, MissingDataError

__all__ = [
    "LRA",
    "DamagedDataError",
    "Examples",
    "GeneratedTask",
    "LraTask",
    "MissingDataError",
    "ReadTask",
    "Sizes",
]


class Sizes(NamedTuple):
    train: int
    validation: int
    test: int


@dataclass(frozen=True, kw_only=True)
class LraTask:
    """What a model has to know. Where sequences differ in length, token 0 is the padding and the data begin at 1."""

    name: str
    sizes: Sizes
    length: int
    n_values: int  # of a position, the padding not counted
    n_classes: int
    is_padded: bool = True
    has_pairs: bool = False
    epochs: int = 50  # of the paper

    @property
    def vocab_size(self) -> int:
        return self.n_values + self.is_padded


@dataclass(frozen=True, kw_only=True)
class ReadTask(LraTask):
    """From files that people download; `read` gives the splits by name."""

    read: Callable[[Path], dict[str, Examples]]


def _in_order(blocks: Sequence[Examples], count: int) -> Examples | None:
    together = joined(blocks)
    return together.part(0, count) if len(together) >= count else None


@dataclass(frozen=True, kw_only=True)
class GeneratedTask(LraTask):
    """From numbered blocks, each a pure function of a seed: `gather` makes the first `count` examples of them, or says
    with None that it needs more blocks. The training examples come first, then those for validation and test."""

    block_size: int
    block_of: Callable[[int, int], Examples]
    gather: Callable[[Sequence[Examples], int], Examples | None] = _in_order

    def splits(self, examples: Examples, sizes: Sizes) -> dict[str, Examples]:
        train, validation, test = sizes
        return {
            "train": examples.part(0, train),
            "validation": examples.part(train, train + validation),
            "test": examples.part(train + validation, train + validation + test),
        }


_TASKS: tuple[LraTask, ...] = (
    GeneratedTask(
        name="listops",
        sizes=Sizes(96_000, 2_000, 2_000),
        length=2000,
        n_values=len(listops.SYMBOLS),
        n_classes=10,
        block_size=listops.BLOCK,
        block_of=listops.block_of,
        gather=listops.first_different,
    ),
    ReadTask(
        name="text",
        sizes=Sizes(22_500, 2_500, 25_000),
        length=text.LENGTH,
        n_values=256,
        n_classes=2,
        read=text.read,
    ),
    ReadTask(
        name="retrieval",
        sizes=Sizes(147_086, 18_090, 17_437),
        length=retrieval.LENGTH,
        n_values=256,
        n_classes=2,
        has_pairs=True,
        epochs=30,
        read=retrieval.read,
    ),
    ReadTask(
        name="image",
        sizes=Sizes(45_000, 5_000, 10_000),
        length=image.PIXELS,
        n_values=256,
        n_classes=image.CLASSES,
        is_padded=False,
        read=image.read,
    ),
    GeneratedTask(
        name="pathfinder",
        sizes=Sizes(160_000, 20_000, 20_000),
        length=pathfinder.SIZE**2,
        n_values=256,
        n_classes=2,
        is_padded=False,
        block_size=pathfinder.BLOCK,
        block_of=pathfinder.block_of,
    ),
)
LRA: Mapping[str, LraTask] = {task.name: task for task in _TASKS}
