"""Text: is a review of IMDB positive? Bytes, at most 4,000.

The original benchmark validates on the test set. Here every tenth review of the training set is held out for that, the
same ones in every run.
"""

from __future__ import annotations

import lzma
import re
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from naju.tasks.lra.examples import Examples, byte_examples
from naju.tasks.lra.files import DamagedDataError, check_count, check_digest, first_existing

LENGTH = 4000
HELD_OUT = 10  # one in so many
NAMES = ("aclImdb", "aclImdb.tar.xz", "aclImdb_v1.tar.gz")
SOURCE = (
    "put the folder aclImdb there, or its archive: aclImdb_v1.tar.gz from https://ai.stanford.edu/~amaas/data/sentiment"
)
KINDS = {"neg": 0, "pos": 1}
LONGEST = 1 << 20  # bytes; no review comes near, and a hostile archive may claim any size
REVIEWS = 12_500  # of every kind in either half
# SHA-256 over the reviews of one kind in the order of their numbers.
DIGESTS = {
    "train/neg": "b2441fdae57aa12b75bd0119ff26533937287387dfa348aae36031fde2555850",
    "train/pos": "c0241833846db480684a3bbc739039a8a07829f00dee2c013e88100513dd0e90",
    "test/neg": "96d3bcc33399f728795fb64d4aa8c58cf1ada467319838abba7d294451690141",
    "test/pos": "4619fea0c15476ba5fe5d1ad7536ebe0b7e2d56b19500ff121fa29a00015b39f",
}


class Review(NamedTuple):
    number: int
    rating: int
    text: bytes


def read(folder: Path) -> dict[str, Examples]:
    """Train, validation and test."""
    reviews = _reviews(first_existing(folder, NAMES, SOURCE))
    halves = {half: _half(half, reviews) for half in ("train", "test")}
    rows = np.arange(len(halves["train"]))
    held_out = rows % HELD_OUT == HELD_OUT - 1
    return {
        "train": halves["train"].chosen(rows[~held_out]),
        "validation": halves["train"].chosen(rows[held_out]),
        "test": halves["test"],
    }


def _half(half: str, reviews: dict[str, list[Review]]) -> Examples:
    texts, labels = [], []
    for kind, label in KINDS.items():
        found = sorted(reviews.get(f"{half}/{kind}", []))
        _check(f"{half}/{kind}", found)
        texts += [review.text for review in found]
        labels += [label] * len(found)
    return byte_examples(texts, labels, LENGTH)


def _check(part: str, found: list[Review]) -> None:
    check_count(f"the reviews of {part}", len(found), REVIEWS)
    for review in found:
        if (review.rating > 5) != part.endswith("pos"):
            raise DamagedDataError(f"review {review.number} of {part} has the rating {review.rating}")
    check_digest(f"the text of {part}", (review.text for review in found), DIGESTS[part])


def _reviews(path: Path) -> dict[str, list[Review]]:
    """By half and kind, such as "train/pos"."""
    reviews: dict[str, list[Review]] = {}
    try:
        for name, text in _members(path):
            found = re.search(r"(train|test)/(neg|pos)/(\d+)_(\d+)\.txt$", name)
            if found is not None:
                reviews.setdefault(f"{found[1]}/{found[2]}", []).append(Review(int(found[3]), int(found[4]), text))
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, KeyError, ValueError, RecursionError) as error:
        raise DamagedDataError(f"{path.name} cannot be read: {error}") from error
    return reviews


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of all files, out of a folder or an archive, which is not unpacked."""
    if path.is_dir():
        for file in path.glob("t*/*/*.txt"):
            yield file.as_posix(), file.read_bytes()
        return
    with tarfile.open(path) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() and member.size <= LONGEST else None
            if content is not None:
                yield member.name, content.read()
