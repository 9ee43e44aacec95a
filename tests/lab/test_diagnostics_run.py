"""One run of the suite: what it leaves behind, and that it does so whatever happens to it."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_runs import tiny_run

from naju.lab import diagnostic_run
from naju.lab.diagnostic_run import load_run_model, run_diagnostic
from naju.lab.diagnostics import tables
from naju.lab.lock import BusyError, RunLock
from naju.lab.report import write_report
from naju.lab.runs import RunFolder
from naju.training import Reporter, Rhythm, StoppedError, evaluate, seeded_generator
from naju.training.seeding import derived_seed

SILENT = Reporter()


def finished(path, run=None):
    run = tiny_run() if run is None else run
    folder = RunFolder(path / run.name)
    return folder, run_diagnostic(run, folder, SILENT)


def test_the_folder_and_the_result(tmp_path):
    run = tiny_run()
    folder, result = finished(tmp_path)
    assert folder.name == "naju-T4-default-s1"
    assert sorted(path.name for path in folder.path.iterdir() if path.is_file()) == [
        "checkpoint.safetensors",
        "config.json",
        "metrics.jsonl",
        "result.json",
    ]
    assert json.loads((folder.path / "result.json").read_text()) == result
    assert folder.config() == run.to_json() == result["config"]
    model = run.model.build(run.build_task(), 1)
    assert result["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert result["state_size"] == 2 * 8 * 4
    assert result["steps"] == 12 == folder.metrics()[-1]["step"]
    assert list(result["accuracy"]) == ["64", "128"]
    assert list(result["growing"]) == ["128"]
    assert set(result["accuracy"]["64"]) == {"all", "far", "middle", "near"}
    assert result["curve"] == [[row["step"], row["loss"], row["validation_accuracy"]] for row in folder.metrics()]
    validations = [row["validation_accuracy"] for row in folder.metrics() if row["validation_accuracy"] is not None]
    assert result["best_validation"] == max(validations)
    assert result["final_validation"] == validations[-1]
    last_epoch = [row["train_accuracy"] for row in folder.metrics() if row["step"] > 9]
    assert result["train_accuracy"] == pytest.approx(sum(last_epoch) / len(last_epoch))


def test_the_saved_model_has_the_accuracies_of_the_result(tmp_path):
    run = replace(tiny_run(), model=replace(tiny_run().model, head="hidden"), variant="hidden-head")
    folder, result = finished(tmp_path, run)
    model, task = load_run_model(folder.path)
    assert not model.training
    for length in (64, 128):
        generator = seeded_generator(1, f"test data of length {length}")
        measured = evaluate(model, task, count=50, length=length, generator=generator, batch_size=2**17 // length)
        shares = {name: share for name, (share, _) in measured.by_group.items()}
        assert result["accuracy"][str(length)] == {"all": measured.overall, **shares}
    with torch.no_grad():
        model.head[-1].bias[0] += 100  # a model that always answers 0 is another one
    wrong = evaluate(model, task, count=50, length=64, generator=seeded_generator(1, "test data of length 64"))
    assert wrong.overall != result["accuracy"]["64"]["all"]


def test_what_a_run_is_validated_and_examined_on(tmp_path, monkeypatch):
    """Every purpose draws from a stream of its own, none of them that of the training data."""
    asked = []

    def evaluated(model, task, **options):
        asked.append((task, options))
        return evaluate(model, task, **options)

    monkeypatch.setattr(diagnostic_run, "evaluate", evaluated)
    run = tiny_run()
    lengths = replace(run.examination, test_lengths=(48, 64, 128))  # one is shorter than what was learned
    finished(tmp_path, replace(run, examination=lengths, training=replace(run.training, bf16=True)))
    validations, (near, far, growing) = asked[:-3], asked[-3:]
    seeds = [options["generator"].initial_seed() for _, options in (validations[0], near, far, growing)]
    purposes = [f"{kind}test data of length {length}" for kind, length in (("", 64), ("", 128), ("growing ", 128))]
    assert seeds == [derived_seed(1, purpose) for purpose in ("validation data", *purposes)]
    assert len({*seeds, derived_seed(1, "training data")}) == 5
    for task, options in validations:
        assert (task.growing_from, options["length"], options["count"]) == (None, 64, 30)
    assert [(task.growing_from, options["length"]) for task, options in (near, far, growing)] == [
        (None, 64),
        (None, 128),
        (64, 128),
    ]
    assert {options["count"] for _, options in (near, far, growing)} == {50}
    for _, options in asked:
        assert (options["batch_size"], options["bf16"]) == (2**17 // options["length"], True)


def row(step, train_accuracy, validation=None):
    return {"step": step, "loss": 1 / step, "train_accuracy": train_accuracy, "validation_accuracy": validation}


def test_what_was_learned_is_told_by_the_last_epoch_the_best_validation_and_the_last():
    rows = [row(4, 0.1, 0.2), row(8, 0.3), row(10, 0.5, 0.9), row(14, 0.6), row(15, 0.8, 0.7)]
    told = diagnostic_run.learned(rows, epoch_steps=7)
    assert (told["best_validation"], told["final_validation"]) == (0.9, 0.7)
    assert told["train_accuracy"] == pytest.approx((2 * 0.5 + 4 * 0.6 + 1 * 0.8) / 7)  # steps 9 to 15
    assert told["curve"] == [[row["step"], row["loss"], row["validation_accuracy"]] for row in rows]


@pytest.mark.parametrize("validated_every", [2, 100])
def test_a_thinned_curve_ends_where_the_run_does(validated_every):
    rows = [row(step, 0.5, 0.5 if step % validated_every == 0 or step == 451 else None) for step in range(1, 452)]
    steps = [point[0] for point in diagnostic_run.learned(rows, epoch_steps=10)["curve"]]
    assert steps[-1] == 451
    assert len(steps) <= 200
    if validated_every == 100:
        assert {100, 200, 300, 400} <= set(steps)


def test_a_run_speaks_four_times_an_epoch_and_validates_every_other_time():
    training = replace(tiny_run().training, sequences=400, batch_size=10)
    assert diagnostic_run.rhythm(training) == Rhythm(log_every=10, validate_every=20)
    assert diagnostic_run.rhythm(tiny_run().training) == Rhythm(log_every=1, validate_every=2)


def test_a_model_whose_positions_end_is_examined_as_far_as_they_go(tmp_path):
    settings = replace(tiny_run().model, mixer="transformer", mixer_options={"n_heads": 2, "max_length": 64})
    _, result = finished(tmp_path, replace(tiny_run(), model=settings))
    assert list(result["accuracy"]) == ["64"]
    assert result["growing"] == {}
    report = write_report(tmp_path, tmp_path / "report").read_text()
    assert "transformer" in tables([result])
    assert "Transformer" in report


def test_the_curve_is_thinned_to_two_hundred_points_and_keeps_the_last(tmp_path):
    run = tiny_run()
    longer = replace(run, training=replace(run.training, steps=450, length=44, batch_size=2, sequences=8))
    _, result = finished(tmp_path, replace(longer, model=replace(run.model, mixer_options={"d_state": 1})))
    assert 100 <= len(result["curve"]) <= 200
    assert result["curve"][-1][0] == 450
    assert result["curve"][-1][2] == result["final_validation"]


def test_a_finished_run_is_not_touched(tmp_path):
    folder, result = finished(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in folder.path.iterdir()}
    assert run_diagnostic(tiny_run(), folder, Reporter(begin=lambda step: pytest.fail("trained"))) == result
    assert {path: path.stat().st_mtime_ns for path in folder.path.iterdir()} == before


def test_the_same_seed_gives_the_same_metrics_and_another_one_others(tmp_path):
    texts = []
    for place, seed in (("a", 1), ("b", 1), ("c", 2)):
        folder, result = finished(tmp_path / place, tiny_run(seed=seed))
        texts.append((folder.path / "metrics.jsonl").read_bytes())
        assert result["seed"] == seed
    assert texts[0] == texts[1] != texts[2]


def test_two_mixers_learn_from_the_same_sequences(tmp_path, monkeypatch):
    seen = []
    real = diagnostic_run.FixedSet
    monkeypatch.setattr(diagnostic_run, "FixedSet", lambda *given: seen.append(real(*given)) or seen[-1])
    for mixer in ("naju", "coupled"):
        finished(tmp_path, tiny_run(mixer))
    assert torch.equal(seen[0].tokens, seen[1].tokens)
    assert torch.equal(seen[0].order, seen[1].order)


def test_another_config_under_the_same_name_is_refused(tmp_path):
    run = tiny_run()
    folder = RunFolder(tmp_path / run.name)
    with pytest.raises(StoppedError):
        run_diagnostic(run, folder, Reporter(stop=lambda: True))
    other = replace(run, training=replace(run.training, lr=0.1))
    with pytest.raises(ValueError, match="was begun with another lr; remove it"):
        run_diagnostic(other, folder, SILENT)


def test_stopped_while_it_is_examined_it_is_examined_again(tmp_path):
    whole, result = finished(tmp_path / "whole")
    run = tiny_run()
    folder = RunFolder(tmp_path / run.name)
    steps = []
    with pytest.raises(StoppedError, match="while it was examined"):
        run_diagnostic(run, folder, Reporter(progress=lambda step, _: steps.append(step), stop=lambda: 12 in steps))
    assert folder.status() == "interrupted, step 12 of 12"
    begun = []
    again = run_diagnostic(run, folder, Reporter(begin=begun.append))
    assert begun == [12]
    assert again["accuracy"] == result["accuracy"]
    assert (folder.path / "metrics.jsonl").read_bytes() == (whole.path / "metrics.jsonl").read_bytes()


def test_a_run_that_is_held_elsewhere_is_left_alone(tmp_path):
    run = tiny_run()
    folder = RunFolder(tmp_path / run.name)
    folder.path.mkdir()
    with RunLock(folder.path), pytest.raises(BusyError, match=f"is being trained by process {os.getpid()}"):
        run_diagnostic(run, folder, SILENT)
    assert not (folder.path / "config.json").exists()


def test_a_run_whose_lock_was_taken_over_writes_nothing_more(tmp_path):
    run = tiny_run()
    folder = RunFolder(tmp_path / run.name)

    def lose(step, loss):
        (folder.path / "lock.json").write_text(json.dumps({"host": "elsewhere", "pid": 1, "token": "theirs"}))

    with pytest.raises(Exception, match="was taken over by process 1 on elsewhere"):
        run_diagnostic(run, folder, Reporter(progress=lose))
    assert not (folder.path / "checkpoint.safetensors").exists()
    assert folder.result() is None
    assert (folder.path / "lock.json").exists()  # theirs


def test_a_run_whose_lock_was_taken_over_while_it_is_examined_leaves_no_result(tmp_path):
    run, steps = tiny_run(), []
    folder = RunFolder(tmp_path / run.name)

    def lose():
        if 12 in steps:
            (folder.path / "lock.json").write_text(json.dumps({"host": "elsewhere", "pid": 1, "token": "theirs"}))
        return False

    with pytest.raises(Exception, match="was taken over by process 1 on elsewhere"):
        run_diagnostic(run, folder, Reporter(progress=lambda step, _: steps.append(step), stop=lose))
    assert folder.result() is None


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tiny_runs import tiny_run
from naju.lab import diagnostic_run
from naju.lab.report import write_report
from naju.lab.runs import RunFolder
from naju.training import Reporter, Rhythm
import torch
torch.set_num_threads(1)
diagnostic_run.rhythm = lambda training: Rhythm(log_every=1, validate_every=2, save_seconds=0)
diagnostic_run.run_diagnostic(tiny_run(), RunFolder(Path(sys.argv[1])), Reporter())
"""


def start(folder):
    command = [sys.executable, "-c", KILLED, str(folder), str(Path(__file__).parent)]
    return subprocess.Popen(command)


def wait_for_lines(folder, count, process):
    deadline = time.monotonic() + 60
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < count:
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline, "no metrics within a minute"
        time.sleep(0.001)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals are sent the POSIX way")
def test_killed_at_any_moment_it_ends_with_the_same_files(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole).wait(60) == 0
    for lines in (1, 7):
        process = start(killed)
        wait_for_lines(killed, lines, process)
        process.send_signal(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
    assert not (killed / "result.json").exists()
    assert start(killed).wait(60) == 0
    assert (killed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert (whole / "metrics.jsonl").read_bytes().count(b"\n") == 12
    results = [json.loads((folder / "result.json").read_text()) for folder in (whole, killed)]
    for result in results:
        del result["seconds"], result["when"]
    assert results[0] == results[1]
