"""Encoding text by several processes, a few megabytes at a time.

Each shard becomes a file of its own, named after a hash of its text and its tokenizer: one that is there is not made
again, and one of other text or of another tokenizer is never taken for it.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from tqdm import tqdm

from naju.lm.sources import Piece, Source, Told
from naju.lm.token_files import OFFSET, Offsets, Part
from naju.lm.tokenizer import Tokenizer
from naju.training.children import deaf_to_ctrl_c
from naju.training.files import write_whole

SHARD_CHARACTERS = 4 * 2**20


@dataclass(frozen=True)
class Shard:
    """Text that is to be encoded, and the file for its tokens."""

    path: Path
    split: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class EncodedShard:
    """A file of tokens: how many, and the places in them where documents end."""

    path: Path
    split: str
    tokens: int
    ends: Offsets

    def read(self) -> Part:
        return read_shard(self.path)


def encode_sources(
    sources: Iterable[Source], tokenizer: Tokenizer, folder: Path, processes: int, told: Told
) -> Iterator[EncodedShard]:
    """In the order of the text; `told` hears of the bytes that are read."""
    shards = _shards(sources, tokenizer, folder, told)
    if processes == 1:
        return (_known(shard) or encode_shard(shard, tokenizer) for shard in shards)
    return _encode_in_parallel(shards, tokenizer, processes)


def _shards(sources: Iterable[Source], tokenizer: Tokenizer, folder: Path, told: Told) -> Iterator[Shard]:
    """Cut where the size is reached, and at the end of each source."""
    salt = f"{tokenizer.vocabulary} {tokenizer.to_json()}".encode()
    for source in sources:
        for pieces in _groups(source.read(told)):
            digest = hashlib.sha256(salt)
            for piece in pieces:
                digest.update(f"{piece.ends} {len(piece.text)} {piece.text}".encode())
            yield Shard(folder / f"{digest.hexdigest()[:32]}.safetensors", source.split, pieces)


def _groups(pieces: Iterable[Piece]) -> Iterator[tuple[Piece, ...]]:
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.text)
        if size >= SHARD_CHARACTERS:
            yield tuple(group)
            group, size = [], 0
    if group:
        yield tuple(group)


def encode_shard(shard: Shard, tokenizer: Tokenizer) -> EncodedShard:
    """Write the shard's tokens, one end of text after each document; the file is there whole or not at all."""
    end = np.array([tokenizer.vocabulary.end_of_text], tokenizer.vocabulary.dtype)
    encoded = tokenizer.encode_all([piece.text for piece in shard.pieces])
    arrays = [
        np.concatenate([tokens, end]) if piece.ends else tokens
        for tokens, piece in zip(encoded, shard.pieces, strict=True)
    ]
    places = np.cumsum([len(array) for array in arrays]).astype(OFFSET)
    ends = places[[piece.ends for piece in shard.pieces]]
    content = {"tokens": np.concatenate(arrays), "ends": ends}
    write_whole(shard.path, save(content, {"sha256": _digest(content)}))
    return EncodedShard(shard.path, shard.split, len(content["tokens"]), ends)


def read_shard(path: Path) -> Part:
    """A file that is missing, cut off or altered is refused."""
    try:
        with safe_open(path, "numpy") as file:
            wanted = (file.metadata() or {}).get("sha256")
            content = {name: file.get_tensor(name) for name in ("tokens", "ends")}
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(f"shard {path} is missing or damaged: {error}; run the same command again") from error
    if _digest(content) != wanted:
        raise ValueError(f"shard {path} is damaged: its content does not fit its sha256; run the same command again")
    return Part(content["tokens"], content["ends"])


def _digest(content: dict[str, np.ndarray[Any, Any]]) -> str:
    return hashlib.sha256(content["tokens"].tobytes() + content["ends"].tobytes()).hexdigest()


def _known(shard: Shard) -> EncodedShard | None:
    """What an earlier attempt has encoded; a damaged file is reported and removed, to be made again."""
    if not shard.path.exists():
        return None
    try:
        part = read_shard(shard.path)
    except ValueError:
        tqdm.write(f"naju: shard {shard.path} is damaged and is made again", file=sys.stderr)
        shard.path.unlink()
        return None
    return EncodedShard(shard.path, shard.split, len(part.tokens), part.ends)


def _encode_in_parallel(shards: Iterator[Shard], tokenizer: Tokenizer, processes: int) -> Iterator[EncodedShard]:
    spawn = multiprocessing.get_context("spawn")  # a forked copy of a process that has threads may hang
    pool = ProcessPoolExecutor(processes, spawn, _start_worker, (tokenizer,))

    def submit(shard: Shard) -> Future[EncodedShard]:
        with deaf_to_ctrl_c():  # it may start a worker
            return pool.submit(_encode_in_worker, shard)

    try:
        yield from _in_order(shards, submit, ahead=2 * processes)
    except BrokenProcessPool as error:
        raise OSError(
            "a process that encodes was killed, perhaps for want of memory; run the same command with fewer"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(
    shards: Iterator[Shard], submit: Callable[[Shard], Future[EncodedShard]], ahead: int
) -> Iterator[EncodedShard]:
    """Reads only so far ahead of the encoding, lest all of the text pile up in memory."""
    waiting: deque[Future[EncodedShard] | EncodedShard] = deque()
    for shard in shards:
        waiting.append(_known(shard) or submit(shard))
        if len(waiting) > ahead:
            yield _result(waiting.popleft())
    yield from map(_result, waiting)


def _result(waited: Future[EncodedShard] | EncodedShard) -> EncodedShard:
    return waited.result() if isinstance(waited, Future) else waited


_worker_tokenizer: Tokenizer


def _start_worker(tokenizer: Tokenizer) -> None:
    """The parent hears Ctrl-C for all; a worker ends when its parent is gone, however that went."""
    global _worker_tokenizer
    _worker_tokenizer = tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(shard: Shard) -> EncodedShard:
    return encode_shard(shard, _worker_tokenizer)
