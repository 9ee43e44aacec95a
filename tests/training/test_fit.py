"""Stopped, killed, damaged: a run that goes on from a checkpoint ends as if nothing had happened."""

import os

import pytest
import torch
from tiny import TokenBeforeLast, config, model
from torch import nn

from naju.training import FixedSet, Journal, Learner, Reporter, Rhythm, StoppedError, fit, loop
from naju.training.checkpoint import BEFORE, NEWEST, Checkpoints, read_checkpoint
from naju.training.metrics import METRICS, read_metrics
from naju.training.schedule import cosine_with_warmup

CPU = torch.device("cpu")
SETTINGS = {"steps": 20, "sequences": 120}  # seven steps an epoch: the last one is cut short
OFTEN = Rhythm(log_every=3, validate_every=6, save_seconds=0)
SELDOM = Rhythm(log_every=3, validate_every=6)


def go(folder, rhythm=OFTEN, *, stop_after=None, stop_in_validation=None, poison_at=None, notes=None):
    """Train to the end or to a stop; the learner."""
    settings = config(**SETTINGS)
    module = model()
    learner, data = Learner(module, settings), FixedSet(TokenBeforeLast(), settings, CPU)
    folder.mkdir(exist_ok=True)

    def stop():
        if poison_at is not None and int(learner.steps_done) == poison_at:
            nn.init.constant_(module.head.bias, float("nan"))
        return stop_after is not None and int(learner.steps_done) >= stop_after

    def validate():
        Reporter(stop=lambda: int(learner.steps_done) == stop_in_validation).examined(0.5)
        return float(module(data.tokens).argmax(-1).eq(data.targets).float().mean())

    note = (lambda sentence: None) if notes is None else notes.append
    with Journal(folder, learner, note=note) as journal:
        fit(learner, data, journal, rhythm, validate, Reporter(stop=stop))
    return learner


def ending(folder, learner):
    return (folder / METRICS).read_bytes(), {name: tensor.clone() for name, tensor in learner.tensors().items()}


def same(first, second):
    return first[0] == second[0] and all(torch.equal(first[1][name], second[1][name]) for name in first[1])


@pytest.fixture
def whole(tmp_path):
    """A run that nobody disturbed."""
    folder = tmp_path / "whole"
    return ending(folder, go(folder))


def test_it_learns_and_says_so(tmp_path, whole):
    rows = read_metrics(tmp_path / "whole")
    assert [row["step"] for row in rows] == [3, 6, 9, 12, 15, 18, 20]
    assert [row["step"] for row in rows if row["validation_accuracy"] is not None] == [6, 12, 18, 20]
    assert [row["lr"] for row in rows] == [1e-2 * cosine_with_warmup(row["step"] - 1, 20, 0.05) for row in rows]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
    assert all(0 <= row["train_accuracy"] <= 1 for row in rows)


def test_every_validation_is_a_line_whatever_the_rhythm_of_lines():
    rhythm = Rhythm(log_every=4, validate_every=6)
    assert [step for step in range(1, 14) if rhythm.logs(step, 13)] == [4, 6, 8, 12, 13]
    assert [step for step in range(1, 14) if rhythm.validates(step, 13)] == [6, 12, 13]


