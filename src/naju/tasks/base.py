"""What every task is: a source of seeded batches whose answers are classified, at the last position or at many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from torch import Generator, Tensor

IGNORE = -100  # the target of a position that asks for nothing


class Batch(NamedTuple):
    """Sequences, their answers, and the slice of the accuracy table that each of them belongs to."""

    tokens: Tensor  # (b, l), int64
    targets: Tensor  # (b,), or (b, l) with IGNORE where nothing is asked; int64, below the task's `n_classes`
    group: Tensor  # (b,), int64, an index into the task's `groups`


class Task(ABC):
    """A task is immutable, and `sample` is pure: the same generator state gives the same batch, on its device."""

    groups: ClassVar[tuple[str, ...]]

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    @abstractmethod
    def n_classes(self) -> int: ...

    @property
    def n_questions(self) -> int | None:
        """At how many positions each sequence asks, None where it asks once, at its end: then targets are (b,)."""
        return None

    @abstractmethod
    def minimum_length(self) -> int:
        """The shortest sequence that these settings fit into."""

    @abstractmethod
    def token_names(self) -> tuple[str, ...]:
        """The name of every token of the vocabulary."""

    @abstractmethod
    def sample(self, count: int, length: int, generator: Generator) -> Batch:
        """`count` fresh sequences of exactly `length` tokens."""

    def answer_name(self, target: int) -> str:
        """One of the classes in words."""
        return str(target)

    def describe(self, tokens: Tensor) -> list[str]:
        """One sequence (l,) in words."""
        names = self.token_names()
        return [names[token] for token in tokens.tolist()]

    def check_size(self, count: int, length: int) -> None:
        if count < 1:
            raise ValueError(f"count must be a positive integer, but is {count}")
        if length < self.minimum_length():
            raise ValueError(
                f"length must be at least {self.minimum_length()} for these settings of {type(self).__name__}, "
                f"but is {length}"
            )
