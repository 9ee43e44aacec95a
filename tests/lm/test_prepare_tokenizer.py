"""Tokenizers: where they come from, that all text is text to them, and text as it streams out."""

import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, normalizers, pre_tokenizers

from naju.lm.token_files import MANIFEST, Part, write_token_files
from naju.lm.tokenizer import SAMPLE_TOKENIZER, TextStream, Tokenizer, load_tokenizer

TEXT = "To be, or not to be: naïve \u20ac\U0001f600\n\n  <|endoftext|> that\r\n"


def gpt2_files(folder: Path, names: tuple[str, str]) -> None:
    """The sample's vocabulary and merges as two files."""
    model = json.loads(SAMPLE_TOKENIZER.read_text())["model"]
    (folder / names[0]).write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (folder / names[1]).write_text(f"#version: 0.2\n{merges}\n")


@pytest.mark.parametrize("name", ["bytes", "sample"])
def test_text_comes_back(name: str) -> None:
    tokenizer = load_tokenizer(name)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_bytes_are_their_own_ids() -> None:
    tokenizer = load_tokenizer("bytes")
    every = bytes(range(128)).decode() + "".join(chr(code) for code in range(128, 2048)) + "\uffff\U0010ffff"
    assert tokenizer.encode(every) == list(every.encode())
    assert (tokenizer.vocabulary.size, tokenizer.vocabulary.end_of_text) == (257, 256)


@pytest.mark.parametrize("name", ["bytes", "sample"])
def test_a_special_token_in_the_text_is_text_also_in_another_process(name: str) -> None:
    tokenizer = load_tokenizer(name)
    for same in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        assert same.vocabulary.end_of_text not in same.encode(TEXT)
        assert same.vocabulary == tokenizer.vocabulary
        one, other = same.encode_all([TEXT, ""])
        assert one.tolist() == tokenizer.encode(TEXT)
        assert one.dtype == np.uint16
        assert len(other) == 0


@pytest.mark.parametrize("names", [("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")])
def test_a_vocabulary_and_its_merges_make_the_same_tokens_as_a_tokenizer_json(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    gpt2_files(tmp_path, names)
    assert load_tokenizer(tmp_path).encode(TEXT) == load_tokenizer("sample").encode(TEXT)
    assert load_tokenizer(tmp_path).vocabulary == load_tokenizer("sample").vocabulary


def test_a_tokenizer_json_is_found_by_its_name_or_its_folder(tmp_path: Path) -> None:
    load_tokenizer("sample").save(tmp_path)
    for place in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path)):
        assert load_tokenizer(place).encode(TEXT) == load_tokenizer("sample").encode(TEXT)


def test_padding_truncation_and_added_tokens_of_a_tokenizer_json_are_put_aside(tmp_path: Path) -> None:
    engine = Engine.from_file(str(SAMPLE_TOKENIZER))
    engine.enable_truncation(3)
    engine.enable_padding(length=200)
    engine.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode(TEXT) == load_tokenizer("sample").encode(TEXT)


def test_token_files_know_their_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer(Engine.from_file(str(SAMPLE_TOKENIZER)), "mine", "!")
    about = {"tokenizer": tokenizer.save(tmp_path)}
    end = tokenizer.vocabulary.end_of_text
    write_token_files(tmp_path, {"train": [Part(np.array([end]), np.array([1]))]}, tokenizer.vocabulary, about)
    found = load_tokenizer(tmp_path)
    assert (found.name, found.vocabulary) == ("mine", tokenizer.vocabulary)
    altered = (tmp_path / "tokenizer.json").read_bytes().replace(b"BPE", b"bpe")
    (tmp_path / "tokenizer.json").write_bytes(altered)
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged"):
        load_tokenizer(tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    del manifest["tokenizer"]
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="do not say which tokenizer"):
        load_tokenizer(tmp_path)


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="tokenizer must be a file, a folder or one of bytes, gpt2, sample"):
        load_tokenizer("nowhere")
    with pytest.raises(FileNotFoundError, match=r"must hold tokenizer\.json, or encoder\.json and vocab\.bpe or"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer\.json"):
        load_tokenizer(tmp_path)
    gpt2_files(tmp_path, ("encoder.json", "vocab.bpe"))
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "encoder.json").write_text("[")
    with pytest.raises(ValueError, match=r"vocab\.bpe are not a vocabulary and its merges"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer 'bytes' has no token </s>; name its end of text"):
        load_tokenizer("bytes", "</s>")


def test_gpt2_offline_says_what_to_do_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    import tokenizers

    class Offline:
        @staticmethod
        def from_pretrained(name: str) -> None:
            raise RuntimeError("no network")

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *names: None)
    monkeypatch.setattr(tokenizers, "Tokenizer", Offline)
    with pytest.raises(
        OSError, match=r"give the folder that holds encoder\.json and vocab\.bpe instead \(no network\)"
    ):
        load_tokenizer("gpt2")


def test_gpt2_from_the_cache_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    cached = tmp_path / "tokenizer.json"
    cached.write_text(load_tokenizer("sample").to_json())
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *names: str(cached))
    assert load_tokenizer("gpt2").has_the_ids_of(load_tokenizer("sample"))


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'naju\[lm\]'"):
        load_tokenizer("bytes")


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=40))
@pytest.mark.parametrize("name", ["bytes", "sample"])
def test_streamed_text_is_the_text_and_never_shows_half_a_character(name: str, text: str) -> None:
    tokenizer = load_tokenizer(name)
    stream = TextStream(tokenizer)
    pieces = [stream.add(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert stream.finish() == ""


def test_a_character_is_shown_with_its_last_byte() -> None:
    stream = TextStream(load_tokenizer("bytes"))
    assert [stream.add(byte) for byte in "a\u20acb".encode()] == ["a", "", "", "\u20ac", "b"]
    assert [stream.add(byte) for byte in "\u20ac".encode()[:2]] == ["", ""]
    assert stream.held == [0xE2, 0x82]
    assert stream.finish() == "\ufffd"
    assert stream.held == []
    assert [stream.add(byte) for byte in b"\xffab"] == ["", "\ufffda", "b"]


def test_a_decoder_that_drops_the_first_blank_streams_the_blanks_between_words() -> None:
    vocabulary = {"<unk>": 0, "</s>": 1, "▁one": 2, "▁two": 3, "s": 4}
    engine = Engine(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    engine.normalizer, engine.pre_tokenizer = normalizers.Sequence([]), pre_tokenizers.Metaspace()
    engine.decoder = decoders.Metaspace()
    stream = TextStream(Tokenizer(engine, "words"))
    assert [stream.add(token) for token in (2, 3, 4, 2)] == ["one", " two", "s", " one"]
