"""Fifty kills at random moments, through a grid that two workers fill."""

import json
import os
import random
import signal
import time

import pytest
from small_grid import PATIENCE, cells, fill, kill_group, outcomes, start

from naju.lab.lock import LOCK

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals are sent the POSIX way")
KILLS, STEPS = 50, 40
KINDS = ("everything", "everything", "the grid", "a worker", "a worker")


class Disturbed:
    """A grid that is started again whenever it has ended before its end, and what it has left so far."""

    def __init__(self, root, moments):
        self.root, self.moments, self.results = root, moments, {}
        self.process = start(fill, root, STEPS)

    def go(self, kills):
        """To its end, with so many kills or, where that comes earlier, fewer; how many."""
        given, deadline = 0, time.monotonic() + PATIENCE
        while self.goes_on():
            assert time.monotonic() < deadline, "it does not come to its end"
            if given < kills:
                self.wait()
                given += self.kill()
            else:
                self.process.join(0.1)
            self.check_results()
        return given

    def goes_on(self):
        if self.process.exitcode == 0:
            return False
        if self.process.exitcode is not None:
            self.process = start(fill, self.root, STEPS)
        return True

    def wait(self):
        """To a moment at which it starts, or has said a few lines more and then does whatever comes next."""
        more, lines, deadline = self.moments.randrange(8), self.lines(), time.monotonic() + 10
        while more and self.lines() < lines + more and self.process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(self.moments.uniform(0, 0.01 if more else 0.2))

    def lines(self):
        return sum(path.read_bytes().count(b"\n") for path in self.root.glob("runs/*/*/metrics.jsonl"))

    def kill(self):
        """Whether there was anything to kill."""
        kind, workers = self.moments.choice(KINDS), self.workers()
        if not self.process.is_alive() or (kind == "a worker" and not workers):
            return False
        if kind == "everything":
            kill_group(self.process)
        elif kind == "the grid":
            self.process.kill()
            self.process.join()
        else:
            os.kill(self.moments.choice(workers), signal.SIGKILL)
        return True

    def workers(self):
        """The processes of this grid that hold a cell."""
        held = []
        for path in self.root.glob(f"runs/*/*/{LOCK}"):
            try:
                owner = json.loads(path.read_text())["pid"]
                if os.getpgid(owner) == self.process.pid:
                    held.append(owner)
            except (OSError, ValueError):  # released meanwhile
                continue
        return held

    def check_results(self):
        """Whatever has a result's name is whole, and stays as it was first seen."""
        places = [*self.root.glob("runs/*/*/result.json"), *self.root.glob("results/*.json")]
        seen = {path: path.read_bytes() for path in places}
        assert all(json.loads(content)["accuracy"] for content in seen.values())
        assert {path: seen.get(path) for path in self.results} == self.results
        self.results = seen


def test_fifty_kills_change_nothing(tmp_path):
    """A machine that is fast enough to fill a grid between the kills begins another one."""
    whole, moments, kills = start(fill, tmp_path / "whole", STEPS), random.Random(1), 0
    grids = []
    while kills < KILLS:
        grids.append(Disturbed(tmp_path / str(len(grids)), moments))
        try:
            kills += grids[-1].go(KILLS - kills)
        finally:
            kill_group(grids[-1].process)
    whole.join(PATIENCE)
    assert whole.exitcode == 0
    expected = outcomes(tmp_path / "whole")
    assert sorted(expected) == sorted(cell.name for cell in cells(STEPS))
    for grid in grids:
        assert outcomes(grid.root) == expected
        assert sorted(path.stem for path in (grid.root / "results").iterdir()) == sorted(expected)
