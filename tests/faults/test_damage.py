"""Files that were cut short or had bytes flipped: noticed, said, and made up for."""

import json
import os
from dataclasses import replace

import pytest
import torch
from small_grid import cell, outcome

from naju.lab.diagnostic_run import run_diagnostic
from naju.lab.runs import RunFolder
from naju.training import Reporter, StoppedError
from naju.training.checkpoint import BEFORE, NEWEST, Checkpoints, read_checkpoint

FACTS = {"step": 12, "seconds": 3.5, "lines": "f00d"}


def tensors(seed):
    drawn = torch.Generator().manual_seed(seed)
    return {"model.a": torch.randn(3, generator=drawn), "loop.steps_done": torch.tensor([seed])}


@pytest.fixture
def saved(tmp_path):
    Checkpoints(tmp_path).save(tensors(1), FACTS)
    return tmp_path / NEWEST


def reads_the_same(path):
    """False where it is refused in a sentence; nothing else may happen."""
    try:
        found = read_checkpoint(path)
    except ValueError:
        return False
    assert found.facts == FACTS
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors(1).items())
    return True


@pytest.mark.parametrize("bit", range(8))
def test_no_flipped_bit_of_a_checkpoint_goes_unnoticed(saved, bit):
    """Some bits say nothing, such as those that tell white space from other white space."""
    content = saved.read_bytes()
    harmless = 0
    for place in range(len(content)):
        saved.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
        harmless += reads_the_same(saved)
    assert harmless < 0.05 * len(content)


def test_no_checkpoint_that_was_cut_short_is_taken_for_whole(saved):
    content = saved.read_bytes()
    for length in range(len(content)):
        saved.write_bytes(content[:length])
        assert not reads_the_same(saved)


def test_a_damaged_checkpoint_never_takes_the_place_of_a_good_one(tmp_path, monkeypatch):
    """Killed between the renames of the first save after the damage, it still has what it went on from."""
    checkpoints, notes = Checkpoints(tmp_path), []
    for step in (1, 2):
        checkpoints.save(tensors(step), {"step": step})
    (tmp_path / NEWEST).write_bytes(b"nothing that could be read")
    assert checkpoints.load(notes.append).facts == {"step": 1}
    assert len(notes) == 1
    assert notes[0].startswith(f"checkpoint {NEWEST} is damaged: ")
    assert notes[0].endswith(f"it is kept as {NEWEST}.damaged")
    renamed, rename = [], os.replace

    def until_killed(source, target):
        if target == tmp_path / NEWEST:
            raise KeyboardInterrupt
        renamed.append(target)
        rename(source, target)

    monkeypatch.setattr(os, "replace", until_killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(tensors(3), {"step": 3})
    assert renamed
    assert checkpoints.load(notes.append).facts == {"step": 1}
    assert len(notes) == 1


def train(folder, run, *, stop_after=None):
    """The step it began with, and what was said."""
    told = {"begin": None, "notes": [], "last": 0}
    reporter = Reporter(
        begin=lambda step: told.update(begin=step),
        progress=lambda step, loss: told.update(last=step),
        note=told["notes"].append,
        stop=lambda: stop_after is not None and told["last"] >= stop_after,
    )
    run_diagnostic(run, RunFolder(folder), reporter)
    return told["begin"], told["notes"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    train(folder, cell())
    return outcome(folder)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    """A digit becomes another, or none."""
    content = path.read_bytes()
    place = content.index(b'": 0.') + 5
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])


def spoil(path):
    """No text any more."""
    path.write_bytes(b"\xff" + path.read_bytes()[1:])


@pytest.mark.parametrize("harm", [cut, spoil, lambda path: path.unlink()])
def test_a_finished_run_that_lost_its_result_is_examined_again_and_not_trained(tmp_path, whole, harm):
    train(tmp_path, cell())
    harm(tmp_path / "result.json")
    assert train(tmp_path, cell()) == (4, [])
    assert outcome(tmp_path) == whole


def test_a_run_that_ended_early_and_lost_its_result_begins_again(tmp_path, whole):
    """Its optimizer is gone, so it cannot go on to more steps."""
    train(tmp_path, cell(steps=2))
    for name in ("result.json", "config.json"):
        (tmp_path / name).unlink()
    assert train(tmp_path, cell())[0] == 0
    assert outcome(tmp_path) == whole


@pytest.mark.parametrize("harm", [cut, flip, spoil, lambda path: path.unlink()])
def test_metrics_that_lost_or_changed_lines_are_made_again(tmp_path, whole, harm):
    with pytest.raises(StoppedError):
        train(tmp_path, cell(), stop_after=3)
    harm(tmp_path / "metrics.jsonl")
    begun, notes = train(tmp_path, cell())
    assert begun == 0
    assert "metrics.jsonl does not hold the lines that it had at the checkpoint of step 3" in notes[0]
    assert outcome(tmp_path) == whole


def test_a_config_that_cannot_be_read_is_not_replaced_by_another(tmp_path):
    with pytest.raises(StoppedError):
        train(tmp_path, cell(), stop_after=3)
    cut(tmp_path / "config.json")
    other = replace(cell(), training=replace(cell().training, lr=0.1))
    with pytest.raises(ValueError, match=r"has an unreadable config\.json"):
        train(tmp_path, other)
    assert RunFolder(tmp_path).status() == "interrupted, step 3 of ?"


def test_a_model_that_was_renamed_only_half_is_found(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(tensors(step), {"step": step})
    (tmp_path / NEWEST).unlink()
    assert RunFolder(tmp_path).checkpoint().facts == {"step": 1}
    assert (tmp_path / BEFORE).exists()


def test_results_that_cannot_be_read_are_none(tmp_path):
    for content in (b"", b"\xff\xfe", b"[1]", b'{"accuracy": '):
        (tmp_path / "result.json").write_bytes(content)
        assert RunFolder(tmp_path).result() is None
    (tmp_path / "result.json").write_text(json.dumps({"accuracy": 1}))
    assert RunFolder(tmp_path).result() == {"accuracy": 1}
