"""From text to token ids and back, by a `tokenizer.json`, GPT-2's two files, or plain bytes."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from naju.lm.token_files import MANIFEST, Tokens, Vocabulary, check_file, read_manifest
from naju.training.files import write_json, write_whole

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Engine

TOKENIZER, END_FILE = "tokenizer.json", "end_of_text.json"
SAMPLE_TOKENIZER = Path(__file__).with_name("sample_tokenizer.json")
CONTEXT = 8  # tokens before one that its text may depend on
GPT2 = "openai-community/gpt2"
END_OF_TEXT = "<|endoftext|>"
# What other vocabularies call the token that ends a document.
ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
# A vocabulary and its merges, under the names of GPT-2's release and those of Hugging Face.
TWO_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))


class Tokenizer:
    """All text is text to it: a document that spells out a special token gets the pieces of its letters.

    `end_of_text` is that token's id or its text; None looks for one of the usual names.
    """

    def __init__(self, engine: Engine, name: str, end_of_text: int | str | None = None) -> None:
        engine.no_truncation()
        engine.no_padding()
        engine.encode_special_tokens = True
        self.name, self._engine = name, engine
        size = max(engine.get_vocab(with_added_tokens=True).values()) + 1
        self.vocabulary = Vocabulary(size, _end_of_text(engine, name, end_of_text))

    def __reduce__(self) -> tuple[Any, ...]:
        """For other processes: the library's own pickle forgets that special tokens are text."""
        return _rebuilt, (self.to_json(), self.name, self.vocabulary.end_of_text)

    def encode(self, text: str) -> list[int]:
        with self._refusing():
            return list(self._engine.encode(text, add_special_tokens=False).ids)

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        """Many at once, and faster."""
        with self._refusing():
            encodings = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, self.vocabulary.dtype) for encoding in encodings]

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"tokenizer {self.name!r} cannot encode the text: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._engine.decode(list(ids), skip_special_tokens=False))

    def has_the_ids_of(self, other: Tokenizer) -> bool:
        """Whether the same tokens have the same ids, whatever else the two files say."""
        return self._engine.get_vocab() == other._engine.get_vocab()

    def to_json(self) -> str:
        """The content of a `tokenizer.json`."""
        return str(self._engine.to_str())

    def save(self, folder: Path) -> dict[str, Any]:
        """Write `tokenizer.json` and return what a manifest says of it."""
        content = self.to_json().encode()
        write_whole(folder / TOKENIZER, content)
        return {"name": self.name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    def save_with_model(self, folder: Path) -> None:
        """With the end of text, which the tokenizer's own file does not tell."""
        self.save(folder)
        _write_end_of_text(folder, self.vocabulary.end_of_text)


class TextStream:
    """Turns tokens into text as they come. What may be the first bytes of a character waits in `held` for the rest."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._before: list[int] = []  # some decoders need to see what stands before a token
        self.held: list[int] = []

    def add(self, token: int) -> str:
        self.held.append(token)
        text = self._text()
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self._show(text)

    def finish(self) -> str:
        """What is held, although it is not whole."""
        return self._show(self._text())

    def _text(self) -> str:
        return self._decode(self._before + self.held).removeprefix(self._decode(self._before))

    def _show(self, text: str) -> str:
        self._before, self.held = self.held or self._before, []
        return text

    def follow(self, tokens: Sequence[int]) -> None:
        """These have been shown by somebody else; what comes next stands behind them."""
        self._before = list(tokens[-CONTEXT:])


def load_tokenizer(name: str | Path, end_of_text: str | None = None) -> Tokenizer:
    """`bytes`, `gpt2`, `sample`, a `tokenizer.json`, or a folder: of token files, with a `tokenizer.json`, or with
    GPT-2's `encoder.json` and `vocab.bpe`."""
    known = {"bytes": _bytes, "gpt2": _gpt2_from_hub, "sample": lambda: _from_json(SAMPLE_TOKENIZER)}
    if str(name) in known:
        return Tokenizer(known[str(name)](), str(name), end_of_text)
    path = Path(name)
    if not path.exists():
        raise FileNotFoundError(
            f"tokenizer must be a file, a folder or one of {', '.join(known)}, but is {str(name)!r}"
        )
    if not path.is_dir():
        return Tokenizer(_from_json(path), path.name, end_of_text)
    if (path / MANIFEST).exists():
        return _of_token_files(path)
    if (path / TOKENIZER).exists():
        return Tokenizer(_from_json(path / TOKENIZER), path.name, end_of_text or _own_end_of_text(path))
    return Tokenizer(_from_two_files(path), path.name, end_of_text)


def copy_tokenizer(data: Path, folder: Path) -> None:
    """That of token files, if they have it, to a model that learned from them, as `save_with_model` would."""
    if (data / TOKENIZER).exists():
        write_whole(folder / TOKENIZER, (data / TOKENIZER).read_bytes())
        _write_end_of_text(folder, read_manifest(data)["end_of_text"])


def _write_end_of_text(folder: Path, token: int) -> None:
    write_json(folder / END_FILE, {"end_of_text": token})


def _own_end_of_text(folder: Path) -> int | None:
    """As `_write_end_of_text` left it."""
    path = folder / END_FILE
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_bytes())["end_of_text"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} does not tell the end of text: {error}") from error
    if type(found) is not int:
        raise ValueError(f"{path} does not tell the end of text: it is {found!r}")
    return found


