"""Grids as array jobs: what is asked of the cluster, and tasks that share a run store; with submitit if it is there."""

import os
import re
import signal
import sys
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
from tiny_wikitext import command, make_tiny

from naju import cli
from naju.lab import slurm
from naju.lab.grid import Grid
from naju.lab.signals import Signals
from naju.lab.slurm import ArrayTask, SlurmOptions, minutes, submit

PILOTS = ("lr-pilot", "--mixers", "naju", "--rates", "1", "8", "--on", "slurm")


class Cluster:
    """In place of submitit: remembers what it was asked, and runs every task at once when the batch is complete."""

    def __init__(self):
        self.asked, self.outcomes = {}, []

    def AutoExecutor(self, **parameters):  # noqa: N802
        self.asked |= parameters
        return self

    def update_parameters(self, **parameters):
        self.asked |= parameters

    @contextmanager
    def batch(self):
        self.tasks = []
        yield
        self.outcomes = [task() for task in self.tasks]

    def submit(self, task):
        self.tasks.append(task)
        return SimpleNamespace(job_id=f"77_{len(self.tasks) - 1}")


@pytest.fixture
def cluster(monkeypatch):
    made = Cluster()
    monkeypatch.setitem(sys.modules, "submitit", made)
    return made


def submitted(folder, *arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(command(folder, *arguments))
    return stop.value.code


def test_without_submitit_a_sentence_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "submitit", None)
    make_tiny(tmp_path, monkeypatch)
    assert submitted(tmp_path, *PILOTS) == 2
    assert capsys.readouterr().err == "naju: on 'slurm' needs submitit; install with: pip install 'naju[slurm]'\n"


def test_every_task_works_through_the_cells_that_are_open(tmp_path, monkeypatch, cluster, capsys):
    """The first leaves nothing to the second, and a second submission finds nothing to do."""
    make_tiny(tmp_path, monkeypatch)
    assert submitted(tmp_path, *PILOTS, "--gpus", "2") == 0
    told = capsys.readouterr().out
    assert cluster.outcomes == [0, 0]
    assert "job 77: 2 tasks will fill 2 cells" in told
    assert told.count(" done: ") == len(list((tmp_path / "runs" / "lr-pilot").glob("*/result.json"))) >= 2
    cluster.tasks = []
    assert submitted(tmp_path, *PILOTS, "--gpus", "2") == 0
    assert cluster.tasks == []
    told = capsys.readouterr().out
    assert re.search(r"(\d+) of \1 cells are finished", told)


def test_what_is_asked_of_the_cluster(tmp_path, cluster):
    options = SlurmOptions(gpus=8, partition="short", account="lab", time="1-02:30:01", slurm=("constraint=h200",))
    assert len(submit(lambda: 5, "mqar", options, tmp_path, cells=3, gpu=True)) == 3
    assert cluster.outcomes == [5, 5, 5]
    assert cluster.asked == {
        "folder": tmp_path / "slurm",
        "cluster": "slurm",
        "slurm_max_num_timeout": 100,
        "name": "naju-mqar",
        "timeout_min": 26 * 60 + 31,
        "cpus_per_task": 8,
        "mem_gb": 32,
        "gpus_per_node": 1,
        "slurm_partition": "short",
        "slurm_account": "lab",
        "slurm_qos": None,
        "slurm_additional_parameters": {"constraint": "h200"},
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 0}, "gpus must be a positive integer, but is 0"),
        ({"time": "90"}, "time must look like 24:00:00 or 2-12:00:00, but is '90'"),
        ({"slurm": ("exclusive",)}, "slurm must be options such as name=value, but they are exclusive"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SlurmOptions(**options)


def test_times():
    assert [minutes(time) for time in ("00:00:01", "24:00:00", "2-12:00:00")] == [1, 1440, 3600]


def mark(folder):
    """In a task's own process."""
    (folder / f"mark-{os.getpid()}").touch()
    return 3


def test_a_task_of_submitits_own_is_a_process(tmp_path, monkeypatch):
    submitit = pytest.importorskip("submitit")
    monkeypatch.setattr(slurm, "EXECUTOR", "local")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*filter(None, sys.path)]))
    jobs = submit(partial(mark, tmp_path), "mark", SlurmOptions(time="00:01:00"), tmp_path, cells=9, gpu=False)
    assert [job.result() for job in jobs] == [3]
    (left,) = tmp_path.glob("mark-*")
    assert left.name != f"mark-{os.getpid()}"
    task = ArrayTask(partial(mark, tmp_path))
    again = task.checkpoint()
    assert isinstance(again, submitit.helpers.DelayedSubmission)
    assert again.function is task


def test_submitits_array_job_as_slurm_would_get_it(tmp_path, monkeypatch):
    """A script in the place of sbatch keeps what it is given."""
    pytest.importorskip("submitit")
    for name, does in (("sbatch", f'cp "$1" {tmp_path}/given; echo Submitted batch job 12'), ("srun", "true")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    options = SlurmOptions(gpus=4, partition="short", qos="low", slurm=("constraint=h200",))
    jobs = submit(partial(mark, tmp_path), "mark", options, tmp_path / "runs", cells=3, gpu=True)
    assert [job.job_id for job in jobs] == ["12_0", "12_1", "12_2"]
    given = (tmp_path / "given").read_text().splitlines()
    for line in ("array=0-2%3", "partition=short", "qos=low", "constraint=h200", "gpus-per-node=1", "time=1440"):
        assert f"#SBATCH --{line}" in given, given
    assert "#SBATCH --job-name=naju-mark" in given


def test_a_machine_without_slurm_is_one_sentence(tmp_path, monkeypatch, capsys):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    make_tiny(tmp_path, monkeypatch)
    assert submitted(tmp_path, *PILOTS) == 2
    told = capsys.readouterr().err
    assert told.startswith("naju: on 'slurm' has to be given where Slurm is: ")
    assert told.count("\n") == 1


def test_a_job_that_sbatch_refuses_is_an_error_with_its_words(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    for name, does in (("sbatch", "echo invalid partition >&2; exit 1"), ("srun", "true")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(OSError, match=r"Slurm does not take the job: (.|\n)*invalid partition"):
        submit(partial(mark, tmp_path), "mark", SlurmOptions(), tmp_path / "runs", cells=1, gpu=False)


def waits_for_a_signal(folder, cell, reporter):
    """In a worker: gets what a batch system sends to all processes of a job, and lives."""
    os.kill(os.getpid(), signal.SIGUSR2)
    return {"alive": True}


def test_the_signal_before_the_end_of_a_job_kills_no_worker(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]))
    grid = Grid(partial(waits_for_a_signal, tmp_path), jobs=1, finish=lambda name, result: str(result))
    with Signals() as signals:
        outcomes = grid.fill([SimpleNamespace(name="cell", steps=1)], signals)
    assert [(outcome.kind, outcome.text) for outcome in outcomes] == [("done", "{'alive': True}")]
