"""ListOps: nested operators over digits, to be evaluated to one digit.

A node is an operator with probability 1/4 (never at the last depth), over 2 to 10 arguments. An expression counts when
it has more than 500 and fewer than 2000 tokens: a leaf is one, an operator two (`[OP` and `]`).

Expressions come from blocks, each a pure function of the seed and its number; the data are the first different ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from naju.tasks.lra.examples import Bytes, Examples, Integers, examples_of
from naju.tasks.lra.streams import Stream, Words, scaled

MAX_DEPTH = 10
MIN_ARGUMENTS, MAX_ARGUMENTS = 2, 10
SHORTER_THAN, LONGER_THAN = 2000, 500
SYMBOLS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
MIN, MAX, MED, SM, CLOSE = range(10, 15)
BLOCK = 1000
# Trees that grow at once; part of what a block is, like the order of its draws.
ATTEMPTS = 4096


@dataclass(frozen=True)
class Level:
    """The nodes of one depth, of all trees. The arguments of operators are the next level, in the operators' order."""

    tree: Integers
    is_operator: NDArray[np.bool_]
    symbol: Integers  # a digit or an operator
    arguments: Integers  # of the operators only


class Measured(NamedTuple):
    length: Integers  # tokens of the subtree
    value: Integers


def block_of(seed: int, number: int) -> Examples:
    """BLOCK expressions; the same in every process and on every machine."""
    stream = Stream(seed, "listops", number)
    sequences: list[Bytes] = []
    labels: list[int] = []
    while len(labels) < BLOCK:
        levels = grow(stream, ATTEMPTS)
        measured = measure(levels)
        length = measured[0].length
        kept = np.flatnonzero((length > LONGER_THAN) & (length < SHORTER_THAN))
        sequences += write(levels, measured, kept)
        labels += measured[0].value[kept].tolist()
    return examples_of(sequences[:BLOCK], labels[:BLOCK])


def grow(stream: Stream, trees: int) -> list[Level]:
    """Trees from their roots down, all of them at once."""
    tree = np.arange(trees)
    levels = []
    for depth in range(1, MAX_DEPTH + 1):
        level = _level(stream.words(len(tree)), tree, is_last=depth == MAX_DEPTH)
        levels.append(level)
        tree = np.repeat(tree[level.is_operator], level.arguments)
    return levels


def _level(words: Words, tree: Integers, *, is_last: bool) -> Level:
    """A word a node: its two highest bits say if it is an operator, the next two which one, the lower half the rest."""
    is_operator = (words >> np.uint64(62) == 0) & (not is_last)
    operator = MIN + (words >> np.uint64(60) & np.uint64(3)).astype(np.int64)
    arguments = MIN_ARGUMENTS + scaled(words[is_operator], MAX_ARGUMENTS - MIN_ARGUMENTS + 1)
    return Level(tree, is_operator, np.where(is_operator, operator, scaled(words, 10)), arguments)


def measure(levels: Sequence[Level]) -> list[Measured]:
    """Lengths and values of all subtrees, from the leaves up."""
    below = Measured(np.empty(0, np.int64), np.empty(0, np.int64))
    measured = []
    for level in reversed(levels):
        length, value = np.ones(len(level.tree), np.int64), level.symbol.copy()
        if len(level.arguments):
            first = np.cumsum(level.arguments) - level.arguments
            length[level.is_operator] = 2 + np.add.reduceat(below.length, first)
            value[level.is_operator] = _apply(level.symbol[level.is_operator], below.value, level.arguments)
        below = Measured(length, value)
        measured.append(below)
    return measured[::-1]


def _apply(operator: Integers, values: Integers, count: Integers) -> Integers:
    """Every operator on its `count` values, which follow each other in `values`."""
    table = np.full((len(count), MAX_ARGUMENTS), 10)
    table[np.arange(MAX_ARGUMENTS) < count[:, None]] = values
    table.sort(axis=1)  # what is no argument goes last
    rows = np.arange(len(count))
    median = (table[rows, (count - 1) // 2] + table[rows, count // 2]) // 2
    total = np.where(table < 10, table, 0).sum(axis=1) % 10
    return np.choose(operator - MIN, [table[:, 0], table[rows, count - 1], median, total])


def write(levels: Sequence[Level], measured: Sequence[Measured], trees: Integers) -> list[Bytes]:
    """The chosen trees as tokens, each node before its arguments."""
    lengths = measured[0].length[trees]
    ends = np.cumsum(lengths)
    text = np.empty(ends[-1] if len(ends) else 0, np.uint8)
    start = np.full(len(measured[0].length), -1)  # of every node of a level, -1 where its tree is not written
    start[trees] = ends - lengths
    for place, level in enumerate(levels):
        chosen = start >= 0
        text[start[chosen]] = level.symbol[chosen]
        closed = chosen & level.is_operator
        text[start[closed] + measured[place].length[closed] - 1] = CLOSE
        if place + 1 < len(levels):
            start = _argument_starts(start[level.is_operator], level.arguments, measured[place + 1].length)
    return np.split(text, ends[:-1]) if len(ends) else []


def _argument_starts(operators: Integers, count: Integers, length: Integers) -> Integers:
    """Where the arguments begin: the first right after its operator, the others after their elder siblings."""
    before = np.cumsum(length) - length  # over the whole level
    first = np.cumsum(count) - count
    within = before - np.repeat(before[first], count)
    parent = np.repeat(operators, count)
    return np.where(parent >= 0, parent + 1 + within, -1)


def first_different(blocks: Sequence[Examples], count: int) -> Examples | None:
    """The first `count` expressions without repetition, or None if that takes more blocks."""
    seen: set[bytes] = set()
    parts: list[tuple[Bytes, int]] = []
    for block in blocks:
        for index, label in enumerate(block.labels.tolist()):
            tokens = block.sequence(index)
            if tokens.tobytes() not in seen:
                seen.add(tokens.tobytes())
                parts.append((tokens, label))
            if len(parts) == count:
                return examples_of([tokens for tokens, _ in parts], [label for _, label in parts])
    return None


def in_words(tokens: Bytes) -> str:
    return " ".join(SYMBOLS[token] for token in tokens)
