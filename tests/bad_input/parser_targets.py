"""Every reader of files: how a good file comes about, and how it is read. Of bad ones a reader may say only that they
are bad, by a ValueError or an OSError."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import lzma
import pickle
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from naju.bench.rows import save_rows
from naju.lab.lra_data import load_examples, save_examples
from naju.lab.manage_runs import ListRuns, ShowRun, list_runs, show_run
from naju.lab.report import build_page
from naju.lab.report.results import read_results
from naju.lab.runs import RunFolder
from naju.lab.throughput import speed_tables
from naju.lm.batches import read_batch
from naju.lm.folder import load_model, save_model
from naju.lm.generate import Pause, Sampling, Writer
from naju.lm.sharded_checkpoint import METADATA, PlainReader
from naju.lm.shards import Shard, encode_shard, read_shard
from naju.lm.sources import Piece, find_sources
from naju.lm.token_files import Part, Vocabulary, open_split, write_token_files
from naju.lm.tokenizer import TOKENIZER, load_tokenizer
from naju.models import LanguageModel, ModelConfig, ModelState
from naju.tasks import build_task
from naju.tasks.lra import image, retrieval, text
from naju.tasks.lra.examples import byte_examples
from naju.tasks.lra.files import unpickled
from naju.training.checkpoint import Checkpoints

REFUSALS = (ValueError, OSError)


@dataclass(frozen=True)
class Target:
    """`write` fills an empty folder with good files, `read` reads all of it; `mutable` are those that are changed."""

    write: Callable[[Path], None]
    read: Callable[[Path], Any]
    mutable: tuple[str, ...]


def model(mixer: str = "naju") -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(257, 8, 1, mixer, {"d_state": 2} if mixer == "naju" else {"n_heads": 2}))


def _write_tokens(folder: Path) -> None:
    part = Part(np.arange(40) % 16, np.array([7, 30, 40]))
    facts = {"name": "x", "bytes": 0, "sha256": ""}
    write_token_files(folder, {"train": [part], "validation": [part]}, Vocabulary(17, 16), {"tokenizer": facts})


def _read_tokens(folder: Path) -> None:
    split = open_split(folder, "train")
    read_batch(split, np.array([0, 20]), 8, reset=True)
    for index in range(min(10, len(split.documents) - 1)):
        split.document(index)


def _write_states(folder: Path) -> None:
    for mixer in ("naju", "attention"):
        _, state = model(mixer)(torch.ones(2, 3, dtype=torch.long))
        state.save(folder / mixer)


@torch.no_grad()
def _read_states(folder: Path) -> None:
    for mixer in ("naju", "attention"):
        with contextlib.suppress(TypeError):  # the layers' own word for a state of another kind
            model(mixer)(torch.ones(2, 1, dtype=torch.long), ModelState.load(folder / mixer))


def _write_pause(folder: Path) -> None:
    writer = Writer(model(), load_tokenizer("bytes"))
    writer.read("abc")
    writer.pause().save(folder / "pause")


def _read_pause(folder: Path) -> None:
    with contextlib.suppress(TypeError, FloatingPointError):
        "".join(Writer(model(), load_tokenizer("bytes"), Pause.load(folder / "pause")).write(2, Sampling(seed=0)))


def _write_checkpoint(folder: Path) -> None:
    Checkpoints(folder).save({"model.a": torch.arange(6.0).view(2, 3)}, {"step": 3, "seconds": 1.0})


def _read_checkpoint(folder: Path) -> None:
    found = Checkpoints(folder).load(lambda sentence: None)
    if found is not None:
        found.model()


def _result(experiment: str = "diagnostics") -> dict[str, Any]:
    shares = dict.fromkeys(("all", *build_task("T4").groups), 0.5)
    config = {"mixer": "naju", "task": "T4", "d_model": 128, "n_layers": 4, "length": 512, "epochs": 50}
    return {
        "experiment": experiment,
        **{"mixer": "naju", "task": "T4", "variant": "default", "seed": 1, "config": config},
        **{"parameters": 1000, "state_size": 16384, "steps": 100, "seconds": 9.5},
        **{"train_accuracy": 0.9, "best_validation": 0.8, "final_validation": 0.7},
        "accuracy": {"512": shares, "2048": shares},
        "growing": {"2048": shares},
        "curve": [[50, 1.5, None], [100, 1.0, 0.8]],
        "machine": {"accelerator": None, "processor": "p", "cores": 2},
        "when": "2030-01-01T00:00:00+00:00",
    }


def _write_runs(folder: Path) -> None:
    run = RunFolder(folder / "runs" / "diagnostics" / "one")
    run.begin({"mixer": "naju", "task": "T4", "steps": 100})
    (run.path / "metrics.jsonl").write_text(json.dumps({"step": 50, "loss": 1.5}) + "\n")
    run.finish(_result())
    other = RunFolder(folder / "runs" / "mqar" / "two")
    other.begin({"mixer": "naju", "steps": 100})
    (other.path / "metrics.jsonl").write_text(json.dumps({"step": 50, "loss": 1.5}) + "\n")


def _read_runs(folder: Path) -> None:
    for read in (
        lambda: list_runs(ListRuns(runs=folder / "runs")),
        lambda: show_run(ShowRun(name="one", runs=folder / "runs")),
        lambda: show_run(ShowRun(name="two", runs=folder / "runs")),
        lambda: read_results(folder / "runs"),
    ):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(*REFUSALS):
            read()


def _write_results(folder: Path) -> None:
    (folder / "one.json").write_text(json.dumps(_result()))


def _read_results(folder: Path) -> None:
    build_page(read_results(folder))


def _write_rows(folder: Path) -> None:
    rows = [
        {
            "model": "naju",
            "mode": "eager",
            "d_model": 256,
            "n_layers": 6,
            "length": 1024,
            "tokens_per_s": 1.0,
            "peak_bytes": 9,
        }
    ]
    for name in ("forward", "training"):
        path = save_rows(name, [{**row, "median_s": 0.5, "batch": 8, "vocab_size": 50257} for row in rows], folder)
        path.write_text(path.read_text().replace('"accelerator": null', '"accelerator": "a device"'))


def _write_source(folder: Path) -> None:
    content = b"".join(json.dumps({"text": f"line {n} \u00e9"}).encode() + b"\n" for n in range(5))
    (folder / "a.jsonl").write_bytes(content)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(content, mtime=0))
    (folder / "c.jsonl.xz").write_bytes(lzma.compress(content))
    (folder / "wiki.valid.txt").write_text(" \n = Title = \n \n words and = more \n")


def _read_source(folder: Path) -> None:
    for source in find_sources(str(folder), "auto", "text"):
        with contextlib.suppress(*REFUSALS):
            list(source.read(lambda count: None))


def _write_shard(folder: Path) -> None:
    encode_shard(Shard(folder / "shard", "train", (Piece("some text", ends=True),)), load_tokenizer("bytes"))


def _write_reviews(folder: Path) -> None:
    with tarfile.open(folder / "aclImdb_v1.tar.gz", "w:gz") as archive:
        for part, rating in (("train/neg", 2), ("train/pos", 9), ("test/neg", 1), ("test/pos", 8)):
            member = tarfile.TarInfo(f"aclImdb/{part}/0_{rating}.txt")
            member.size = 6
            archive.addfile(member, io.BytesIO(b"review"))


def _read_reviews(folder: Path) -> None:
    digests = dict.fromkeys(text.DIGESTS, hashlib.sha256(b"review").hexdigest())
    with mock.patch.multiple(text, REVIEWS=1, DIGESTS=digests, HELD_OUT=2):
        text.read(folder)


def _write_pairs(folder: Path) -> None:
    for name in retrieval.FILES.values():
        (folder / name).write_text("0.0\ta\tb\tone text\tanother\n1.0\tc\td\tthird\tfourth \u00e9\n")


def _read_pairs(folder: Path) -> None:
    with mock.patch.object(retrieval, "PAIRS", dict.fromkeys(retrieval.FILES, 2)):
        retrieval.read(folder)


def _write_grey(folder: Path) -> None:
    arrays = {f"{half}_{what}": np.arange(10, dtype=np.uint8) for half in image.PICTURES for what in ("labels",)}
    pictures = {f"{half}_images": np.zeros((10, 32, 32), np.uint8) for half in image.PICTURES}
    np.savez_compressed(folder / image.GREY, **arrays, **pictures)


def _read_grey(folder: Path) -> None:
    with (
        mock.patch.multiple(image, PICTURES=dict.fromkeys(image.PICTURES, 10), VALIDATION=2),
        mock.patch.object(image, "check_digest"),
    ):
        image.read(folder)


def _write_batches(folder: Path) -> None:
    (folder / image.BATCHES).mkdir()
    batch = {"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1], "batch_label": "x"}
    (folder / image.BATCHES / "test_batch").write_bytes(pickle.dumps(batch, protocol=2))


def _read_batches(folder: Path) -> None:
    """Without the digest, which lets none but the published files come so far."""
    path = folder / image.BATCHES / "test_batch"
    with mock.patch.object(image, "check_digest"):
        image._batch(path.parent, path.name)
    with path.open("rb") as file:
        unpickled(path, file)


def _write_cache(folder: Path) -> None:
    save_examples(folder / "cache", byte_examples([b"one", b"two two"], [0, 1], 100))


def _write_model(folder: Path) -> None:
    save_model(model(), folder)


def _write_tokenizer(folder: Path) -> None:
    load_tokenizer("bytes").save(folder)


def _read_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(folder / TOKENIZER)
    tokenizer.decode(tokenizer.encode("some text")[:8])


def _write_sharded(folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"model.a": torch.arange(6.0).view(2, 3)}, checkpoint_id=folder, no_dist=True)


TARGETS: dict[str, Target] = {
    "token-files": Target(_write_tokens, _read_tokens, ("manifest.json", "train.tokens", "train.documents")),
    "state-files": Target(_write_states, _read_states, ("naju", "attention")),
    "pauses": Target(_write_pause, _read_pause, ("pause",)),
    "checkpoints": Target(_write_checkpoint, _read_checkpoint, ("checkpoint.safetensors",)),
    "run-store": Target(
        _write_runs,
        _read_runs,
        tuple(
            f"runs/{name}"
            for name in (
                *(f"diagnostics/one/{file}" for file in ("config.json", "result.json", "result.json", "metrics.jsonl")),
                *(f"mqar/two/{file}" for file in ("config.json", "metrics.jsonl")),
            )
        ),
    ),
    "results": Target(_write_results, _read_results, ("one.json",)),
    "benchmark-rows": Target(_write_rows, speed_tables, ("forward.jsonl", "training.jsonl")),
    "model-folders": Target(_write_model, load_model, ("config.json", "model.safetensors")),
    "sources": Target(_write_source, _read_source, ("a.jsonl", "b.jsonl.gz", "c.jsonl.xz", "wiki.valid.txt")),
    "shards": Target(_write_shard, lambda folder: read_shard(folder / "shard"), ("shard",)),
    "tokenizers": Target(_write_tokenizer, _read_tokenizer, (TOKENIZER,)),
    "sharded-checkpoints": Target(_write_sharded, lambda folder: PlainReader(folder).read_metadata(), (METADATA,)),
    "listops-cache": Target(_write_cache, lambda folder: load_examples(folder / "cache"), ("cache",)),
    "reviews": Target(_write_reviews, _read_reviews, ("aclImdb_v1.tar.gz",)),
    "pairs": Target(_write_pairs, _read_pairs, tuple(retrieval.FILES.values())),
    "grey-pictures": Target(_write_grey, _read_grey, (image.GREY,)),
    "picture-batches": Target(_write_batches, _read_batches, (f"{image.BATCHES}/test_batch",)),
}


class Case:
    """A target's folder, where one file at a time is replaced and read."""

    def __init__(self, name: str, folder: Path) -> None:
        self.target, self.folder = TARGETS[name], folder
        self.target.write(folder)
        self.good = {name: (folder / name).read_bytes() for name in self.target.mutable}
        self.target.read(folder)

    def read(self, name: str, content: bytes) -> bool:
        """Whether the content is taken for good; any other exception than a refusal goes through."""
        try:
            (self.folder / name).write_bytes(content)
            self.target.read(self.folder)
        except REFUSALS:
            return False
        finally:
            (self.folder / name).write_bytes(self.good[name])
        return True
