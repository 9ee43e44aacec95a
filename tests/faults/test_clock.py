"""Clocks that jump, between two attempts of a run or in the middle of one."""

import os
import time

import pytest
from small_grid import cell, outcome

from naju.lab.diagnostic_run import run_diagnostic
from naju.lab.runs import RunFolder
from naju.training import Reporter, StoppedError

YEAR = 365 * 86_400.0


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run_diagnostic(cell(), RunFolder(folder), Reporter())
    return outcome(folder)


@pytest.mark.parametrize("jump", [-30 * YEAR, 30 * YEAR])
def test_a_run_goes_on_among_files_of_another_time(tmp_path, whole, jump):
    steps = []
    stopping = Reporter(progress=lambda step, loss: steps.append(step), stop=lambda: len(steps) == 2)
    with pytest.raises(StoppedError):
        run_diagnostic(cell(), RunFolder(tmp_path), stopping)
    for path in tmp_path.iterdir():
        os.utime(path, (time.time() + jump, time.time() + jump))
    begun = []
    run_diagnostic(cell(), RunFolder(tmp_path), Reporter(begin=begun.append))
    assert begun == [2]
    assert outcome(tmp_path) == whole


@pytest.mark.parametrize("jump", [-30 * YEAR, 30 * YEAR])
def test_a_jump_during_a_run_changes_neither_its_result_nor_its_time(tmp_path, monkeypatch, whole, jump):
    wall = time.time

    def move(step, loss):
        monkeypatch.setattr(time, "time", lambda: wall() + jump)

    result = run_diagnostic(cell(), RunFolder(tmp_path), Reporter(progress=move))
    assert 0 < result["seconds"] < 60
    assert outcome(tmp_path) == whole
