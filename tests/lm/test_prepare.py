"""`naju lm prepare` as a whole: the same files however it was run, interrupted or not, and nothing half done."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from naju import cli
from naju.lm import prepare as prepare_module
from naju.lm import shards, sources
from naju.lm.prepare import PrepareConfig, prepare
from naju.lm.shards import read_shard
from naju.lm.token_files import MANIFEST, open_split
from naju.lm.tokenizer import load_tokenizer
from naju.training import files

ARTICLES = [f" = Title {k} = \n \n {'word ' * (7 * k % 23)} . \n" for k in range(30)]


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_CHARACTERS", 300)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "wiki.train.raw").write_text(" \n".join(ARTICLES))
    (folder / "wiki.valid.raw").write_text(" \n".join(ARTICLES[:3]))
    return folder


def config(source: Path | str, out: Path, **options: object) -> PrepareConfig:
    return PrepareConfig(**{"source": str(source), "out": out, "tokenizer": "sample", "processes": 1, **options})  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def texts(folder: Path, split: str) -> list[str]:
    """Documents without their end of text."""
    tokenizer, data = load_tokenizer(folder), open_split(folder, split, verify=True)
    documents = [data.document(k).tolist() for k in range(len(data.documents) - 1)]
    assert all(document[-1] == data.end_of_text for document in documents)
    return [tokenizer.decode(document[:-1]) for document in documents]


def count_encoded(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None] = lambda count: None) -> list[Path]:
    """The shards that are encoded from now on; `before` hears how many there were before each."""
    encoded: list[Path] = []
    honest = shards.encode_shard

    def encode(shard, tokenizer):
        before(len(encoded))
        encoded.append(shard.path)
        return honest(shard, tokenizer)

    monkeypatch.setattr(shards, "encode_shard", encode)
    return encoded


def test_every_article_becomes_a_document(source: Path, tmp_path: Path) -> None:
    manifest = prepare(config(source, tmp_path / "out"))
    assert texts(tmp_path / "out", "train") == [f"{article} \n" for article in ARTICLES[:-1]] + ARTICLES[-1:]
    assert len(texts(tmp_path / "out", "validation")) == manifest["splits"]["validation"]["documents"] == 3
    assert set(contents(tmp_path / "out")) == {
        MANIFEST,
        "tokenizer.json",
        *(f"{split}.{kind}" for split in ("train", "validation") for kind in ("tokens", "documents")),
    }


def test_several_processes_write_the_same_files(source: Path, tmp_path: Path) -> None:
    prepare(config(source, tmp_path / "one"))
    prepare(config(source, tmp_path / "two", processes=2))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_a_document_longer_than_a_shard_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(ARTICLES).replace(" = ", " ")
    (tmp_path / "train.txt").write_text(text)
    prepare(config(tmp_path / "train.txt", tmp_path / "whole", validation_share=0.0))
    monkeypatch.setattr(sources, "PIECE", 200)
    encoded = count_encoded(monkeypatch)
    prepare(config(tmp_path / "train.txt", tmp_path / "cut", validation_share=0.0))
    assert len(encoded) > 3
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert texts(tmp_path / "cut", "train") == [text]


@pytest.mark.parametrize("stop", [0, 1, 4])
def test_an_interrupted_preparation_goes_on_where_it_was(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    prepare(config(source, tmp_path / "whole"))

    def interrupt(count: int) -> None:
        if count == stop:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        first = count_encoded(patch, interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(config(source, tmp_path / "out"))
    with pytest.raises(FileNotFoundError, match="did not finish"):
        open_split(tmp_path / "out", "train")
    second = count_encoded(monkeypatch)
    prepare(config(source, tmp_path / "out"))
    assert len(first) == stop
    assert second
    assert not set(first) & set(second)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def interrupted(source: Path, out: Path) -> list[Path]:
    """Stopped when all shards are encoded; returns them."""
    with pytest.MonkeyPatch.context() as patch:

        def interrupt(*arguments: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(prepare_module, "write_token_files", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(config(source, out))
    return sorted((out / ".shards").iterdir())


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: content[:-1] + b"\x77"])
def test_a_damaged_shard_is_reported_and_made_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage
) -> None:
    prepare(config(source, tmp_path / "whole"))
    made = interrupted(source, tmp_path / "out")
    (tmp_path / "out" / ".train.tokens.1.new").write_bytes(b"left by a process that was killed")
    made[2].write_bytes(damage(made[2].read_bytes()))
    with pytest.raises(ValueError, match=f"shard {made[2]} is .*damaged"):
        read_shard(made[2])
    again = count_encoded(monkeypatch)
    prepare(config(source, tmp_path / "out"))
    assert again == [made[2]]
    assert f"shard {made[2]} is damaged and is made again" in capsys.readouterr().err
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_shards_of_other_text_or_of_another_tokenizer_are_not_used(source: Path, tmp_path: Path) -> None:
    interrupted(source, tmp_path / "out")
    (source / "wiki.train.raw").write_text(" \n".join(ARTICLES).replace("word", "bird"))
    prepare(config(source, tmp_path / "other", tokenizer="bytes"))
    prepare(config(source, tmp_path / "out", tokenizer="bytes"))
    assert contents(tmp_path / "out") == contents(tmp_path / "other")


@pytest.mark.parametrize("from_the_end", [0, 2, 5, 9, 20])
def test_a_full_disk_is_a_clear_error_and_the_rest_is_done_later(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_the_end: int
) -> None:
    """The last files to be forced to the disk are the manifest, the tokens and the tokenizer, before them shards."""
    writes, room = 0, 1000

    def fsync(handle: int) -> None:
        nonlocal writes
        writes += 1
        if writes > room:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", fsync)
    prepare(config(source, tmp_path / "whole"))
    writes, room = 0, writes - 2 - from_the_end  # the very last is that of the folder
    with pytest.raises(OSError, match=r"the disk of .*out is full .* run the same command again"):
        prepare(config(source, tmp_path / "out"))
    assert not (tmp_path / "out" / MANIFEST).exists()
    assert not [name for name in contents(tmp_path / "out") if name.endswith(".new")]
    room = 1000
    prepare(config(source, tmp_path / "out"))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_finished_folder_is_left_as_it_is_and_that_of_another_command_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = prepare(config(source, tmp_path / "out"))
    before = contents(tmp_path / "out")
    encoded = count_encoded(monkeypatch)
    assert prepare(config(source, tmp_path / "out")) == manifest
    assert encoded == []
    (tmp_path / "one.txt").write_text("other")
    others = [(source, {"tokenizer": "bytes"}), (tmp_path / "one.txt", {}), (source, {"end_of_text": "!"})]
    for text, options in others:
        with pytest.raises(
            ValueError, match=r"out folder .* holds token files of another source, tokenizer or options"
        ):
            prepare(config(text, tmp_path / "out", **options))
    assert contents(tmp_path / "out") == before
    damaged = tmp_path / "out" / "train.tokens"
    for content in (damaged.read_bytes()[::-1], b""):
        damaged.write_bytes(content)
        with pytest.raises(ValueError, match=r"train\.tokens is damaged"):
            prepare(config(source, tmp_path / "out"))


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.9])
@pytest.mark.parametrize("layout", ["wikitext", "plain"])
def test_the_end_of_the_text_is_held_out(source: Path, tmp_path: Path, share: float, layout: str) -> None:
    text = source / "wiki.train.raw"
    prepare(config(text, tmp_path / "all", validation_share=0.0, layout=layout))
    whole = open_split(tmp_path / "all", "train")
    manifest = prepare(config(text, tmp_path / "out", validation_share=share, layout=layout))
    if share == 0:
        assert set(manifest["splits"]) == {"train"}
        return
    train, held_out = (open_split(tmp_path / "out", split) for split in ("train", "validation"))
    place = round(len(whole.tokens) * (1 - share))
    if (whole.documents[:-1] >= place).any():  # where a document begins
        place = int(whole.documents[:-1][whole.documents[:-1] >= place][0])
        assert np.array_equal(np.concatenate([train.tokens, held_out.tokens]), whole.tokens)
    assert np.array_equal(train.tokens[:place], whole.tokens[:place])
    assert train.tokens[-1] == train.end_of_text
    assert np.array_equal(held_out.tokens, whole.tokens[place:])
    ends = np.concatenate([train.documents[:-1], len(train.tokens) + held_out.documents])
    assert len(ends) - 1 == len(whole.documents) - 1 + (len(train.tokens) > place)


def test_a_large_vocabulary_gets_wide_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Engine
    from tokenizers import models, pre_tokenizers

    vocabulary = {"<eos>": 0, **{f"w{k}": k for k in range(1, 70_000)}}
    engine = Engine(models.WordLevel(vocabulary, unk_token="<eos>"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    engine.save(str(tmp_path / "words.json"))
    (tmp_path / "a.txt").write_text("w1 w69999")
    prepare(config(tmp_path / "a.txt", tmp_path / "out", tokenizer=str(tmp_path / "words.json"), validation_share=0.0))
    split = open_split(tmp_path / "out", "train")
    assert split.tokens.dtype == np.uint32
    assert split.tokens.tolist() == [1, 69_999, 0]


def test_bad_options_and_sources_without_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"validation_share must lie in \[0, 1\), but is 1"):
        config("sample", tmp_path, validation_share=1)
    with pytest.raises(ValueError, match="processes must not be negative, but is -1"):
        config("sample", tmp_path, processes=-1)
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(ValueError, match="the source holds no text"):
        prepare(config(tmp_path / "blank.txt", tmp_path / "out"))


def test_a_missing_source_is_noticed_before_a_tokenizer_is_downloaded(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="source must be a file, a folder"):
        prepare(config(tmp_path / "nowhere", tmp_path / "out", tokenizer=str(tmp_path / "no tokenizer either")))


def test_the_command_prepares_the_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "data"
    cli.main(["lm", "prepare", "--source", "sample", "--tokenizer", "bytes", "--out", str(out), "--processes", "1"])
    manifest = json.loads((out / MANIFEST).read_text())
    told = capsys.readouterr().out
    assert f"train: {manifest['splits']['train']['tokens']:,} tokens in 1 document\n" in told
    assert "vocabulary 257" in told
    assert "".join(texts(out, "train") + texts(out, "validation")) == sources.SAMPLE.read_text()


def test_the_command_names_what_is_wrong_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "latin.txt"
    bad.write_bytes(b"caf\xe9")
    with pytest.raises(SystemExit) as stop:
        cli.main(["lm", "prepare", "--source", str(bad), "--tokenizer", "bytes", "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert "latin.txt must be UTF-8, but byte 3 of its text is 0xe9" in told
    assert told.count("\n") == 1


@pytest.mark.slow
def test_the_real_files_have_their_known_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.environ.get("NAJU_DATA")
    if data is None or not (Path(data) / "gpt2-bpe").exists():
        pytest.skip("NAJU_DATA does not name a folder with wikitext-103-raw and gpt2-bpe")
    monkeypatch.setattr(shards, "SHARD_CHARACTERS", 2**20)
    out = tmp_path / "out"
    manifest = prepare(config(Path(data) / "wikitext-103-raw", out, tokenizer=str(Path(data) / "gpt2-bpe")))
    # The files as one text have 249,887 and 286,221 tokens; the blank line before the first article has two.
    assert manifest["splits"] == {
        "test": {"tokens": 286_221 - 2 + 60, "documents": 60},
        "validation": {"tokens": 249_887 - 2 + 60, "documents": 60},
    }


def test_a_short_last_document_is_not_all_that_is_held_out(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.txt").write_text("many words " * 1000)
    (folder / "b.txt").write_text("The end.")
    manifest = prepare(config(folder, tmp_path / "out", validation_share=0.05, layout="plain"))
    held_out = manifest["splits"]["validation"]["tokens"]
    assert 0.02 <= held_out / (held_out + manifest["splits"]["train"]["tokens"]) <= 0.06


def test_a_finished_folder_must_still_have_its_tokenizer(source: Path, tmp_path: Path) -> None:
    prepare(config(source, tmp_path / "out"))
    (tmp_path / "out" / "tokenizer.json").unlink()
    with pytest.raises((OSError, ValueError), match=r"tokenizer\.json"):
        prepare(config(source, tmp_path / "out"))
