"""Several processes that want the same cell: one trains it, and none of them twice."""

import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from small_grid import PATIENCE, cells, fill, kill_group, outcomes, start

from naju.lab.lock import BusyError, RunLock

pytestmark = pytest.mark.skipif(os.name == "nt", reason="processes are forked")
STEPS = 6


def fill_and_note(root, notes):
    """Every result that is written, by a worker of whichever grid, is a line of `notes`."""

    def listen(event, arguments):
        if event == "os.rename" and str(arguments[1]).endswith("result.json"):
            with notes.open("a") as file:
                file.write(f"{Path(arguments[1]).parent.name}\n")

    sys.addaudithook(listen)
    return fill(root, STEPS)


def test_two_grids_in_one_folder_fill_each_cell_once(tmp_path):
    root, notes = tmp_path / "shared", tmp_path / "notes"
    grids = [start(fill_and_note, root, notes) for _ in range(2)]
    for grid in grids:
        grid.join(PATIENCE)
    assert {grid.exitcode for grid in grids} <= {0, 1}  # 1 where the other one had a cell
    last = start(fill_and_note, root, notes)
    last.join(PATIENCE)
    assert last.exitcode == 0
    names = [cell.name for cell in cells(STEPS)]
    assert Counter(notes.read_text().split()) == Counter(names)
    assert sorted(outcomes(root)) == sorted(names)


def contend(folder, seed):
    """Takes the lock again and again, and dies with it at the fifth time; says if another is inside, too."""
    moments, inside = random.Random(seed), folder / "inside"
    for left in reversed(range(5)):
        lock = _waited_for(folder)
        with (folder / "entries").open("a") as entries:
            entries.write("." if not inside.exists() else "!")
        inside.touch()
        time.sleep(moments.uniform(0, 0.002))
        inside.unlink()
        if left:
            lock.__exit__(None, None, None)
    os.kill(os.getpid(), signal.SIGKILL)


def _waited_for(folder):
    while True:
        try:
            return RunLock(folder).__enter__()
        except BusyError:
            time.sleep(0.001)


def test_processes_that_die_with_the_lock_never_let_two_in(tmp_path):
    processes = [start(contend, tmp_path, seed) for seed in range(12)]
    try:
        for process in processes:
            process.join(PATIENCE)
            assert process.exitcode == -signal.SIGKILL
    finally:
        for process in processes:
            kill_group(process)
    assert (tmp_path / "entries").read_text() == "." * 60
