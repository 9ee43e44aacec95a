"""`naju lm prepare`: text to token files, in parallel, going on where it was left."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from naju.lm.shards import EncodedShard, encode_sources
from naju.lm.sources import Layout, Source, find_sources
from naju.lm.token_files import (
    MANIFEST,
    OFFSET,
    Part,
    Vocabulary,
    check_file,
    open_split,
    read_manifest,
    write_token_files,
)
from naju.lm.tokenizer import TOKENIZER, Tokenizer, load_tokenizer
from naju.training.files import clear_away

SHARDS = ".shards"


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Turn text into token files for training; run again after an interruption, it goes on where it was left.

    In a folder, the files that count end in .txt, .raw, .text or .jsonl, also with .gz, .xz or .zst behind. A file with
    valid, validation, val, dev or test as a word of its name is of that split, every other is to train on.
    """

    source: str
    """A text file, a folder of them, `wikitext-103` (by way of datasets), or `sample` (some Shakespeare)."""
    out: Path
    """Folder for the token files."""
    tokenizer: str = "gpt2"
    """A tokenizer.json, a folder with it or encoder.json and vocab.bpe, `gpt2` (from the hub), `bytes`, or `sample`."""
    end_of_text: str | None = None
    """The token that ends a document, where it has an unusual name."""
    layout: Layout = "auto"
    """How documents lie in a file: `wikitext` (each begins with ` = Title = `), `jsonl`, or `plain` (one a file)."""
    field: str = "text"
    """Where a JSONL object has its text."""
    validation_share: float = 0.05
    """How much of the end of the training text is held out for validation where no file is meant for it."""
    processes: int = 0
    """How many encode at a time; 0 means one for each core."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation_share < 1:
            raise ValueError(f"validation_share must lie in [0, 1), but is {self.validation_share}")
        if self.processes < 0:
            raise ValueError(f"processes must not be negative, but is {self.processes}")


def run_prepare(config: PrepareConfig) -> None:
    began = time.perf_counter()
    manifest = prepare(config)
    for split, counts in manifest["splits"].items():
        documents = counts["documents"]
        print(f"{split}: {counts['tokens']:,} tokens in {documents:,} document{'s' * (documents != 1)}")
    print(f"{config.out} is ready: vocabulary {manifest['vocab_size']:,}, {time.perf_counter() - began:.1f} s")


def prepare(config: PrepareConfig) -> dict[str, Any]:
    """Returns the manifest. A folder that this very command has finished is checked and left as it is."""
    sources = find_sources(config.source, config.layout, config.field)
    tokenizer = load_tokenizer(config.tokenizer, config.end_of_text)
    request = _request(config, sources)
    if (config.out / MANIFEST).exists():
        return _finished(config.out, request, tokenizer)
    shards = config.out / SHARDS
    with _clear_about_full_disks(config.out):
        shards.mkdir(parents=True, exist_ok=True)
        encoded = _encode(config, sources, tokenizer, shards)
        splits = _splits(encoded, tokenizer.vocabulary, config.validation_share)
        about = {"source": request, "tokenizer": tokenizer.save(config.out)}
        manifest = write_token_files(config.out, splits, tokenizer.vocabulary, about)
    shutil.rmtree(shards, ignore_errors=True)
    clear_away(config.out)
    return manifest


def _request(config: PrepareConfig, sources: Iterable[Source]) -> dict[str, Any]:
    """What decides the tokens, the tokenizer aside."""
    return {
        "name": Path(config.source).resolve().name,
        "files": {source.name: source.size for source in sources},
        "layout": config.layout,
        "field": config.field,
        "validation_share": config.validation_share,
    }


def _finished(folder: Path, request: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    manifest = read_manifest(folder)
    found = [manifest.get("source"), manifest.get("tokenizer", {}).get("sha256"), manifest["end_of_text"]]
    digest = hashlib.sha256(tokenizer.to_json().encode()).hexdigest()
    if found != [request, digest, tokenizer.vocabulary.end_of_text]:
        raise ValueError(
            f"out folder {folder} holds token files of another source, tokenizer or options, as its {MANIFEST} says; "
            "choose another folder, or remove that one"
        )
    check_file(folder / TOKENIZER, manifest["tokenizer"], verify=True)
    for split in manifest["splits"]:
        open_split(folder, split, verify=True)
    return manifest


def _encode(config: PrepareConfig, sources: list[Source], tokenizer: Tokenizer, folder: Path) -> list[EncodedShard]:
    encoded, tokens = [], 0
    with tqdm(total=sum(source.size for source in sources), unit="B", unit_scale=True, disable=None) as bar:
        for shard in encode_sources(sources, tokenizer, folder, config.processes or _cores(), bar.update):
            encoded.append(shard)
            tokens += shard.tokens
            bar.set_postfix_str(f"{tokens:,} tokens")
    return encoded


def _cores() -> int:
    """Those that this process may use, where the system says it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _splits(encoded: list[EncodedShard], vocabulary: Vocabulary, validation_share: float) -> dict[str, Iterator[Part]]:
    """The parts of each split, read from the shards as they are taken."""
    if not encoded:
        raise ValueError("the source holds no text")
    shards: dict[str, list[EncodedShard]] = {}
    for shard in encoded:
        shards.setdefault(shard.split, []).append(shard)
    splits = {name: _parts(of_split) for name, of_split in shards.items()}
    if "train" in shards and "validation" not in shards and validation_share > 0:
        place = _held_out_from(shards["train"], validation_share)
        splits["train"] = up_to(place, _parts(shards["train"]), vocabulary)
        splits["validation"] = beyond(place, _parts(shards["train"]))
    return splits


def _parts(shards: Iterable[EncodedShard]) -> Iterator[Part]:
    return (shard.read() for shard in shards)


def _held_out_from(shards: list[EncodedShard], share: float) -> int:
    """Where validation begins: with a document, if one leaves it at least half of the share, else inside of one."""
    starts = np.cumsum([0, *(shard.tokens for shard in shards)])
    ends = np.concatenate([shard.ends.astype(np.int64) + start for shard, start in zip(shards, starts, strict=False)])
    total = int(starts[-1])
    place = max(1, min(round(total * (1 - share)), total - 2))
    later = ends[(ends >= place) & (2 * (total - ends) >= total - place)]
    return int(later[0]) if len(later) else place


def up_to(place: int, parts: Iterable[Part], vocabulary: Vocabulary) -> Iterator[Part]:
    """The tokens before a place; a document that it cuts through gets an end of text."""
    for part in parts:
        count = min(place, len(part.tokens))
        ends = part.ends[part.ends <= count]
        yield Part(part.tokens[:count], ends)
        place -= count
        if place == 0:
            if count not in ends:
                yield Part(np.array([vocabulary.end_of_text], vocabulary.dtype), np.ones(1, OFFSET))
            return


def beyond(place: int, parts: Iterable[Part]) -> Iterator[Part]:
    """The tokens from a place on."""
    for part in parts:
        skipped = min(place, len(part.tokens))
        place -= skipped
        yield Part(part.tokens[skipped:], part.ends[part.ends > skipped] - OFFSET.type(skipped))


@contextlib.contextmanager
def _clear_about_full_disks(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            f"the disk of {folder} is full ({error.strerror}); nothing there is taken for whole: make room and run the "
            "same command again, which goes on with the shards that are finished"
        ) from error
