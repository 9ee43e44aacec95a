"""The run store and `naju runs`."""

import json
import os
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from tiny_runs import tiny_run

from naju import cli
from naju.lab import runs
from naju.lab.diagnostic_run import run_diagnostic
from naju.lab.report.results import read_results
from naju.lab.runs import Results, RunFolder, RunStore, carry_out
from naju.training import Reporter, StoppedError


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A store with one finished run and one that was stopped."""
    store = RunStore(tmp_path_factory.mktemp("runs"))
    run_diagnostic(tiny_run(), store.folder("diagnostics", tiny_run().name), Reporter())
    stopped, steps = tiny_run(task="T2"), []
    reporter = Reporter(progress=lambda step, _: steps.append(step), stop=lambda: len(steps) == 3)
    with pytest.raises(StoppedError):
        run_diagnostic(stopped, store.folder("diagnostics", stopped.name), reporter)
    return store


@pytest.fixture
def store(kept, tmp_path):
    """A copy that a test may spoil."""
    for path in kept.root.rglob("*"):
        if path.is_file():
            copy = tmp_path / path.relative_to(kept.root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    return RunStore(tmp_path)


def naju(*arguments):
    """The exit code of `naju arguments`."""
    try:
        cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return stop.code or 0
    return 0


def test_ls_tells_every_runs_status(store, capsys):
    assert naju("runs", "ls", "--runs", store.root) == 0
    stopped, finished = capsys.readouterr().out.splitlines()[1:]
    assert stopped.split("  ")[0] == "diagnostics/naju-T2-default-s1"
    assert "interrupted, step 3 of 12" in stopped
    assert "finished" in finished
    accuracy = store.find("naju-T4-default-s1").result()["accuracy"]
    assert f"64: {accuracy['64']['all']:.3f} 128: {accuracy['128']['all']:.3f}" in finished


def test_ls_tells_the_result_of_other_experiments_in_their_own_words(tmp_path, capsys):
    folder = RunStore(tmp_path).folder("language", "naju-s1")
    folder.begin({"seed": 1})
    told = {"validation_perplexity": 31.5, "test_perplexity": None, "tokens_per_second": None, "seconds": 7.0}
    folder.finish({"experiment": "language", **told})
    assert naju("runs", "ls", "--runs", tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("finished  validation perplexity 31.50 | 7 s")


def test_a_model_that_a_run_keeps_is_no_run(tmp_path):
    store = RunStore(tmp_path)
    folder = store.folder("language", "naju-s1")
    folder.begin({"seed": 1})
    for run in (folder.path, tmp_path / "mine"):  # the latter as by `naju lm train --out`
        (run / "best").mkdir(parents=True)
        for place in (run, run / "best"):
            (place / "config.json").write_text("{}")
    assert [run.path for run in store.runs()] == [folder.path]
    problems = read_results(tmp_path).problems
    assert [problem.partition(" ")[0] for problem in problems] == ["language/naju-s1", "mine"]


def test_ls_of_nothing(tmp_path, capsys):
    assert naju("runs", "ls", "--runs", tmp_path / "none") == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path / 'none'}\n"


def test_show_tells_all_about_one(store, capsys):
    assert naju("runs", "show", "diagnostics/naju-T4-default-s1", "--runs", store.root, "--lines", "2") == 0
    told = capsys.readouterr().out
    result = store.find("naju-T4-default-s1").result()
    assert str(result["parameters"]) in told
    assert "T4, growing" in told
    assert sum(line.startswith('{"step"') for line in told.splitlines()) == 2
    assert naju("runs", "show", "naju-T2-default-s1", "--runs", store.root) == 0
    assert "interrupted, step 3 of 12" in capsys.readouterr().out


def test_rm_removes_what_it_is_told(store, capsys):
    assert naju("runs", "rm", "naju-T2-default-s1", "--runs", store.root) == 0
    assert [run.name for run in store.runs()] == ["naju-T4-default-s1"]
    assert "removed" in capsys.readouterr().out


def test_rm_takes_a_run_that_is_named_twice_for_one(store, capsys):
    assert naju("runs", "rm", "naju-T2-default-s1", "diagnostics/naju-T2-default-s1", "--runs", store.root) == 0
    assert capsys.readouterr().out.count("removed") == 1


def test_rm_refuses_a_run_in_training_and_then_removes_none(store, capsys):
    held = {"host": "elsewhere", "pid": 5, "token": "theirs"}
    (store.find("naju-T2-default-s1").path / "lock.json").write_text(json.dumps(held))
    assert naju("runs", "rm", "naju-T4-default-s1", "naju-T2-default-s1", "--runs", store.root) == 2
    assert "is being trained by process 5 on elsewhere; stop that first" in capsys.readouterr().err
    with pytest.raises(ValueError, match="stop that first"):  # also one that began after all were found idle
        store.find("naju-T2-default-s1").remove()
    assert len(list(store.runs())) == 2
    assert store.find("naju-T2-default-s1").status() == "running as process 5 on elsewhere, step 3 of 12"


@pytest.mark.parametrize("name", ["nonsense", "..", "../..", "diagnostics", ""])
def test_only_runs_can_be_named(store, capsys, name):
    assert naju("runs", "rm", name, "--runs", store.root) == 2
    told = capsys.readouterr().err
    assert f"no run is called {name!r}" in told
    assert told.endswith("; there: diagnostics/naju-T2-default-s1, diagnostics/naju-T4-default-s1\n")
    assert len(list(store.runs())) == 2


def test_one_name_in_two_experiments_has_to_be_made_clear(store):
    run = store.find("naju-T4-default-s1")
    (store.root / "other").mkdir()
    os.rename(run.path, store.root / "other" / "naju-T2-default-s1")
    with pytest.raises(ValueError, match=r"several runs are called.*diagnostics/.*, other/"):
        store.find("naju-T2-default-s1")
    assert store.find("other/naju-T2-default-s1").path.parent.name == "other"


def test_results_merge_from_store_and_copies(store, tmp_path):
    copies = tmp_path / "copies"
    copies.mkdir()
    (copies / "naju-T1-default-s1.json").write_text('{"seed": 7}')
    (copies / "torn.json").write_text('{"seed": ')
    results = Results(store, "diagnostics", copies)
    assert results.get("naju-T1-default-s1") == {"seed": 7}
    assert results.get("naju-T4-default-s1")["seed"] == 1
    assert results.get("naju-T2-default-s1") is None
    assert results.get("torn") is None
    for name in ("naju-T4-default-s1", "naju-T2-default-s1"):
        results.collect(name)
    assert sorted(path.stem for path in copies.iterdir()) == ["naju-T1-default-s1", "naju-T4-default-s1", "torn"]


def test_a_result_without_a_readable_file_is_not_finished(store):
    run = store.find("naju-T4-default-s1")
    (run.path / "result.json").write_text('{"mixer": "na')
    assert run.result() is None
    assert run.status() == "interrupted, step 12 of 12"
    (run.path / "config.json").write_text("[12]")
    assert run.status() == "interrupted, step 12 of ?"


def test_a_run_begins_without_what_a_killed_process_left_half_written(tmp_path):
    (tmp_path / ".result.json.1.new").write_text('{"mixer": "na')
    RunFolder(tmp_path).begin({"seed": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_versions_are_those_of_what_is_installed(monkeypatch):
    def version(package):
        if package == "triton":
            return "3.6.0"
        raise PackageNotFoundError

    monkeypatch.setattr(runs, "version", version)
    monkeypatch.setattr(runs, "_version", runs._version.__wrapped__)
    found = runs.versions()
    assert set(found) == {"naju", "python", "torch", "triton"}
    assert found["triton"] == "3.6.0"


def test_a_run_is_compiled_however_much_was_compiled_before(tmp_path):
    """Torch stops compiling a function after eight shapes, and the models of all runs share theirs."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, dynamic=False)
    def shared(x):
        return x + 1

    def work(lock):
        for size in range(2, 14):
            shared(torch.zeros(size))
        return {}

    store, made = RunStore(tmp_path), []
    for name in ("first", "second"):
        before = len(graphs)
        carry_out(store.folder("some", name), {}, work)
        made.append(len(graphs) - before)
    assert made[0] == made[1] > 0
