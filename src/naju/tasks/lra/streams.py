"""Random integers that are the same on every machine and with every version of numpy.

Philox's raw words are fixed for good, which numpy does not promise of the distributions built on them; integers are
made from the words right here, without floating point.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]


class Stream:
    """One of many independent streams: `purpose` and `block` tell those of one seed apart."""

    def __init__(self, seed: int, purpose: str, block: int) -> None:
        digest = hashlib.blake2b(f"{seed}:{purpose}:{block}".encode(), digest_size=16).digest()
        self._words = np.random.Philox(key=np.frombuffer(digest, "<u8").astype(np.uint64))

    def words(self, *shape: int) -> Words:
        return self._words.random_raw(int(np.prod(shape))).reshape(shape)

    def below(self, limit: int | NDArray[np.integer], *shape: int) -> NDArray[np.int64]:
        """Integers from 0 to `limit` - 1 (limits broadcast), each as likely up to one part in 2³²."""
        return scaled(self.words(*shape), limit)


def scaled(words: Words, limit: int | NDArray[np.integer]) -> NDArray[np.int64]:
    """The lower half of every word, as a share of 2³², times `limit` (at most 2³¹), rounded down."""
    low = words & np.uint64(0xFFFFFFFF)
    return ((low * np.asarray(limit).astype(np.uint64)) >> np.uint64(32)).astype(np.int64)
