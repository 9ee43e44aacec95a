"""Retrieval: does one paper of the ACL anthology cite the other? Two texts of at most 4,000 bytes each.

The release is a TSV file a split: label (0.0 or 1.0), two identifiers, two texts, in which quotation marks mean
nothing. It may not be redistributed.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from naju.tasks.lra.examples import Examples, byte_examples
from naju.tasks.lra.files import DamagedDataError, check_count, first_existing

LENGTH = 4000
FILES = {"train": "new_aan_pairs.train.tsv", "validation": "new_aan_pairs.eval.tsv", "test": "new_aan_pairs.test.tsv"}
PAIRS = {"train": 147_086, "validation": 18_090, "test": 17_437}
FOLDERS = ("", "tsv_data", "lra_release/tsv_data", "lra_release/lra_release/tsv_data")
SOURCE = (
    "unpack lra_release.gz there, from the Long Range Arena's repository "
    "https://github.com/google-research/long-range-arena"
)
LABELS = {"0.0": 0, "1.0": 1, "0": 0, "1": 1}
COLUMNS = 5
LEAST_SHARE = 0.25  # of either label: there are as many of one as of the other, or nearly


def read(folder: Path) -> dict[str, Examples]:
    """Train, validation and test."""
    return {split: _split(folder, split) for split in FILES}


def _split(folder: Path, split: str) -> Examples:
    path = first_existing(folder, [str(Path(inside) / FILES[split]) for inside in FOLDERS], SOURCE)
    texts: list[bytes] = []
    labels: list[int] = []
    for number, row in enumerate(_rows(path), 1):
        if len(row) != COLUMNS or row[0] not in LABELS:
            raise DamagedDataError(
                f"row {number} of {path.name} must have a label of 0.0 or 1.0 and {COLUMNS} columns, but has "
                f"{''.join(row[:1])[:20]!r} and {len(row)}"
            )
        labels.append(LABELS[row[0]])
        texts += [text[:LENGTH].encode() for text in row[3:]]  # papers are long, and there are 300,000 of them
    check_count(f"the pairs of {path.name}", len(labels), PAIRS[split])
    if not LEAST_SHARE <= sum(labels) / len(labels) <= 1 - LEAST_SHARE:
        raise DamagedDataError(f"{path.name} has {sum(labels)} citations among its {len(labels)} pairs, not about half")
    return byte_examples(texts, labels, LENGTH)


def _rows(path: Path) -> Iterator[list[str]]:
    limit = csv.field_size_limit(1 << 27)  # whole papers are longer than what the module takes for a mistake
    try:
        with path.open(newline="", encoding="utf-8") as file:
            yield from csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DamagedDataError(f"{path.name} cannot be read: {error}") from error
    finally:
        csv.field_size_limit(limit)
