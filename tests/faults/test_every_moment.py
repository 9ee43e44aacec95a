"""Killed, or out of room, at each single file operation of a run and of its lock."""

import json
import os
import signal
import time

import pytest
from file_faults import full_from, kill_at
from small_grid import PATIENCE, cell, outcome, run_cell, start

from naju.lab.lock import LOCK, RunLock, _host
from naju.lab.runs import RunFolder

pytestmark = pytest.mark.skipif(os.name == "nt", reason="processes are forked")
RUN = cell(steps=2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a run leaves that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole") / RUN.name
    assert ended(run_cell, folder, RUN) == 0
    return outcome(folder)


def ended(function, *args):
    """The exit code of a process."""
    process = start(function, *args)
    process.join(PATIENCE)
    return process.exitcode


def killed(number, folder):
    kill_at(number, folder)
    run_cell(folder, RUN)


def check_so_far(folder, whole):
    """What can be said of a run at any time: whole results or none, and a status."""
    run = RunFolder(folder)
    assert run.result() is None or outcome(folder) == whole
    assert run.status().startswith("finished" if run.result() else "interrupted, ")
    if run.result():
        run.checkpoint()


@pytest.mark.slow
def test_killed_at_any_operation_and_again_in_the_next_attempt_it_ends_the_same(tmp_path, whole):
    number = 0
    while True:
        number += 1
        folder = tmp_path / f"{number}" / RUN.name
        if ended(killed, number, folder) == 0:
            break
        check_so_far(folder, whole)
        assert ended(killed, 1 + 7 * number % 40, folder) in (0, -signal.SIGKILL)
        check_so_far(folder, whole)
        assert ended(run_cell, folder, RUN) == 0
        assert outcome(folder) == whole
        assert not list(folder.glob(f"{LOCK}*"))
    assert number > 40


def without_room(number, folder, said):
    full_from(number, folder)
    try:
        run_cell(folder, RUN)
    except OSError as error:
        said.write_text(str(error))
        return 1
    return 0


def test_out_of_room_at_any_file_it_says_so_and_goes_on_when_there_is_room(tmp_path, whole):
    number = 0
    while True:
        number += 1
        folder, said = tmp_path / f"{number}" / RUN.name, tmp_path / "said"
        if ended(without_room, number, folder, said) == 0:
            break
        assert "No space left on device" in said.read_text()
        assert not (folder / LOCK).exists()
        check_so_far(folder, whole)
        assert ended(run_cell, folder, RUN) == 0
        assert outcome(folder) == whole
    assert number > 6


def lock_and_die(number, folder):
    kill_at(number, folder)
    with RunLock(folder):
        pass


def test_killed_at_any_operation_on_a_lock_no_process_holds_it(tmp_path):
    """The first takes over what a dead one has left, the second what the first has, and we what both have."""
    first, second = 0, 0
    while True:
        first, second = first + 1, second % 13 + 5
        folder = tmp_path / f"{first}"
        folder.mkdir()
        (folder / LOCK).write_text(json.dumps({"host": _host(), "pid": 2**22 + 1}))
        if ended(lock_and_die, first, folder) == 0:
            break
        assert ended(lock_and_die, second, folder) in (0, -signal.SIGKILL)
        began = time.monotonic()
        with RunLock(folder) as lock:
            assert lock.is_held()
            assert json.loads((folder / LOCK).read_bytes())["pid"] == os.getpid()
        assert time.monotonic() - began < 5
        assert not list(folder.glob(f"{LOCK}*"))
    assert first > 12
