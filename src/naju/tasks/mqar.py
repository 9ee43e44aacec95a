"""Multi-query associative recall: pairs of a key and a value, then many keys, each to be answered with its value.

The protocol is Zoology's. `k v k v …` is followed by slots of two tokens; a query key stands first in its slot, and its
value is the target at that very position. Targets are ignored everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Generator, Tensor

from naju.tasks.base import IGNORE, Batch, Task
from naju.tasks.events import check_at_least, distinct, integers

FILLER = 0
# The j-th slot is drawn with a probability proportional to j ** (POWER - 1): queries come early more often than late.
POWER = 0.01


class Segment(NamedTuple):
    """Examples of one length and one number of pairs; a training batch never mixes two segments."""

    length: int
    n_pairs: int
    examples: int


TRAINING = (
    Segment(64, 4, 100_000),
    Segment(128, 8, 20_000),
    Segment(256, 16, 20_000),
    Segment(256, 32, 20_000),
    Segment(256, 64, 20_000),
)
TEST = tuple(
    Segment(length, n_pairs, 1000)
    for length, n_pairs in ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))
)


@dataclass(frozen=True, kw_only=True)
class MultiQueryRecall(Task):
    """MQAR: `n_pairs` pairs, then every key once more, asking for its value; the group is the number of pairs.

    With `n_keys` below `n_pairs` keys are bound again, each time to another value, and only the last one counts. Filler
    is drawn from the whole vocabulary, keys and values included, or, without `random_filler`, is 0. Of `n_symbols`
    tokens the lower half, 0 excepted, are keys, the upper half values. A group has numbers of pairs up to its own.
    """

    n_pairs: int = 8
    n_keys: int | None = None
    random_filler: bool = True
    n_symbols: int = 8192
    groups: ClassVar[tuple[str, ...]] = tuple(f"{2**power} pairs" for power in range(13))

    def __post_init__(self) -> None:
        check_at_least("n_symbols", self.n_symbols, 4, "a filler, a key and two values")
        check_at_least("n_pairs", self.n_pairs, 1, "something has to be asked")
        if not 1 <= self.n_questions <= self.n_pairs:
            raise ValueError(f"n_keys must lie between 1 and n_pairs = {self.n_pairs}, but is {self.n_keys}")
        most = min(self.first_value - 1, self.n_symbols - self.first_value, 2 ** (len(self.groups) - 1))
        if self.n_pairs > most:
            raise ValueError(
                f"n_pairs must be at most {most} with {self.n_symbols} n_symbols (keys and values differ), "
                f"but is {self.n_pairs}"
            )

    @property
    def first_value(self) -> int:
        return self.n_symbols // 2

    @property
    def vocab_size(self) -> int:
        return self.n_symbols

    @property
    def n_classes(self) -> int:
        return self.n_symbols

    @property
    def n_questions(self) -> int:
        return self.n_pairs if self.n_keys is None else self.n_keys

    def minimum_length(self) -> int:
        return 2 * (self.n_pairs + self.n_questions)

    def token_names(self) -> tuple[str, ...]:
        return tuple(map(self.answer_name, range(self.n_symbols)))

    def answer_name(self, target: int) -> str:
        if target == FILLER:
            return "PAD"
        return f"k{target}" if target < self.first_value else f"v{target - self.first_value}"

    def sample(self, count: int, length: int, generator: Generator) -> Batch:
        self.check_size(count, length)
        key = 1 + subset(count, self.first_value - 1, self.n_questions, generator)  # (b, k)
        value = self.first_value + subset(count, self.n_symbols - self.first_value, self.n_pairs, generator)  # (b, p)
        bound = self._bound_keys(count, generator)  # (b, p): which key each pair binds
        context = 2 * self.n_pairs
        place = context + 2 * query_slots(count, (length - context) // 2, self.n_questions, generator)  # (b, k)
        tokens = self._filler((count, length), generator)
        tokens[:, 0:context:2], tokens[:, 1:context:2] = key.gather(1, bound), value
        answer = value.gather(1, _last_pair(bound, self.n_questions))
        group = (self.n_pairs - 1).bit_length()
        return Batch(
            tokens.scatter_(1, place, key),
            torch.full_like(tokens, IGNORE).scatter_(1, place, answer),
            torch.full((count,), group, device=generator.device),
        )

    def _filler(self, shape: tuple[int, ...], generator: Generator) -> Tensor:
        if self.random_filler:
            return integers(0, self.n_symbols - 1, shape, generator)
        return torch.full(shape, FILLER, device=generator.device)

    def _bound_keys(self, count: int, generator: Generator) -> Tensor:
        """(b, p): each key once and in order; where there are more pairs than keys, any key again, in any order."""
        in_order = torch.arange(self.n_questions, device=generator.device).expand(count, -1)
        again = self.n_pairs - self.n_questions
        if again == 0:
            return in_order
        bound = torch.cat([in_order, integers(0, self.n_questions - 1, (count, again), generator)], dim=1)
        return bound.gather(1, distinct(count, self.n_pairs, self.n_pairs, generator))


def subset(rows: int, pool: int, size: int, generator: Generator) -> Tensor:
    """(rows, size): different integers below `pool` in random order, as `distinct` has them, but without a random
    number for each of the pool: the n-th draw is from the first pool - size + n, and gives the last of these where what
    it drew is there already (Floyd's algorithm); then the order is shuffled."""
    chosen = torch.empty(rows, size, dtype=torch.int64, device=generator.device)
    for nth, last in enumerate(range(pool - size, pool)):
        drawn = integers(0, last, (rows, 1), generator)
        there = (chosen[:, :nth] == drawn).any(1, keepdim=True)
        chosen[:, nth : nth + 1] = drawn.masked_fill(there, last)
    return chosen.gather(1, distinct(rows, size, size, generator))


def query_slots(rows: int, slots: int, size: int, generator: Generator) -> Tensor:
    """(rows, size): slots drawn one after the other without replacement. Waiting times at rates proportional to the
    probabilities end in exactly that order."""
    waiting = -torch.rand(rows, slots, generator=generator, device=generator.device).neg().log1p()
    rate = torch.arange(1, slots + 1, device=generator.device).pow(POWER - 1)
    return (waiting / rate).topk(size, largest=False, sorted=True).indices


def _last_pair(bound: Tensor, n_keys: int) -> Tensor:
    """(b, k): the last pair that binds each key."""
    pairs = torch.arange(bound.shape[1], device=bound.device).expand_as(bound)
    return bound.new_zeros(len(bound), n_keys).scatter_reduce(1, bound, pairs, "amax")
