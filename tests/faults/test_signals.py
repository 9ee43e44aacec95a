"""Ctrl-C and SIGTERM while a grid is filled: what was learned is saved, and the next start goes on with it."""

import os
import signal
import time

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
