"""Where text comes from: files of several layouts, plain or compressed, as a stream of documents.

Nothing here holds a whole file: a document is handed on in pieces, which are cut where no token would cross.
"""

from __future__ import annotations

import codecs
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any, Literal

SAMPLE = Path(__file__).with_name("sample.txt")
WIKITEXT = "wikitext-103"
CHUNK_BYTES = 2**20
PIECE = 2**20  # characters
ENDINGS = (".txt", ".raw", ".text", ".jsonl")  # what is text in a folder, compressed or not
SPLITS = {"valid": "validation", "validation": "validation", "val": "validation", "dev": "validation", "test": "test"}
TITLE = re.compile(r" = (?!=).*(?<!=) =\s*")

Layout = Literal["auto", "wikitext", "plain", "jsonl"]
Told = Callable[[int], object]  # hears how many more bytes have been read


@dataclass(frozen=True)
class Piece:
    """A stretch of a document's text; `ends` says that the document ends with it."""

    text: str
    ends: bool


@dataclass(frozen=True)
class Source:
    """One file, or one split of a published data set; `size` in bytes as stored, for the progress bar."""

    name: str
    split: str
    size: int
    read: Callable[[Told], Iterator[Piece]]


def find_sources(source: str, layout: Layout, field: str) -> list[Source]:
    """The files of a source, in an order that does not change. `field` is where JSONL keeps its text."""
    if source == WIKITEXT:
        return _wikitext_from_hub()
    root = SAMPLE if source == "sample" else Path(source)
    if not root.exists():
        raise FileNotFoundError(f"source must be a file, a folder, {WIKITEXT!r} or 'sample', but is {source!r}")
    paths = _text_files(root) if root.is_dir() else [root]
    return [_file_source(path, root, layout, field) for path in paths]


def split_of(name: str) -> str:
    """By a word in the name: `wiki.valid.raw` is of "validation", `train.0.txt.xz` of "train", as all others are."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((SPLITS[word] for word in words if word in SPLITS), "train")


def _text_files(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and _plain_name(path).endswith(ENDINGS))
    if not paths:
        raise FileNotFoundError(f"source folder {folder} holds no file that ends in {', '.join(ENDINGS)}")
    return paths


def _plain_name(path: Path) -> str:
    """Without the ending of a compression."""
    return path.stem if path.suffix in COMPRESSIONS else path.name


def _file_source(path: Path, root: Path, layout: Layout, field: str) -> Source:
    name = path.relative_to(root).as_posix() if path != root else path.name
    return Source(name, split_of(name), path.stat().st_size, partial(_read_file, path, layout, field))


def _read_file(path: Path, layout: Layout, field: str, told: Told) -> Iterator[Piece]:
    chunks = decoded(path, told)
    if layout == "auto" and _plain_name(path).endswith(".jsonl"):
        layout = "jsonl"
    if layout == "auto":
        first = _beginning(chunks)
        layout, chunks = layout_of(first), chain([first], chunks)
    if layout == "plain":
        return in_pieces(chunks)
    documents = wikitext(lines(chunks)) if layout == "wikitext" else jsonl(lines(chunks), path, field)
    return chain.from_iterable(in_pieces([document]) for document in documents)


def _beginning(chunks: Iterator[str]) -> str:
    """Taken from the chunks until a line is whole that is not blank."""
    taken = ""
    for chunk in chunks:
        taken += chunk
        if "\n" in taken.lstrip() or len(taken) > PIECE:
            break
    return taken


def layout_of(beginning: str) -> Layout:
    """WikiText's, if the first line that is not blank is a title."""
    first = next((line for line in beginning.split("\n") if line.strip()), "")
    return "wikitext" if TITLE.fullmatch(first) else "plain"


def wikitext(lines: Iterable[str]) -> Iterator[str]:
    """Articles: each begins with a line ` = Title = ` between two blank ones (or the ends of the file)."""
    article: list[str] = []
    blank_before = True
    for line, after in pairwise(chain(lines, [""])):
        if blank_before and not after.strip() and TITLE.fullmatch(line):
            yield "".join(article)
            article = []
        article.append(line)
        blank_before = not line.strip()
    yield "".join(article)


