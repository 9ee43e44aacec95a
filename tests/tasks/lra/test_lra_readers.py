"""Text, Retrieval and Image from small folders in the layouts of the real ones, whole and damaged.

NAJU_LRA_DATA names a folder with the real IMDB and CIFAR-10 for the tests that read them.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import os
import pickle
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from naju.tasks.lra import LRA, DamagedDataError, MissingDataError, files, image, retrieval, text
from naju.tasks.lra.files import unpickled

REAL = os.environ.get("NAJU_LRA_DATA")
needs_real_data = pytest.mark.skipif(REAL is None, reason="NAJU_LRA_DATA names no folder with IMDB and CIFAR-10")


@pytest.mark.parametrize("task", ["text", "retrieval", "image"])
def test_absent_data_say_where_to_get_them(task, tmp_path):
    with pytest.raises(MissingDataError, match="https://"):
        LRA[task].read(tmp_path)


def test_absent_data_say_all_that_was_looked_for(tmp_path):
    with pytest.raises(MissingDataError, match=r"no aclImdb and no aclImdb\.tar\.xz and no aclImdb_v1\.tar\.gz; put"):
        text.read(tmp_path)


REVIEWS = 20


@pytest.fixture
def imdb(tmp_path, monkeypatch):
    """Twenty reviews of every kind; the first is longer than what is read."""
    monkeypatch.setattr(text, "REVIEWS", REVIEWS)
    digests = {}
    for half in ("train", "test"):
        for kind, rating in (("neg", 2), ("pos", 9)):
            folder = tmp_path / "aclImdb" / half / kind
            folder.mkdir(parents=True)
            texts = [f"{half} {kind} {number} é ".encode() * (1000 if number == 0 else 1) for number in range(REVIEWS)]
            for number, content in enumerate(texts):
                (folder / f"{number}_{rating}.txt").write_bytes(content)
            digests[f"{half}/{kind}"] = hashlib.sha256(b"".join(texts)).hexdigest()
    monkeypatch.setattr(text, "DIGESTS", digests)
    return tmp_path


def test_text_holds_out_a_tenth_of_train(imdb):
    splits = text.read(imdb)
    assert {name: len(part) for name, part in splits.items()} == {"train": 36, "validation": 4, "test": 40}
    assert all(part.labels.mean() == 0.5 for part in splits.values())
    assert splits["validation"].sequence(0).tobytes() == "train neg 9 é ".encode()
    assert splits["validation"].sequence(3).tobytes() == "train pos 19 é ".encode()
    assert splits["train"].lengths[0] == splits["train"].lengths.max() == 4000
    assert splits["test"].sequence(1).tobytes() == "test neg 1 é ".encode()
    assert splits["test"].labels.tolist() == [0] * 20 + [1] * 20


def test_text_reads_ratings_of_two_digits_and_no_other_files(imdb):
    want = text.read(imdb)
    positive = imdb / "aclImdb" / "train" / "pos"
    (positive / "3_9.txt").rename(positive / "3_10.txt")
    (imdb / "aclImdb" / "train" / "unsup").mkdir()
    for other in ("README", "train/urls_pos.txt", "train/unsup/7_0.txt", "train/pos/1_9.txt.orig"):
        (imdb / "aclImdb" / other).write_bytes(b"not a review of either kind")
    with tarfile.open(imdb / "aclImdb_v1.tar.gz", "w:gz") as archive:
        archive.add(imdb / "aclImdb", "aclImdb")
    unpacked = text.read(imdb)
    (imdb / "aclImdb").rename(imdb / "elsewhere")
    for found in (unpacked, text.read(imdb)):
        assert all(np.array_equal(found[name].values, part.values) for name, part in want.items())


def test_text_reports_an_archive_that_is_altered_inside_or_none_at_all(imdb):
    path = imdb / "aclImdb.tar.xz"
    with tarfile.open(path, "w:xz") as archive:
        for number in range(20):
            (imdb / "noise").write_bytes(np.random.default_rng(number).bytes(5000))
            archive.add(imdb / "noise", f"noise{number}")
    (imdb / "aclImdb").rename(imdb / "elsewhere")
    content = path.read_bytes()
    middle = len(content) // 2
    for damaged in (content[:middle] + b"\xff" * 500 + content[middle + 500 :], b"This is no archive."):
        path.write_bytes(damaged)
        with pytest.raises(DamagedDataError, match=r"aclImdb.tar.xz cannot be read"):
            text.read(imdb)


def test_text_out_of_the_archive_is_the_same(imdb):
    plain = text.read(imdb)
    with tarfile.open(imdb / "aclImdb.tar.xz", "w:xz") as archive:
        archive.add(imdb / "aclImdb", "aclImdb")
    (imdb / "aclImdb").rename(imdb / "elsewhere")
    packed = text.read(imdb)
    assert all(np.array_equal(packed[name].values, plain[name].values) for name in plain)
    whole = (imdb / "aclImdb.tar.xz").read_bytes()
    (imdb / "aclImdb.tar.xz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DamagedDataError, match=r"aclImdb.tar.xz cannot be read"):
        text.read(imdb)


def test_text_reports_missing_altered_and_misplaced_reviews(imdb):
    review = imdb / "aclImdb" / "train" / "pos" / "3_9.txt"
    content = review.read_bytes()
    review.write_bytes(content[:-1])
    with pytest.raises(DamagedDataError, match="the text of train/pos differs"):
        text.read(imdb)
    extra = review.with_name("20_9.txt")
    extra.write_bytes(b"one too many")
    with pytest.raises(DamagedDataError, match="reviews of train/pos must be 20, but are 21"):
        text.read(imdb)
    extra.unlink()
    review.unlink()
    with pytest.raises(DamagedDataError, match="reviews of train/pos must be 20, but are 19"):
        text.read(imdb)
    review.with_name("3_2.txt").write_bytes(content)
    with pytest.raises(DamagedDataError, match="review 3 of train/pos has the rating 2"):
        text.read(imdb)


@pytest.fixture
def aan(tmp_path, monkeypatch):
    monkeypatch.setattr(retrieval, "PAIRS", {"train": 3, "validation": 2, "test": 2})
    folder = tmp_path / "lra_release" / "tsv_data"
    folder.mkdir(parents=True)
    for split, count in retrieval.PAIRS.items():
        rows = [f"{n % 2}.0\tid{n}\tid{n + 1}\t{split} one {n}\t{'other é ' * 1000 * n}\n" for n in range(count)]
        (folder / retrieval.FILES[split]).write_text("".join(rows), encoding="utf-8")
    return tmp_path


def test_retrieval_reads_pairs(aan):
    names = sorted(path.name for path in aan.rglob("*.tsv"))
    assert names == ["new_aan_pairs.eval.tsv", "new_aan_pairs.test.tsv", "new_aan_pairs.train.tsv"]
    splits = retrieval.read(aan)
    train = splits["train"]
    assert (len(train), train.width, train.labels.tolist()) == (3, 2, [0, 1, 0])
    assert train.sequence(2).tobytes() == b"train one 1"
    assert train.sequence(3).tobytes() == ("other é " * 1000).encode()[:4000]
    assert len(train.sequence(1)) == 0
    assert train.lengths.tolist() == [11, 4000, 4000]
    assert [len(part) for part in splits.values()] == [3, 2, 2]


@pytest.mark.parametrize("inside", ["", "tsv_data", "lra_release/lra_release/tsv_data"])
def test_retrieval_finds_its_files_however_deep_the_release_was_unpacked(aan, tmp_path, inside):
    want = retrieval.read(aan)
    folder = tmp_path / "data" / inside
    folder.parent.mkdir(parents=True, exist_ok=True)
    (aan / "lra_release" / "tsv_data").rename(folder)
    found = retrieval.read(tmp_path / "data")
    assert all(np.array_equal(found[name].values, part.values) for name, part in want.items())


def test_retrieval_reads_papers_of_any_length_and_labels_as_whole_numbers(aan, monkeypatch):
    usual = csv.field_size_limit()
    path = aan / "lra_release" / "tsv_data" / retrieval.FILES["train"]
    path.write_text("".join(f"{n % 2}\tid\tid\t{'x' * 2 * usual}\tother\n" for n in range(3)), encoding="utf-8")
    assert retrieval.read(aan)["train"].labels.tolist() == [0, 1, 0]
    assert csv.field_size_limit() == usual  # which is everybody's
    monkeypatch.setattr(csv, "field_size_limit", lambda limit: usual)
    with pytest.raises(DamagedDataError, match="cannot be read"):
        retrieval.read(aan)


def test_retrieval_keeps_no_more_of_a_paper_than_it_reads(aan, monkeypatch):
    pairs, paper = 40, "x" * 30_000
    monkeypatch.setitem(retrieval.PAIRS, "train", pairs)
    path = aan / "lra_release" / "tsv_data" / retrieval.FILES["train"]
    path.write_text("".join(f"{n % 2}.0\tid\tid\t{paper}\t{paper}\n" for n in range(pairs)), encoding="utf-8")
    tracemalloc.start()
    train = retrieval.read(aan)["train"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (len(train), train.sequence(0).tobytes()) == (pairs, paper.encode()[:4000])
    assert peak < path.stat().st_size / 2


def test_retrieval_reports_truncation_and_strange_rows(aan):
    path = aan / "lra_release" / "tsv_data" / retrieval.FILES["train"]
    rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(rows[:2]), encoding="utf-8")
    with pytest.raises(DamagedDataError, match=r"pairs of new_aan_pairs.train.tsv must be 3, but are 2"):
        retrieval.read(aan)
    path.write_text(rows[0] + "0.0\tid\tid\thalf a row\n", encoding="utf-8")
    with pytest.raises(DamagedDataError, match=r"row 2 of .* but has '0.0' and 4"):
        retrieval.read(aan)
    path.write_text(rows[0] + "0.0\tid\tid\tone\tother\tmore\n", encoding="utf-8")
    with pytest.raises(DamagedDataError, match=r"row 2 of .* but has '0.0' and 6"):
        retrieval.read(aan)
    path.write_text("maybe\tid\tid\tone\tother\n", encoding="utf-8")
    with pytest.raises(DamagedDataError, match=r"row 1 of .* 'maybe'"):
        retrieval.read(aan)
    path.write_text("".join(["0.0\tid\tid\tone\tother\n"] * 3), encoding="utf-8")
    with pytest.raises(DamagedDataError, match="has 0 citations among its 3 pairs"):
        retrieval.read(aan)
    path.write_text("".join(["1.0\tid\tid\tone\tother\n"] * 3), encoding="utf-8")
    with pytest.raises(DamagedDataError, match="has 3 citations among its 3 pairs"):
        retrieval.read(aan)
    path.write_text(rows[0] + '1.0\tid\tid\t"Who?" is asked\t"other\n' + rows[2], encoding="utf-8")
    assert retrieval.read(aan)["train"].sequence(2).tobytes() == b'"Who?" is asked'
    path.write_bytes(b"0.0\tid\tid\t\xff\tother\n")
    with pytest.raises(DamagedDataError, match="cannot be read"):
        retrieval.read(aan)


def digest_of(content: bytes, kind: str = "sha256") -> str:
    return hashlib.new(kind, content).hexdigest()


@pytest.fixture
def small_cifar(monkeypatch):
    """Ten pictures of each class to learn from, in five batches, and two to be examined on."""
    monkeypatch.setattr(image, "PICTURES", {"train": 100, "test": 20})
    monkeypatch.setattr(image, "VALIDATION", 10)
    rng = np.random.default_rng(0)
    colours = {"train": rng.integers(256, size=(100, 3072), dtype=np.uint8)}
    colours["test"] = rng.integers(256, size=(20, 3072), dtype=np.uint8)
    return colours, {half: np.arange(len(rows), dtype=np.uint8) % 10 for half, rows in colours.items()}


def write_batches(folder: Path, colours, labels, monkeypatch) -> None:
    folder.mkdir()
    for half, names in image.FILES.items():
        for place, name in enumerate(names):
            rows = slice(20 * place, 20 * place + 20)
            batch = {"data": colours[half][rows], "labels": labels[half][rows].tolist()}
            content = pickle.dumps(batch, protocol=2)
            (folder / name).write_bytes(content)
            monkeypatch.setitem(image.DIGESTS, name, digest_of(content, "md5"))


def write_grey(path: Path, colours, labels, monkeypatch, height=32) -> None:
    arrays = {f"{half}_images": image.grey(rows).reshape(-1, 32, 32)[:, :height] for half, rows in colours.items()}
    arrays |= {f"{half}_labels": rows for half, rows in labels.items()}
    for name, array in arrays.items():
        monkeypatch.setitem(image.DIGESTS, name, digest_of(array.tobytes()))
    np.savez(path, **arrays)


def test_image_is_the_same_from_both_layouts(small_cifar, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "READ_AT_ONCE", 1000)
    write_batches(tmp_path / image.BATCHES, *small_cifar, monkeypatch)
    batches = image.read(tmp_path)
    write_grey(tmp_path / image.GREY, *small_cifar, monkeypatch)
    grey = image.read(tmp_path)
    assert [len(part) for part in grey.values()] == [90, 10, 20]
    for name, part in grey.items():
        assert np.array_equal(part.values, batches[name].values)
        assert np.array_equal(part.labels, batches[name].labels)
        assert set(part.lengths.tolist()) == {1024}
    red, green, blue = small_cifar[0]["train"][0].reshape(3, 1024).astype(float)
    luma = 0.2989 * red + 0.5870 * green + 0.1140 * blue
    assert np.abs(grey["train"].sequence(0) - (luma - 0.5)).max() <= 0.5 + 1e-6  # rounded down


def test_image_reports_altered_and_truncated_files(small_cifar, tmp_path, monkeypatch):
    folder = tmp_path / image.BATCHES
    write_batches(folder, *small_cifar, monkeypatch)
    content = (folder / "data_batch_3").read_bytes()
    (folder / "data_batch_3").write_bytes(content[:-1] + b"!")
    with pytest.raises(DamagedDataError, match="data_batch_3 differs from the published data"):
        image.read(tmp_path)
    monkeypatch.setitem(image.DIGESTS, "data_batch_3", digest_of(content[:500], "md5"))
    (folder / "data_batch_3").write_bytes(content[:500])
    with pytest.raises(DamagedDataError, match="data_batch_3 cannot be read"):
        image.read(tmp_path)
    path = tmp_path / image.GREY
    write_grey(path, *small_cifar, monkeypatch)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DamagedDataError, match=r"cifar10-gray.npz cannot be read"):
        image.read(tmp_path)
    write_grey(path, *small_cifar, monkeypatch)
    monkeypatch.setitem(image.DIGESTS, "test_labels", digest_of(b"other labels"))
    with pytest.raises(DamagedDataError, match=r"test_labels of cifar10-gray.npz differs from the published data"):
        image.read(tmp_path)
    monkeypatch.setattr(image, "LARGEST_ARRAY", 100_000)
    with pytest.raises(DamagedDataError, match=r"cifar10-gray.npz cannot be read: it claims an array of 102,"):
        image.read(tmp_path)


@pytest.mark.parametrize("batch", [{"data": [0] * 3072}, {"labels": [0]}, [1, 2], {"data": "x", "labels": "y"}])
def test_image_reports_batches_without_pictures_or_labels(small_cifar, batch, tmp_path, monkeypatch):
    write_batches(tmp_path / image.BATCHES, *small_cifar, monkeypatch)
    content = pickle.dumps(batch)
    (tmp_path / image.BATCHES / "data_batch_1").write_bytes(content)
    monkeypatch.setitem(image.DIGESTS, "data_batch_1", digest_of(content, "md5"))
    with pytest.raises(DamagedDataError, match="data_batch_1 has no data and labels"):
        image.read(tmp_path)


class Unreadable:
    """A file on a disk that fails."""

    def __init__(self, *where):
        pass

    def read(self, *size):
        raise OSError(errno.EIO, "Input/output error")

    readinto = readline = infolist = read

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def test_a_disk_that_fails_is_no_damage_of_the_data(small_cifar, tmp_path, monkeypatch):
    with pytest.raises(OSError, match="Input/output error"):
        unpickled(tmp_path / "data_batch_1", Unreadable())
    write_grey(tmp_path / image.GREY, *small_cifar, monkeypatch)
    monkeypatch.setattr(image.zipfile, "ZipFile", Unreadable)
    with pytest.raises(OSError, match="Input/output error"):
        image.read(tmp_path)


def test_image_counts_pictures_and_classes(small_cifar, tmp_path, monkeypatch):
    colours, labels = small_cifar
    write_grey(tmp_path / image.GREY, {**colours, "train": colours["train"][:99]}, labels, monkeypatch)
    with pytest.raises(DamagedDataError, match="the train pictures must be 100, but are 99"):
        image.read(tmp_path)
    write_grey(tmp_path / image.GREY, colours, {**labels, "test": np.zeros(20, np.uint8)}, monkeypatch)
    with pytest.raises(DamagedDataError, match="the test labels are not 2 of each class"):
        image.read(tmp_path)
    write_grey(tmp_path / image.GREY, colours, labels, monkeypatch, height=31)
    with pytest.raises(DamagedDataError, match="the pixels of train must be 102,400, but are 99,200"):
        image.read(tmp_path)


class Malicious:
    """What unpickling would run."""

    def __reduce__(self):
        return os.system, ("exit 1",)


def test_no_pickle_runs_anything(tmp_path):
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({"data": Malicious()}))
    with path.open("rb") as file, pytest.raises(DamagedDataError, match=r"asks for .*system"):
        unpickled(path, file)
    path.write_bytes(pickle.dumps({"data": np.fromfile}))
    with path.open("rb") as file, pytest.raises(DamagedDataError, match=r"asks for numpy.*fromfile"):
        unpickled(path, file)
    path.write_bytes(pickle.dumps({"data": np.arange(6, dtype=np.uint8), "labels": [1]}, protocol=2))
    with path.open("rb") as file:
        assert unpickled(path, file)["data"].tolist() == list(range(6))


def test_the_strings_of_python_2_are_text(tmp_path):
    path = tmp_path / "data_batch_1"
    path.write_bytes(b"\x80\x02}U\x06labels]K\x01as.")  # {'labels': [1]} as Python 2 wrote it, and CIFAR-10's authors
    with path.open("rb") as file:
        assert unpickled(path, file) == {"labels": [1]}


@needs_real_data
def test_the_real_data_are_recognised():
    for name in ("text", "image"):
        splits = LRA[name].read(Path(REAL))
        assert tuple(len(part) for part in splits.values()) == tuple(LRA[name].sizes)