def _rebuilt(content: str, name: str, end_of_text: int) -> Tokenizer:
    return Tokenizer(_tokenizers().Tokenizer.from_str(content), name, end_of_text)


def _of_token_files(folder: Path) -> Tokenizer:
    manifest = read_manifest(folder)
    if "tokenizer" not in manifest:
        raise ValueError(f"the token files in {folder} do not say which tokenizer made them")
    check_file(folder / TOKENIZER, manifest["tokenizer"], verify=True)
    return Tokenizer(_from_json(folder / TOKENIZER), manifest["tokenizer"]["name"], manifest["end_of_text"])


def _from_json(path: Path) -> Engine:
    library = _tokenizers()
    try:
        engine: Engine = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from error
    return engine


def _from_two_files(folder: Path) -> Engine:
    for names in TWO_FILES:
        vocabulary, merges = (folder / name for name in names)
        if vocabulary.exists() and merges.exists():
            return _gpt2(vocabulary, merges)
    wanted = " or ".join(" and ".join(names) for names in TWO_FILES)
    raise FileNotFoundError(f"tokenizer folder {folder} must hold {TOKENIZER}, or {wanted}, but holds none of them")


def _gpt2(vocabulary: Path, merges: Path) -> Engine:
    library = _tokenizers()
    try:
        model = library.models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # the library raises nothing more special
        raise ValueError(f"{vocabulary} and {merges.name} are not a vocabulary and its merges: {error}") from error
    return _byte_level(model, use_regex=True)


def _gpt2_from_hub() -> Engine:
    """From the hub's cache if it was ever downloaded: without a net, asking the hub first would take half a minute."""
    library = _tokenizers()
    from huggingface_hub import try_to_load_from_cache  # tokenizers needs it, too

    cached = try_to_load_from_cache(GPT2, TOKENIZER)
    if isinstance(cached, str):
        return _from_json(Path(cached))
    try:
        engine: Engine = library.Tokenizer.from_pretrained(GPT2)
    except Exception as error:  # whatever the network says
        raise OSError(
            "tokenizer 'gpt2' is not on this machine and could not be downloaded; give the folder that holds "
            f"encoder.json and vocab.bpe instead ({error})"
        ) from error
    return engine


def _bytes() -> Engine:
    """Byte b has id b; `<|endoftext|>` has 256."""
    vocabulary = {character: byte for byte, character in enumerate(_characters_of_bytes())}
    return _byte_level(_tokenizers().models.BPE(vocab=vocabulary, merges=[]), use_regex=False)


def _characters_of_bytes() -> list[str]:
    """The visible stand-in that byte-level BPE has for each byte: itself, or else the next free one from 256 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    free = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(free)) for byte in range(256)]


def _byte_level(model: Any, *, use_regex: bool) -> Engine:
    library = _tokenizers()
    engine: Engine = library.Tokenizer(model)
    engine.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    engine.decoder = library.decoders.ByteLevel()
    engine.add_special_tokens([END_OF_TEXT])
    return engine


def _end_of_text(engine: Engine, name: str, wanted: int | str | None) -> int:
    if isinstance(wanted, int):
        return wanted
    candidates = ENDS_OF_TEXT if wanted is None else (wanted,)
    found = [token for text in candidates if (token := engine.token_to_id(text)) is not None]
    if not found:
        raise ValueError(
            f"tokenizer {name!r} has no token {' or '.join(candidates)}; name its end of text, "
            "or give a folder of its token files, which know it"
        )
    return int(found[0])


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError("language data needs tokenizers; install it with: pip install 'naju[lm]'") from error
    return tokenizers