def jsonl(lines: Iterable[str], path: Path, field: str) -> Iterator[str]:
    """One JSON object a line, with the document's text in one of its fields."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _text_of(line, f"line {number} of {path}", field)


def _text_of(line: str, where: str, field: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"{where} must be an object with a text in field {field!r}, but is {line.strip()[:80]!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} holds half of a surrogate pair, which is no character: {error}") from error
    return text


def in_pieces(parts: Iterable[str]) -> Iterator[Piece]:
    """One document, given in any parts, in pieces of bounded size; none if it is blank."""
    held, begun = "", False
    for part in parts:
        held, start = held + part, 0
        while len(held) - start > 2 * PIECE:
            cut = _gap(held, start)
            yield Piece(held[start:cut], ends=False)
            start, begun = cut, True
        held = held[start:]
    if begun or held.strip():
        yield Piece(held, ends=True)


def _gap(text: str, start: int) -> int:
    """A place to cut about PIECE further on: before a blank that follows a word, where GPT-2's own pattern always cuts,
    or anywhere if there is none."""
    middle = start + PIECE // 2
    gaps = [match.end() - 1 for match in re.finditer(r"\S\s", text[middle : start + PIECE])]
    return middle + gaps[-1] if gaps else start + PIECE


def lines(chunks: Iterable[str]) -> Iterator[str]:
    r"""Cut at `\n` only, which stays; Unicode's other line ends are text."""
    held = ""
    for chunk in chunks:
        *whole, held = (held + chunk).split("\n")
        yield from (line + "\n" for line in whole)
    if held:
        yield held


def decoded(path: Path, told: Told) -> Iterator[str]:
    """The text of a file in chunks, decompressed; what is not UTF-8 is refused with its place."""
    decoder, seen, begun = codecs.getincrementaldecoder("utf-8")(), 0, False
    for chunk in chain(_decompressed(path, told), [b""]):
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            held = len(error.object) - len(chunk)
            place = seen - held + error.start
            raise ValueError(
                f"{path} must be UTF-8, but byte {place:,} of its text is 0x{error.object[error.start]:02x} "
                f"({error.reason})"
            ) from error
        seen += len(chunk)
        if text:
            yield text if begun else text.removeprefix("\ufeff")
            begun = True


def _decompressed(path: Path, told: Told) -> Iterator[bytes]:
    with path.open("rb") as stored:
        opened = COMPRESSIONS.get(path.suffix, lambda file: file)(stored)
        place = 0
        try:
            while chunk := opened.read(CHUNK_BYTES):
                yield chunk
                told(stored.tell() - place)
                place = stored.tell()
        except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is truncated or damaged after byte {stored.tell():,}: {error}") from error


class _ZstdFile:
    """Reads frame after frame, and notices where the last one breaks off, which the package's own reader does not."""

    def __init__(self, stored: IO[bytes]) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ImportError("a .zst file needs zstandard; install it with: pip install zstandard") from error
        self._stored, self._new, self._error = stored, zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
        self._frame: Any = None  # the one that is not complete yet
        self._rest = b""

    def read(self, size: int) -> bytes:
        """Nothing at the end only; otherwise how much depends on the compression."""
        content = b""
        while not content:
            packed = self._rest or self._stored.read(size // 8)
            if not packed and self._frame is not None:
                raise EOFError("the last frame is not complete")
            if not packed:
                return b""
            content = self._decompress(packed)
        return content

    def _decompress(self, packed: bytes) -> bytes:
        frame = self._frame or self._new()
        try:
            content: bytes = frame.decompress(packed)
        except self._error as error:
            raise EOFError(str(error)) from error
        self._frame, self._rest = (None, frame.unused_data) if frame.eof else (frame, b"")
        return content


COMPRESSIONS: dict[str, Callable[[IO[bytes]], Any]] = {".gz": gzip.open, ".xz": lzma.open, ".zst": _ZstdFile}


def _wikitext_from_hub() -> list[Source]:
    instead = "or give the folder that holds wiki.train.raw, wiki.valid.raw and wiki.test.raw"
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"source {WIKITEXT!r} is downloaded with datasets; install it with: pip install datasets, {instead}"
        ) from error
    try:
        loaded = datasets.load_dataset("Salesforce/wikitext", "wikitext-103-raw-v1")
    except OSError as error:
        raise OSError(f"source {WIKITEXT!r} could not be downloaded ({error}); try again, {instead}") from error
    return [
        Source(f"{WIKITEXT}/{split}", split, int(rows.num_rows), partial(_read_rows, rows))
        for split, rows in loaded.items()
    ]


def _read_rows(rows: Iterable[dict[str, str]], told: Told) -> Iterator[Piece]:
    """A row is a line, a blank one has lost its blank, and `size` counts rows."""

    def texts() -> Iterator[str]:
        for row in rows:
            yield row["text"] or " \n"
            told(1)

    return chain.from_iterable(in_pieces([article]) for article in wikitext(lines(texts())))
