"""Metrics on the disk and in TensorBoard."""

import sys
from types import ModuleType

import pytest

from naju.training.files import write_json, write_whole
from naju.training.metrics import Metrics, read_metrics

ROWS = [{"step": step, "loss": 1 / step, "validation_accuracy": None} for step in (1, 2, 3)]


@pytest.fixture
def board(monkeypatch):
    """A stand-in for TensorBoard that keeps what it is told."""
    told = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            told.append(("open", folder, purge_step))

        def add_scalar(self, name, value, step):
            told.append((name, value, step))

        def close(self):
            told.append("close")

    fake = ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    return told


def write(folder, last_step, rows):
    metrics = Metrics(folder, last_step)
    for row in rows:
        metrics.append(row)
    metrics.close()


def test_lines_stay_up_to_the_last_step(tmp_path):
    write(tmp_path, 0, ROWS)
    assert read_metrics(tmp_path) == ROWS
    write(tmp_path, 2, [{"step": 5}])
    assert read_metrics(tmp_path) == [*ROWS[:2], {"step": 5}]


def test_tensorboard_hears_what_the_file_does(tmp_path, board):
    write(tmp_path, 4, [{"step": 5, "loss": 0.5, "validation_accuracy": None}])
    assert board == [("open", str(tmp_path / "tensorboard"), 5), ("loss", 0.5, 5), "close"]


def test_without_tensorboard_nothing_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    write(tmp_path, 0, ROWS)
    assert capsys.readouterr() == ("", "")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_file_that_could_not_be_finished_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    write_json(path, {"a": 1})

    def full(handle):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_whole(path, b"new")
    assert path.read_text() == '{\n "a": 1\n}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_numbers_that_json_does_not_have_are_refused(tmp_path):
    with pytest.raises(ValueError, match="Out of range"):
        write_json(tmp_path / "file.json", {"a": float("nan")})
    assert list(tmp_path.iterdir()) == []
