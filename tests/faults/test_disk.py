"""A disk that is full, and a folder that cannot be written to: a sentence, nothing lost, and on it goes afterwards."""

import os
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
from small_grid import PATIENCE, cell, outcome, run_cell, start

from naju.lab.runs import RunFolder
from naju.training.metrics import read_metrics

pytestmark = pytest.mark.skipif(os.name == "nt", reason="processes are forked")
resource = pytest.importorskip("resource")
NOBODY = 65534


def attempt(folder, said, *changes):
    """In a process of its own, after it was changed; the sentence it ended with, or none."""
    process = start(_attempt, folder, said, changes)
    process.join(PATIENCE)
    assert process.exitcode == 0
    return said.read_text()


def _attempt(folder, said, changes):
    with said.open("w") as file:
        for change in changes:
            change()
        try:
            run_cell(folder)
        except OSError as error:
            file.write(str(error))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / cell().name
    assert attempt(folder, folder.parent / "said") == ""
    return outcome(folder)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_stops_a_run_and_more_room_lets_it_go_on(small_disk, tmp_path, whole):
    folder = small_disk / cell().name
    told = attempt(folder, tmp_path / "said")
    assert told.endswith("cannot be written: No space left on device")
    assert str(folder) in told
    assert RunFolder(folder).status().startswith("interrupted, ")
    assert not list(folder.rglob(".*.new"))
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    assert attempt(folder, tmp_path / "said") == ""
    assert outcome(folder) == whole


def limit_files():
    """As a quota would, to less than a checkpoint."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))


def test_a_file_that_may_not_be_that_large_stops_a_run_until_it_may(tmp_path, whole):
    folder = tmp_path / cell().name
    assert attempt(folder, tmp_path / "said", limit_files).endswith("cannot be written: File too large")
    assert RunFolder(folder).status() == "interrupted, step 1 of 4"
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == ["config.json", "metrics.jsonl"]
    assert attempt(folder, tmp_path / "said") == ""
    assert outcome(folder) == whole


def be_nobody():
    """A superuser may write everywhere. What a run imports late is imported now by another, for Python may be in a
    folder that is closed to others."""
    with tempfile.TemporaryDirectory() as place:
        run_cell(Path(place) / "run")
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def begin_and_close(folder):
    """The beginning of a run, in a folder that nobody may change any more."""
    be_nobody()
    limit_files()
    try:
        run_cell(folder)
    except OSError:
        folder.chmod(0o555)
        return 0
    return 1


def test_a_read_only_folder_is_refused_and_left_as_it_is(whole):
    """Not below pytest's folder, which is closed to others."""
    with tempfile.TemporaryDirectory() as place:
        folder, said = Path(place) / "runs" / cell().name, Path(place) / "said"
        folder.parent.mkdir()
        Path(place).chmod(0o755)
        folder.parent.chmod(0o777)
        process = start(begin_and_close, folder)
        process.join(PATIENCE)
        assert process.exitcode == 0
        before = {path: path.read_bytes() for path in folder.iterdir()}
        assert len(read_metrics(folder)) == 1
        told = attempt(folder, said, be_nobody)
        assert "Permission denied" in told
        assert str(folder) in told
        assert {path: path.read_bytes() for path in folder.iterdir()} == before
        folder.chmod(0o755)
        assert attempt(folder, said, be_nobody) == ""
        assert outcome(folder) == whole
