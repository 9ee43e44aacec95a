"""Processes that this library starts do not outlive the one that started them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

PARENT = """
import multiprocessing, os, time
from naju.training.children import end_with_parent

def child():
    end_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(100)

multiprocessing.get_context("fork").Process(target=child).start()
time.sleep(100)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for a process in /proc")
def test_a_child_ends_when_its_parent_is_killed():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = Path("/proc") / parent.stdout.readline().strip() / "stat"
        assert child.exists()
        parent.kill()
    end = time.monotonic() + 20
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < end:
        time.sleep(0.05)
    assert time.monotonic() < end
