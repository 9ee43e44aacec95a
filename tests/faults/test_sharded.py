"""Checkpoints of sharded models: what a kill has left half done goes, and a changed step is noticed."""

import json

import torch

from naju.lm.config import Execution
from naju.lm.distributed import joined
from naju.lm.sharded_checkpoint import COMPLETE, FOLDER, ShardedCheckpoints


def test_what_was_half_written_is_cleared_away_and_a_changed_step_noticed(tmp_path):
    tensors, notes = {"model.a": torch.arange(3.0)}, []
    half = tmp_path / FOLDER / ".step-000000001.partial"
    half.mkdir(parents=True)
    with joined(Execution(parallel="fsdp", device="cpu")) as place:
        checkpoints = ShardedCheckpoints(tmp_path, place, lambda: tensors)
        for step in (7, 8):
            checkpoints.save(tensors, {"step": step, "seconds": 1.0})
        assert not half.exists()
        complete = tmp_path / FOLDER / "step-000000008" / COMPLETE
        told = json.loads(complete.read_text())
        told["facts"]["step"] = 9
        complete.write_text(json.dumps(told))
        assert checkpoints.load(notes.append).facts["step"] == 7
    assert notes == [f"checkpoint step-000000008 is damaged: its {COMPLETE} is of step 9"]


def test_damaged_ones_are_put_aside_and_take_nobodys_place(tmp_path):
    tensors, notes = {"model.a": torch.arange(3.0)}, []
    with joined(Execution(parallel="fsdp", device="cpu")) as place:
        checkpoints = ShardedCheckpoints(tmp_path, place, lambda: tensors, keep=2)
        for step in (30, 40):
            checkpoints.save(tensors, {"step": step, "seconds": 1.0})
            (tmp_path / FOLDER / f"step-{step:09d}" / COMPLETE).write_text("{")
        assert checkpoints.load(notes.append) is None
        for step in (5, 10):
            checkpoints.save(tensors, {"step": step, "seconds": 1.0})
        assert checkpoints.load(notes.append).facts["step"] == 10
        assert [path.name for path in checkpoints.found()] == ["step-000000010", "step-000000005"]
    assert len(notes) == 2
    assert {path.name for path in (tmp_path / FOLDER).glob("*.damaged")} == {
        "step-000000030.damaged",
        "step-000000040.damaged",
    }