def test_a_line_has_the_means_of_its_window(tmp_path):
    """At a rate of almost nothing, and with an epoch a line, they are those of the whole set."""
    settings = config(steps=4, sequences=32, lr=1e-30)
    learner, data = Learner(model(), settings), FixedSet(TokenBeforeLast(), settings, CPU)
    with torch.no_grad():
        logits = learner.model(data.tokens)
    with Journal(tmp_path, learner) as journal:
        fit(learner, data, journal, Rhythm(log_every=2, validate_every=4), lambda: 0.0)
        assert [row["step"] for row in journal.rows] == [2, 4]
        for row in journal.rows:
            assert row["loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, data.targets)))
            assert row["train_accuracy"] == float((logits.argmax(-1) == data.targets).double().mean())


def test_the_end_is_saved_however_lately_something_was(tmp_path):
    """What comes after it, an examination, may take long and be stopped."""
    go(tmp_path / "run", SELDOM)
    assert read_checkpoint(tmp_path / "run" / NEWEST).facts["step"] == 20


def test_a_model_that_was_only_read_before_learns_in_training_mode(tmp_path):
    settings, modes = config(steps=2, sequences=32), []
    learner = Learner(model().eval(), settings)
    learner.model.register_forward_hook(lambda *_: modes.append(learner.model.training))
    with Journal(tmp_path, learner) as journal:
        fit(learner, FixedSet(TokenBeforeLast(), settings, CPU), journal, SELDOM, lambda: 0.0)
    assert modes == [True, True]


@pytest.mark.parametrize("step", [1, 3, 4, 7, 12, 19])
def test_stopped_at_any_step_it_goes_on_to_the_same_end(tmp_path, whole, step):
    folder = tmp_path / "stopped"
    with pytest.raises(StoppedError, match=f"stopped after step {step} of 20"):
        go(folder, SELDOM, stop_after=step)
    assert same(ending(folder, go(folder)), whole)


@pytest.mark.parametrize("rhythm", [OFTEN, SELDOM])
@pytest.mark.parametrize("step", [6, 12, 20])
def test_stopped_in_a_validation_it_goes_on_to_the_same_end(tmp_path, whole, step, rhythm):
    folder = tmp_path / "stopped"
    with pytest.raises(StoppedError, match="stopped while it was examined"):
        go(folder, rhythm, stop_in_validation=step)
    assert [row["step"] for row in read_metrics(folder)] == list(range(3, step, 3))
    assert read_checkpoint(folder / NEWEST).facts["step"] == step  # nothing that was learned is lost
    assert same(ending(folder, go(folder)), whole)


def test_stopped_again_and_again(tmp_path, whole):
    folder = tmp_path / "stopped"
    for step in (2, 5, 6, 13):
        with pytest.raises(StoppedError):
            go(folder, SELDOM, stop_after=step)
    assert same(ending(folder, go(folder)), whole)


def test_lines_beyond_the_checkpoint_and_torn_ones_are_dropped(tmp_path, whole):
    folder = tmp_path / "torn"
    with pytest.raises(StoppedError):
        go(folder, SELDOM, stop_after=7)
    with (folder / METRICS).open("a") as file:
        file.write(
            '{"step": 9, "loss": 0.5, "lr": 0, "train_accuracy": 1, "validation_accuracy": null}\n{"step": 12, "lo'
        )
    assert [row["step"] for row in read_metrics(folder)] == [3, 6, 9]
    assert same(ending(folder, go(folder)), whole)


def damage(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize("harm", [damage, cut])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_used(tmp_path, whole, harm):
    folder, notes = tmp_path / "damaged", []
    with pytest.raises(StoppedError):
        go(folder, stop_after=8)
    assert read_checkpoint(folder / BEFORE).facts["step"] == 6
    harm(folder / NEWEST)
    assert same(ending(folder, go(folder, notes=notes)), whole)
    assert len(notes) == 1
    assert f"checkpoint {NEWEST} is damaged" in notes[0]


def test_with_both_damaged_it_begins_again(tmp_path, whole):
    folder, notes = tmp_path / "damaged", []
    with pytest.raises(StoppedError):
        go(folder, stop_after=8)
    damage(folder / NEWEST)
    cut(folder / BEFORE)
    assert same(ending(folder, go(folder, notes=notes)), whole)
    assert len(notes) == 2


def test_a_loss_that_is_not_finite_keeps_the_last_good_checkpoint(tmp_path):
    with pytest.raises(FloatingPointError, match="at step 8;"):
        go(tmp_path / "broken", poison_at=7)
    checkpoint = read_checkpoint(tmp_path / "broken" / NEWEST)
    assert checkpoint.facts["step"] == 6
    assert all(tensor.isfinite().all() for tensor in checkpoint.tensors.values())
    with pytest.raises(FloatingPointError, match="at step 8;"):
        go(tmp_path / "stopped", SELDOM, poison_at=7, stop_after=8)
    assert not (tmp_path / "stopped" / NEWEST).exists()


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_save_killed_between_its_renames_leaves_a_good_file(tmp_path, monkeypatch, renames):
    """A save renames its written file, then the newest to the one before, then its file to the newest."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save({"model.a": torch.zeros(2)}, {"step": 1})
    replace, done = os.replace, []

    def until_killed(source, target):
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(target)
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", until_killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save({"model.a": torch.ones(2)}, {"step": 2})
    notes = []
    assert checkpoints.load(notes.append).facts == {"step": 1}
    assert notes == []
    checkpoints.save({"model.a": torch.ones(2)}, {"step": 3})
    assert checkpoints.load(notes.append).facts == {"step": 3}


def test_a_finished_run_keeps_its_model_only(tmp_path):
    folder = tmp_path / "done"
    learner = go(folder)
    with Journal(folder, learner) as journal:
        journal.keep_model_only(20)
    checkpoint = read_checkpoint(folder / NEWEST)
    assert {name.split(".")[0] for name in checkpoint.tensors} == {"model"}
    assert not (folder / BEFORE).exists()
    fresh = model(seed=1)
    fresh.load_state_dict(checkpoint.model())
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), learner.model.parameters(), strict=True))


def test_seconds_go_on_counting(tmp_path):
    with pytest.raises(StoppedError):
        go(tmp_path / "run", SELDOM, stop_after=5)
    spent = read_checkpoint(tmp_path / "run" / NEWEST).facts["seconds"]
    with Journal(tmp_path / "run", Learner(model(), config(**SETTINGS))) as journal:
        assert journal.seconds >= spent > 0


def test_what_may_not_be_written_is_not(tmp_path):
    def refuse():
        raise PermissionError("not mine any more")

    with pytest.raises(PermissionError, match="not mine"):
        Checkpoints(tmp_path, refuse).save({"model.a": torch.zeros(1)}, {})
    assert list(tmp_path.iterdir()) == []


def test_where_no_graph_can_be_recorded_steps_run_eagerly_and_it_says_why(monkeypatch):
    settings, notes = config(**SETTINGS), []
    learner, data = Learner(model(), settings), FixedSet(TokenBeforeLast(), settings, CPU)
    before = {name: tensor.clone() for name, tensor in learner.tensors().items()}
    data.shuffle(0)

    def warms_up_and_fails(steps, state):
        steps[0]()
        raise RuntimeError("operation not permitted when stream is capturing\nand much more")

    monkeypatch.setattr("naju.training.execution.recorded", warms_up_and_fails)
    monkeypatch.setattr(learner, "device", torch.device("cuda"))
    (step,), execution = loop.executables(learner, data, notes.append)
    assert execution == "eager: operation not permitted when stream is capturing"
    assert notes == [f"no CUDA graph: {execution.removeprefix('eager: ')}"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.tensors().items())
    step()
    assert int(learner.steps_done) == 1
