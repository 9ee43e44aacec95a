"""The data of the Long Range Arena: read from the user's folder, or generated once and kept in a cache."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from tqdm import tqdm

from naju.tasks.lra import LRA, Examples, GeneratedTask, LraTask, ReadTask, Sizes
from naju.training.children import deaf_to_ctrl_c, end_with_parent
from naju.training.files import write_whole

DATA_SEED = 0


def load_data(task: LraTask, data: Path, cache: Path, sizes: Sizes | None = None) -> dict[str, Examples]:
    """Train, validation and test. What is generated and not yet in the cache is generated now."""
    if isinstance(task, ReadTask):
        return task.read(data)
    assert isinstance(task, GeneratedTask)
    return task.splits(generated(task, cache, sizes or task.sizes), sizes or task.sizes)


def generated(
    task: GeneratedTask, cache: Path, sizes: Sizes, *, seed: int = DATA_SEED, processes: int | None = None
) -> Examples:
    """The first examples of a seed, from the cache or freshly made.

    Every finished block is a file, so that a killed generation goes on where it was, whatever else was generated since;
    processes that generate the same at once write the same bytes.
    """
    name = f"{task.name}-seed{seed}-{sum(sizes)}"
    path, folder = cache / f"{name}.safetensors", cache / f"{name}-blocks"
    if path.exists():
        return load_examples(path)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        examples = _gathered(task, seed, folder, sum(sizes), processes or os.cpu_count() or 1)
    except FileNotFoundError:  # another process has finished the same in the meantime and cleared its blocks away
        return load_examples(path)
    save_examples(path, examples)
    shutil.rmtree(folder, ignore_errors=True)
    return examples


def _gathered(task: GeneratedTask, seed: int, folder: Path, count: int, processes: int) -> Examples:
    """From as many blocks as it takes."""
    enough, examples = -(-count // task.block_size), None
    while examples is None:
        _make_blocks(task.name, seed, folder, range(enough), processes)
        examples = task.gather([load_examples(_block_path(folder, number)) for number in range(enough)], count)
        enough += 1
    return examples


def _make_blocks(name: str, seed: int, folder: Path, numbers: Iterable[int], processes: int) -> None:
    """Those that are not there as whole files."""
    missing = [number for number in numbers if not _is_whole(_block_path(folder, number))]
    bar = tqdm(total=len(missing), desc=f"generating {name}", unit="block", dynamic_ncols=True, disable=None)
    with bar:
        for _ in _finished(name, seed, folder, missing, processes):
            bar.update()


def _finished(name: str, seed: int, folder: Path, numbers: list[int], processes: int) -> Iterator[int]:
    """The numbers of blocks as they are finished, by this process alone or by several."""
    if min(processes, len(numbers)) <= 1:
        for number in numbers:
            yield make_block(name, seed, number, folder)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=end_with_parent) as pool:
        try:
            with deaf_to_ctrl_c():
                futures = [pool.submit(make_block, name, seed, number, folder) for number in numbers]
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def make_block(name: str, seed: int, number: int, folder: Path) -> int:
    """In a process of its own: the task goes by its name."""
    task = LRA[name]
    assert isinstance(task, GeneratedTask)
    save_examples(_block_path(folder, number), task.block_of(seed, number))
    return number


def _block_path(folder: Path, number: int) -> Path:
    return folder / f"{number:05}.safetensors"


def _is_whole(path: Path) -> bool:
    try:
        load_examples(path)
    except (ValueError, FileNotFoundError):
        return False
    return True


def save_examples(path: Path, examples: Examples) -> None:
    """Whole or not at all; the same examples give the same bytes."""
    arrays: dict[str, NDArray[Any]] = {"values": examples.values, "starts": examples.starts, "labels": examples.labels}
    write_whole(path, save(arrays, {"checksum": _checksum(examples)}))


def load_examples(path: Path) -> Examples:
    """A damaged file is a ValueError that names it."""
    try:
        with safe_open(path, "np") as file:
            checksum = (file.metadata() or {}).get("checksum")
            examples = Examples(*(file.get_tensor(name) for name in ("values", "starts", "labels")))
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is damaged; remove it, and it is generated anew: {error}") from error
    if checksum != _checksum(examples):
        raise ValueError(f"{path} is damaged; remove it, and it is generated anew: its checksum does not fit")
    return examples


def _checksum(examples: Examples) -> str:
    """Of little-endian bytes, whatever the machine."""
    digest = hashlib.blake2b(digest_size=16)
    for array, kind in ((examples.values, "u1"), (examples.starts, "<i8"), (examples.labels, "<i8")):
        digest.update(np.ascontiguousarray(array, kind).tobytes())
    return digest.hexdigest()
