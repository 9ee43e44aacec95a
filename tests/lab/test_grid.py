"""The grid with real worker processes on runs of a second, and what happens when they or it are stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from tiny_runs import tiny_run

from naju import cli
from naju.lab import reproduce as module
from naju.lab.grid import Grid
from naju.lab.runs import RunStore
from naju.lab.signals import Signals

HERE = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def _workers_find_this_folder(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")]))


@dataclass(frozen=True)
class Task:
    """A cell whose training is what its name says."""

    name: str
    steps: int = 4


def act(folder, cell, reporter):
    """In a worker: leaves a mark, then ends as it was told."""
    with (folder / "order").open("a") as file:
        file.write(f"{cell.name} {os.getpid()}\n")
    reporter.begin(1)
    reporter.progress(3, 0.5)
    if cell.name.startswith("dies"):
        os._exit(3)
    if cell.name.startswith("fails"):
        raise RuntimeError("out of luck")
    reporter.note("nearly there")
    return {"name": cell.name}


def test_cells_are_filled_in_order_and_a_death_or_an_error_stops_no_other(tmp_path, capsys):
    names = ["a", "dies", "b", "fails", "c"]
    grid = Grid(partial(act, tmp_path), jobs=1, finish=lambda name, result: f"{name} was {result['name']}")
    with Signals() as signals:
        outcomes = grid.fill([Task(name) for name in names], signals)
    assert [(outcome.name, outcome.kind) for outcome in outcomes] == [
        ("a", "done"),
        ("dies", "died"),
        ("b", "done"),
        ("fails", "failed"),
        ("c", "done"),
    ]
    marks = [line.split() for line in (tmp_path / "order").read_text().splitlines()]
    assert [name for name, _ in marks] == names
    processes = [process for _, process in marks]
    assert processes[0] == processes[1] != processes[2] == processes[3] == processes[4]
    told = capsys.readouterr().out
    assert "a done: a was a" in told
    assert "a: nearly there" in told
    assert "dies died: its process died with exit code 3; the same command goes on with it" in told
    assert "fails failed: RuntimeError: out of luck" in told
    assert not any(worker.process.is_alive() for worker in grid.workers)


def test_two_signals_at_once_are_one_request_and_a_later_one_is_impatience(monkeypatch):
    clock = iter([10.0, 10.1, 12.0])
    monkeypatch.setattr("naju.lab.signals.time.monotonic", lambda: next(clock))
    with Signals() as signals:
        told = []
        for which in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(which)
            told.append((signals.received, signals.insisted))
    assert told == [(signal.SIGTERM, False), (signal.SIGTERM, False), (signal.SIGTERM, True)]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_no_jobs_are_refused():
    with pytest.raises(ValueError, match="jobs must be a positive integer, but is 0"):
        Grid(act, jobs=0, finish=lambda name, result: name)


def tiny_cells(options):
    return [tiny_run(mixer, task) for mixer in ("naju", "coupled") for task in ("T2", "T4")]


@pytest.fixture
def _tiny(monkeypatch):
    monkeypatch.setattr(module.Diagnostics, "cells", tiny_cells)


def naju(*arguments):
    """The exit code of `naju arguments`."""
    try:
        cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return stop.code or 0
    return 0


@pytest.mark.usefixtures("_tiny")
def test_the_command_fills_collects_and_does_nothing_twice(tmp_path, capsys):
    runs, results = tmp_path / "runs", tmp_path / "results"
    command = ("reproduce", "diagnostics", "--runs", runs, "--results", results, "--jobs", "2", "--device", "cpu")
    assert naju(*command) == 0
    told = capsys.readouterr().out
    assert "0 of 4 cells are finished; 4 to do on cpu." in told
    names = [cell.name for cell in tiny_cells(None)]
    assert sorted(path.stem for path in results.iterdir()) == sorted(names)
    for name in names:
        result = RunStore(runs).folder("diagnostics", name).result()
        assert json.loads((results / f"{name}.json").read_text()) == result
        assert f"{result['accuracy']['128']['all']:.3f}" in told
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert naju(*command) == 0
    assert "4 of 4 cells are finished; 0 to do on cpu." in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    other = ("reproduce", "diagnostics", "--runs", tmp_path / "other", "--results", results, "--device", "cpu")
    assert naju(*other) == 0  # the copies alone count as finished
    assert not (tmp_path / "other").exists()
    changed = json.loads((results / f"{names[0]}.json").read_text())
    changed["config"]["lr"] = 1.0
    (results / f"{names[0]}.json").write_text(json.dumps(changed))
    capsys.readouterr()
    assert naju(*other) == 0
    assert f"{names[0]} counts as finished, but has another lr than this grid" in capsys.readouterr().out
    assert naju(*other, "--plan") == 0
    assert Counter(capsys.readouterr().out.split())["finished"] == 4


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize(
    "damage", ["{}", '{"a": 1}', '{"mixer": "naju", "task": "T4", "variant": "default", "seed": 1}']
)
def test_a_damaged_result_is_no_result(tmp_path, capsys, damage):
    runs, results = tmp_path / "runs", tmp_path / "results"
    command = ("reproduce", "diagnostics", "--runs", runs, "--results", results, "--jobs", "1", "--device", "cpu")
    assert naju(*command) == 0
    first, *others = [cell.name for cell in tiny_cells(None)]
    copy, own = results / f"{first}.json", RunStore(runs).folder("diagnostics", first).path / "result.json"
    whole = copy.read_text()
    copy.write_text(damage)
    assert naju(*command, "--plan") == 0  # the run itself is there
    assert Counter(capsys.readouterr().out.split())["finished"] == 4
    own.write_text(damage)
    assert naju(*command, "--plan") == 0
    capsys.readouterr()
    assert naju(*command) != 0
    assert f"result.json is damaged: it holds no result of {first}; remove it" in capsys.readouterr().err
    own.unlink()
    assert naju(*command) == 0
    told = capsys.readouterr()
    assert f"{first}.json is damaged and counts as missing" in told.err
    assert f"{len(others)} of 4 cells are finished; 1 to do" in told.out
    assert json.loads(copy.read_text())["accuracy"] == json.loads(whole)["accuracy"]


STOPPED = """
import sys
sys.path.insert(0, sys.argv[1])
from dataclasses import replace
from naju import cli
from naju.lab import reproduce
from tiny_runs import tiny_run
if __name__ == "__main__":
    run = tiny_run()
    long = replace(run, training=replace(run.training, steps=100_000))
    reproduce.Diagnostics.cells = lambda options: [long]
    cli.main(["reproduce", "diagnostics", "--runs", sys.argv[2], "--jobs", "1", "--device", "cpu"])
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals are sent the POSIX way")
@pytest.mark.parametrize(("which", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_so(tmp_path, which, code):
    script = tmp_path / "script.py"
    script.write_text(STOPPED)
    process = subprocess.Popen(
        [sys.executable, script, HERE, tmp_path / "runs"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    run = RunStore(tmp_path / "runs").folder("diagnostics", tiny_run().name)
    deadline = time.monotonic() + 60
    while not run.metrics() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(which)
    _, told = process.communicate(timeout=60)
    assert process.returncode == code
    assert f"stopped by {which.name}; 1 of 1 cells are open, what they learned is saved" in told
    assert "Traceback" not in told
    assert run.checkpoint().facts["step"] >= run.metrics()[-1]["step"] > 0
    assert run.status().startswith("interrupted, step ")


@pytest.mark.parametrize("option", ["--runs", "--results"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_trained(option, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Grid, "fill", lambda *arguments: pytest.fail("trained"))
    with pytest.raises(SystemExit) as stop:
        cli.main(["reproduce", "diagnostics", "--quick", "--device", "cpu", option, "file"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "naju: output folder 'file' cannot be written: File exists\n"
