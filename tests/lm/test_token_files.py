"""Token files: what was written is read, and nothing that is not whole is taken for it."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from naju.lm.token_files import MANIFEST, Part, Vocabulary, open_split, write_token_files

END = 9
DOCUMENTS = [[1, 2, END], [END], [3, 4, 5, END]]


def part(*documents: list[int]) -> Part:
    return Part(np.concatenate([np.array(document) for document in documents]), np.cumsum([len(d) for d in documents]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    splits = {"train": [part(*DOCUMENTS[:2]), part(DOCUMENTS[2])], "test": [part(DOCUMENTS[2])]}
    write_token_files(tmp_path, splits, Vocabulary(10, END), {"source": "made here"})
    return tmp_path


def test_documents_come_back(folder: Path) -> None:
    split = open_split(folder, "train", verify=True)
    assert [split.document(k).tolist() for k in range(3)] == DOCUMENTS
    assert split.documents.tolist() == [0, 3, 4, 8]
    assert (split.vocab_size, split.end_of_text) == (10, END)
    assert isinstance(split.tokens, np.memmap)
    assert open_split(folder, "test").tokens.tolist() == DOCUMENTS[2]


def test_a_document_may_run_through_several_parts(tmp_path: Path) -> None:
    pieces = [Part(np.array([1, 2]), np.array([], np.uint64)), Part(np.array([3, END, 4, END]), np.array([2, 4]))]
    write_token_files(tmp_path, {"train": pieces}, Vocabulary(10, END))
    assert open_split(tmp_path, "train").documents.tolist() == [0, 4, 6]


def test_the_manifest_counts_and_keeps_what_it_is_told(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["splits"]["train"] == {"tokens": 8, "documents": 3}
    assert manifest["source"] == "made here"
    assert set(manifest["files"]) == {"train.tokens", "train.documents", "test.tokens", "test.documents"}


@pytest.mark.parametrize(("size", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_tokens_are_as_small_as_the_vocabulary_allows(tmp_path: Path, size: int, dtype: type) -> None:
    write_token_files(tmp_path, {"train": [part([0, size - 1])]}, Vocabulary(size, size - 1))
    tokens = open_split(tmp_path, "train").tokens
    assert tokens.dtype == dtype
    assert tokens.tolist() == [0, size - 1]


def test_a_folder_without_token_files_and_an_unknown_split_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no manifest\.json"):
        open_split(tmp_path / "nothing", "train")
    with pytest.raises(ValueError, match="no split 'validation'; it has train, test"):
        open_split(folder, "validation")


@pytest.mark.parametrize("name", ["train.tokens", "train.documents"])
def test_a_missing_or_truncated_file_is_refused(folder: Path, name: str) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{name} is damaged: it has .* bytes"):
        open_split(folder, "train")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} is missing"):
        open_split(folder, "train")


@pytest.mark.parametrize("name", ["train.tokens", "train.documents"])
def test_an_altered_file_is_refused_when_verified(folder: Path, name: str) -> None:
    path = folder / name
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    open_split(folder, "train")
    with pytest.raises(ValueError, match=f"{name} is damaged: its sha256"):
        open_split(folder, "train", verify=True)


@pytest.mark.parametrize(("content", "told"), [("{", "is damaged"), ("[]", "format None"), ('{"format": "x"}', "'x'")])
def test_a_strange_manifest_is_refused(folder: Path, content: str, told: str) -> None:
    (folder / MANIFEST).write_text(content)
    with pytest.raises(ValueError, match=told):
        open_split(folder, "train")


def test_a_write_that_fails_leaves_no_manifest_and_nothing_half_written(folder: Path) -> None:
    def breaks_off() -> Iterator[Part]:
        yield part(DOCUMENTS[0])
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        write_token_files(folder, {"train": breaks_off()}, Vocabulary(10, END))
    with pytest.raises(FileNotFoundError, match=r"has no manifest\.json"):
        open_split(folder, "train")
    assert not [path for path in folder.iterdir() if path.name.endswith(".new")]


@pytest.mark.parametrize("parts", [[], [Part(np.array([1, 2]), np.array([1]))]], ids=["empty", "no end"])
def test_a_split_has_tokens_and_ends_with_a_document(tmp_path: Path, parts: list[Part]) -> None:
    with pytest.raises(ValueError, match="split 'train' must hold tokens"):
        write_token_files(tmp_path, {"train": parts}, Vocabulary(10, END))


def test_the_end_of_text_is_in_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="end_of_text must be one of the 10 ids, but is 10"):
        Vocabulary(10, 10)
