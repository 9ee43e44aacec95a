"""Reading text: layouts, compressions, and what is refused with its place."""

import gzip
import json
import lzma
import sys
import types
from itertools import chain, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naju.lm import sources
from naju.lm.sources import decoded, find_sources, in_pieces, layout_of, lines, split_of, wikitext
from naju.lm.tokenizer import load_tokenizer

FIRST = " = First title = \n \n With a = b in it . \n \n = = A section = = \n \n = more = text = \n a = 1 = \n"
SECOND = " \n = Second = \n \n = = = Deep = = = \n \n End . \n"
WIKI = f"{FIRST}{SECOND}"


def documents(source: Path | str, **options: str) -> list[str]:
    """The documents of all files of a source, each in one string."""
    found = find_sources(str(source), options.get("layout", "auto"), options.get("field", "text"))
    texts = [""]
    for file in found:
        for piece in file.read(lambda count: None):
            texts[-1] += piece.text
            texts += [""] * piece.ends
    assert texts[-1] == ""
    return texts[:-1]


def test_wikitext_articles_begin_at_titles_between_blank_lines() -> None:
    articles = [article for article in wikitext(lines([WIKI])) if article]
    assert articles == [f"{FIRST} \n", SECOND.removeprefix(" \n")]


def test_the_layout_is_seen_from_the_first_line() -> None:
    assert layout_of(f" \n\n{WIKI}") == "wikitext"
    assert layout_of(" = = A section = = \n") == "plain"
    assert layout_of("Plain text\n\n = Title = \n") == "plain"
    assert layout_of("") == "plain"


def test_a_plain_file_is_one_document_and_a_folder_is_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second\n\nfile")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.txt").write_text("first\n")
    (tmp_path / "blank.txt").write_text(" \n\n")
    (tmp_path / "notes.md").write_text("not read")
    assert documents(tmp_path) == ["first\n", "second\n\nfile"]
    assert documents(tmp_path / "notes.md") == ["not read"]


def zst(content: bytes) -> bytes:
    """In two frames, with the checksums that the zstd command writes."""
    pack = (
        pytest.importorskip("zstandard", reason="zstandard is not installed")
        .ZstdCompressor(write_checksum=True)
        .compress
    )
    return bytes(pack(content[:10]) + pack(content[10:]))


@pytest.mark.parametrize(("ending", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress), (".zst", zst)])
def test_a_compressed_file_is_read_and_a_truncated_or_damaged_one_refused(tmp_path: Path, ending, pack) -> None:
    path = tmp_path / f"wiki.valid.raw{ending}"
    packed = pack(WIKI.encode())
    path.write_bytes(packed)
    assert documents(path) == [f"{FIRST} \n", SECOND.removeprefix(" \n")]
    for broken in (packed[:-9], packed[:12] + b"\x00\xff" * 8 + packed[28:]):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=rf"raw\{ending} is truncated or damaged after byte"):
            documents(path)


def test_zst_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.txt.zst").write_bytes(b"")
    with pytest.raises(ImportError, match="pip install zstandard"):
        documents(tmp_path)


def test_jsonl_documents_come_from_a_field(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    texts = ["one\u2028line", "", "zwei\nZeilen é"]
    path.write_text("\n\n".join(json.dumps({"body": text, "id": 1}) for text in texts))
    assert documents(path, field="body") == [text for text in texts if text]
    assert documents(path.rename(tmp_path / "a.txt"), layout="jsonl", field="body") == [texts[0], texts[2]]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2 of .*a.jsonl is not JSON"),
        ("[1]", "line 2 of .*a.jsonl must be an object with a text in field 'text'"),
        ('{"other": "x"}', "must be an object with a text in field 'text', but is '{\"other\""),
        ('{"text": 1}', "must be an object"),
        ('{"text": "\\ud800"}', "half of a surrogate pair"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path: Path, line: str, told: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(ValueError, match=told):
        documents(tmp_path / "a.jsonl")


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 100])
def test_bytes_that_are_not_utf8_are_named_with_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", chunk)
    path = tmp_path / "a.txt"
    for good in (b"", b"abc", "aé\u20ac".encode()):
        path.write_bytes(good + b"\xff rest")
        with pytest.raises(ValueError, match=rf"a\.txt must be UTF-8, but byte {len(good)} of its text is 0xff"):
            list(decoded(path, lambda count: None))
        path.write_bytes(good + b"\xe2\x82")
        with pytest.raises(ValueError, match=rf"byte {len(good)} of its text is 0xe2"):
            list(decoded(path, lambda count: None))


