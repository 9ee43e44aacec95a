"""Image: the class of a CIFAR-10 picture in shades of grey, read pixel by pixel, 32×32 = 1,024 of them.

The last 5,000 training pictures are for validation.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from naju.tasks.lra.examples import Bytes, Examples, Integers
from naju.tasks.lra.files import DamagedDataError, check_count, check_digest, first_existing, pieces_of, unpickled

PIXELS = 32 * 32
CLASSES = 10
PICTURES = {"train": 50_000, "test": 10_000}
VALIDATION = 5_000
LARGEST_ARRAY = 1 << 27  # bytes, more than twice the training pictures
GREY, BATCHES = "cifar10-gray.npz", "cifar-10-batches-py"
SOURCE = (
    f"put the folder {BATCHES} there, out of cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html"
)
# SHA-256 of the arrays of the grey file, MD5 of the batches as CIFAR-10's authors publish them.
DIGESTS = {
    "train_images": "d07f8665028a5a4a395e1fa0948c718a72c3b650d44f587b686dded23122a72e",
    "train_labels": "b84471b23938f9b3871a6efb6808208c25a3cd746c8ff45de412b9f0d58eb502",
    "test_images": "bfc9428ea4b1c6418cf1efa157aa589cb1452ca8892b89779e430621c0d6f4a1",
    "test_labels": "494134e9c92e469cd3816fdd2badcb2d833654dcf81898be0fccdbd36359661c",
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
FILES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
LUMA = (2989, 5870, 1140)  # of red, green and blue, in ten thousandths


def read(folder: Path) -> dict[str, Examples]:
    """Train, validation and test."""
    path = first_existing(folder, (GREY, BATCHES), SOURCE)
    half_of = _half_of_batches if path.is_dir() else _half_of_grey
    train, test = (_examples(half, *half_of(path, half)) for half in PICTURES)
    border = len(train) - VALIDATION
    return {"train": train.part(0, border), "validation": train.part(border, len(train)), "test": test}


def _examples(half: str, pictures: Bytes, labels: Integers) -> Examples:
    """After a look at the sizes: every class is there equally often."""
    check_count(f"the {half} pictures", len(pictures), PICTURES[half])
    check_count(f"the pixels of {half}", pictures.size, PICTURES[half] * PIXELS)
    counts = np.bincount(labels, minlength=CLASSES)
    if len(labels) != len(pictures) or (counts != len(pictures) // CLASSES).any():
        raise DamagedDataError(f"the {half} labels are not {len(pictures) // CLASSES:,} of each class")
    return Examples(pictures.reshape(-1), np.arange(len(pictures) + 1) * PIXELS, labels)


def _half_of_grey(path: Path, half: str) -> tuple[Bytes, Integers]:
    names = (f"{half}_images", f"{half}_labels")
    try:
        with zipfile.ZipFile(path) as archive:
            largest = max((member.file_size for member in archive.infolist()), default=0)
        if largest > LARGEST_ARRAY:
            raise DamagedDataError(f"it claims an array of {largest:,} bytes")
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            pictures, labels = (np.ascontiguousarray(file[name]) for name in names)
    except OSError:
        raise
    except Exception as error:  # damaged bytes can lead zipfile, zlib and numpy's parser anywhere
        raise DamagedDataError(f"{path.name} cannot be read: {error}") from error
    for name, array in zip(names, (pictures, labels), strict=True):
        check_digest(f"{name} of {path.name}", [array.tobytes()], DIGESTS[name])
    return pictures, labels.astype(np.int64)


def _half_of_batches(folder: Path, half: str) -> tuple[Bytes, Integers]:
    batches = [_batch(folder, name) for name in FILES[half]]
    pictures, labels = zip(*batches, strict=True)
    return np.concatenate(pictures), np.concatenate(labels)


def _batch(folder: Path, name: str) -> tuple[Bytes, Integers]:
    path = first_existing(folder, [name], SOURCE)
    check_digest(name, pieces_of(path), DIGESTS[name])
    with path.open("rb") as file:
        batch: Any = unpickled(path, file)
    try:
        colours, labels = np.asarray(batch["data"], np.uint8), np.asarray(batch["labels"], np.int64)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedDataError(f"{name} has no data and labels") from error
    return grey(colours), labels


def grey(colours: Bytes) -> Bytes:
    """Rows of all red, all green, all blue pixels to rows of luma, rounded down."""
    channels = colours.reshape(len(colours), 3, PIXELS).astype(np.int64)
    total = sum(weight * channels[:, place] for place, weight in enumerate(LUMA))
    return (np.asarray(total) // 10_000).astype(np.uint8)
