"""Ctrl-C and SIGTERM while a grid is filled: what was learned is saved, and the next start goes on with it. Other
commands with workers end with one sentence."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_grid import PATIENCE, fill, kill_group, outcomes, start

from naju.training.checkpoint import NEWEST

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals are sent the POSIX way")
STEPS = 12


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    root = tmp_path_factory.mktemp("whole")
    process = start(fill, root, STEPS)
    process.join(PATIENCE)
    assert process.exitcode == 0
    return outcomes(root)


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_loses_nothing(tmp_path, whole, which):
    """To the whole group, as a terminal and `timeout` send it."""
    process = start(fill, tmp_path, STEPS)
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(f"runs/*/*/{NEWEST}")):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        os.killpg(process.pid, which)
        process.join(PATIENCE)
    finally:
        kill_group(process)
    assert process.exitcode == 128 + which
    assert not list(tmp_path.glob("runs/*/*/lock.json*"))
    assert len(outcomes(tmp_path)) < len(whole)
    again = start(fill, tmp_path, STEPS)
    again.join(PATIENCE)
    assert again.exitcode == 0
    assert outcomes(tmp_path) == whole


def listops(cache: Path) -> list[str]:
    make = f"generated(LRA['listops'], Path({str(cache)!r}), Sizes(50_000, 9, 9), processes=2)"
    return [sys.executable, "-c", f"from naju.lab.lra_data import *; {make}"]


def prepare(out: Path) -> list[str]:
    words = ("lm", "prepare", "--source", "sample", "--tokenizer", "bytes", "--processes", "2", "--out", str(out))
    return [sys.executable, "-m", "naju.cli", *words]


@pytest.mark.parametrize("command", [prepare, listops])
def test_ctrl_c_is_answered_by_one_process_and_not_by_its_workers(tmp_path, command):
    """Also while they are still being started, which takes a second or two."""
    folder = tmp_path / "folder"
    process = subprocess.Popen(command(folder), stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + PATIENCE
        while not (folder.is_dir() and list(folder.iterdir())):  # made just before the first worker
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert "spawn_main" not in told
    assert told.count("KeyboardInterrupt") <= 1
    if command is prepare:
        assert (process.returncode, told) == (130, "naju: interrupted\n")