def test_text_survives_any_chunking_and_a_byte_order_mark_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "é\u20ac\U0001f600\r\n x\ufeff"
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    for chunk in (1, 2, 3, 50):
        monkeypatch.setattr(sources, "CHUNK_BYTES", chunk)
        assert "".join(decoded(path, lambda count: None)) == text


def test_progress_hears_of_every_stored_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", 7)
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(WIKI.encode()))
    told: list[int] = []
    list(find_sources(str(path), "auto", "text")[0].read(told.append))
    assert sum(told) == path.stat().st_size


WORDS = st.text("abé'1.", min_size=1, max_size=4)
GAPS = st.text(" \n\t", min_size=1, max_size=3)


@given(words=st.lists(st.tuples(WORDS, GAPS), min_size=15, max_size=25), cuts=st.lists(st.integers(0, 90), max_size=4))
def test_pieces_are_cut_where_no_token_crosses(words: list[tuple[str, str]], cuts: list[int]) -> None:
    text = "".join(chain.from_iterable(words)) + "end of the text, which is long enough."
    parts = [text[start:stop] for start, stop in pairwise([0, *sorted(cuts), len(text)])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE", 20)
        pieces = list(in_pieces(parts))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) > 1
    assert all(len(piece.text) <= 40 for piece in pieces)
    encoded = map(load_tokenizer("sample").encode, [piece.text for piece in pieces])
    assert list(chain.from_iterable(encoded)) == load_tokenizer("sample").encode(text)


def test_a_document_without_any_gap_is_cut_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE", 20)
    assert [len(piece.text) for piece in in_pieces(["x" * 50, "y" * 35])] == [20, 20, 20, 25]
    assert list(in_pieces([" \n", "", "\t"])) == []


def test_the_name_says_the_split() -> None:
    names = (
        "wiki.train.raw",
        "train.0.txt.xz",
        "wiki.valid.raw",
        "validation/0.jsonl",
        "dev.txt",
        "test-1.txt",
        "a.txt",
    )
    assert [split_of(name) for name in names] == [*["train"] * 2, *["validation"] * 3, "test", "train"]
    assert split_of("latest.txt") == "train"


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="source must be a file, a folder, 'wikitext-103' or 'sample'"):
        documents(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"holds no file that ends in \.txt"):
        documents(tmp_path)


def test_wikitext_from_the_hub_has_the_raw_layout_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published rows are lines, and blank ones are empty."""

    class Rows(list[dict[str, str]]):
        num_rows = property(len)

    rows = Rows({"text": line if line.strip() else ""} for line in lines([f" \n{WIKI}"]))
    published = {"test": rows, "train": rows}
    module = types.SimpleNamespace(load_dataset=lambda *names: published)
    monkeypatch.setitem(sys.modules, "datasets", module)
    found = find_sources("wikitext-103", "auto", "text")
    assert [source.split for source in found] == ["test", "train"]
    told: list[int] = []
    assert [piece.text for piece in found[0].read(told.append)] == [f"{FIRST} \n", SECOND.removeprefix(" \n")]
    assert sum(told) == found[0].size


def test_wikitext_without_datasets_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install datasets, or give the folder that holds wiki\.train\.raw"):
        find_sources("wikitext-103", "auto", "text")


def test_wikitext_without_a_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*names: str) -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=unreachable))
    with pytest.raises(OSError, match=r"could not be downloaded \(nobody there\); try again, or give the folder"):
        find_sources("wikitext-103", "auto", "text")
