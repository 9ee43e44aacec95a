"""Archives, manifests and names that point elsewhere: nothing outside the folder is written, read or removed."""

import io
import tarfile

import pytest

from naju import cli
from naju.lab.runs import RunStore
from naju.lm.sources import find_sources
from naju.tasks.lra import DamagedDataError, text

NAMES = ("../../outside.txt", "/outside.txt", "train/pos/../../../outside.txt")


def archive_of(path, *members):
    with tarfile.open(path, "w:gz") as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def link(name, target, kind):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize("name", NAMES)
def test_an_archive_is_read_and_never_unpacked(name, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    archive_of(folder / "aclImdb_v1.tar.gz", (tarfile.TarInfo(name), b"x"))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DamagedDataError):
        text.read(folder)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
@pytest.mark.parametrize("target", ["/etc/passwd", "../../etc/passwd", "aclImdb/train/pos/0_9.txt", "nowhere"])
def test_a_link_in_an_archive_is_not_followed(kind, target, tmp_path):
    archive_of(tmp_path / "aclImdb_v1.tar.gz", (link("aclImdb/train/pos/0_9.txt", target, kind), b""))
    assert list(text._members(tmp_path / "aclImdb_v1.tar.gz")) == []


def test_a_member_that_claims_any_size_is_passed_over(tmp_path):
    huge = b"\0" * (text.LONGEST + 1)
    archive_of(tmp_path / "aclImdb_v1.tar.gz", (tarfile.TarInfo("aclImdb/train/pos/0_9.txt"), huge))
    assert list(text._members(tmp_path / "aclImdb_v1.tar.gz")) == []


@pytest.mark.parametrize("name", ["..", "../..", "/", ".", "", "*", "diagnostics/..", "../runs/diagnostics/one"])
def test_only_a_run_can_be_removed(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = RunStore(tmp_path / "runs").folder("diagnostics", "one")
    run.begin({"steps": 1})
    (tmp_path / "precious").write_text("x")
    with pytest.raises(SystemExit, match="2"):
        cli.main(("runs", "rm", name))
    assert "no run is called" in capsys.readouterr().err
    assert (tmp_path / "precious").exists()
    assert run.path.exists()


def test_a_run_that_is_a_link_is_not_removed_through_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "config.json").write_text("{}")
    (tmp_path / "runs" / "diagnostics").mkdir(parents=True)
    (tmp_path / "runs" / "diagnostics" / "one").symlink_to(elsewhere)
    with pytest.raises(SystemExit, match="2"):
        cli.main(("runs", "rm", "one"))
    assert (elsewhere / "config.json").exists()


def test_sources_are_those_of_their_folder(tmp_path):
    (tmp_path / "outside.txt").write_text("x")
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / "train.txt").write_text("x")
    assert [source.name for source in find_sources(str(folder), "auto", "text")] == ["train.txt"]
