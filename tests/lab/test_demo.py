"""The demo from end to end, with a training too short to learn anything."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from naju.lab import demo
from naju.lab.demo import DemoConfig, HoldAndOverwrite, run_demo


def config(folder: Path, **changes: object) -> DemoConfig:
    sizes = {"steps": 3, "batch_size": 4, "d_model": 16, "test_sequences": 10, "output": folder / "out"}
    return DemoConfig(**{**sizes, **changes})


def test_it_trains_tests_draws_and_resumes(tmp_path, capsys):
    result = run_demo(config(tmp_path))
    told, progress = capsys.readouterr()
    assert progress == ""  # a log is no terminal
    assert {len(losses) for losses in result.losses.values()} == {3}
    assert set(result.losses) == {"naju", "coupled"}
    for name in result.losses:
        (line,) = [line for line in told.splitlines() if line.split()[:1] == [name] and "=" not in line]
        shares = [
            result.accuracy[name, group, length] for group in ("retention", "overwriting") for length in (64, 256)
        ]
        assert line.split()[1:] == [f"{share:.3f}" for share in shares]
    assert "chance" in told
    assert result.picture.read_bytes().startswith(b"\x89PNG")
    assert str(result.picture.resolve()) in told
    assert str(result.state_file.resolve()) in told
    assert 0 < result.resume_difference < 1e-4


def test_everything_follows_from_the_seed(tmp_path):
    first, second, other = (run_demo(config(tmp_path, seed=seed)) for seed in (0, 0, 1))
    assert first.losses == second.losses
    assert first.accuracy == second.accuracy
    assert first.losses != other.losses


def test_a_lost_state_would_be_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(demo.ModelState, "load", lambda path: model.backbone.init_state(4))
    task, settings = HoldAndOverwrite(), config(tmp_path)
    settings.output.mkdir()
    model = demo.build_model("naju", task, settings)
    assert demo.resume_stream(model, task, settings.output / "state.safetensors", settings) > 1e-3


def test_the_two_halves_of_a_batch_are_the_two_tasks():
    task = HoldAndOverwrite()
    tokens, targets, group = task.sample(9, 64, torch.Generator().manual_seed(0))
    assert group.tolist() == [0] * 5 + [1] * 4
    generator = torch.Generator().manual_seed(0)
    parts = [part.sample(size, 64, generator) for part, size in zip(task.parts, (5, 4), strict=True)]
    assert torch.equal(tokens, torch.cat([part.tokens for part in parts]))
    assert torch.equal(targets, torch.cat([part.targets for part in parts]))
    assert "KEY" in task.describe(tokens[0])
    assert "LATER" in task.describe(tokens[-1])
    with pytest.raises(ValueError, match="length must be at least 44"):
        task.sample(2, 43, torch.Generator())


def test_both_models_start_from_the_same_shared_weights(tmp_path):
    task = HoldAndOverwrite()
    naju, coupled = (demo.build_model(name, task, config(tmp_path)).state_dict() for name in ("naju", "coupled"))
    assert set(coupled) < set(naju)
    assert torch.equal(naju["backbone.embedding.weight"], coupled["backbone.embedding.weight"])


def test_an_output_folder_that_cannot_be_written_is_one_sentence_before_training(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(demo, "train_side_by_side", lambda *_: pytest.fail("trained"))
    with pytest.raises(OSError, match=r"output folder '.*file/out' cannot be written: Not a directory"):
        run_demo(config(tmp_path, output=tmp_path / "file" / "out"))


def test_without_matplotlib_there_is_a_table_and_no_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "why_not", lambda: "matplotlib is not installed")
    assert run_demo(config(tmp_path)).picture is None
    assert "No picture: matplotlib is not installed." in capsys.readouterr().out


def test_an_error_in_one_training_stops_the_other(tmp_path, monkeypatch):
    task, settings = HoldAndOverwrite(), config(tmp_path, steps=100_000)
    models = {name: demo.build_model(name, task, settings) for name in ("naju", "coupled")}
    torch.nn.init.constant_(models["coupled"].head.bias, float("nan"))
    threads = torch.get_num_threads()
    with pytest.raises(FloatingPointError, match=r"the weight head\.bias became infinite or NaN at step 1"):
        demo.train_side_by_side(models, task, settings.training())
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("changes", [{"test_sequences": 0}, {"steps": 0}, {"length": 40}])
def test_impossible_sizes_are_refused_before_training(tmp_path, monkeypatch, changes):
    monkeypatch.setattr(demo, "train", lambda *_: pytest.fail("trained"))
    with pytest.raises(ValueError, match=next(iter(changes))):
        run_demo(config(tmp_path, **changes))


def _terminal() -> tuple[int, int]:
    """What a person sees, and the end that a process writes to; 100 columns wide."""
    import termios

    screen, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    return screen, terminal


@pytest.mark.skipif(os.name == "nt", reason="signals are sent the POSIX way")
def test_ctrl_c_during_training_is_one_line_and_130(tmp_path):
    command = "import sys; from naju.cli import main; main(['demo', '--output', sys.argv[1], '--steps', '100000'])"
    screen, terminal = _terminal()
    run = subprocess.Popen([sys.executable, "-c", command, str(tmp_path)], stderr=terminal, stdout=subprocess.DEVNULL)
    os.close(terminal)
    told = b""
    while b"loss" not in told and select.select([screen], [], [], 60)[0]:
        told += os.read(screen, 4096)
    run.send_signal(signal.SIGINT)
    assert run.wait(timeout=30) == 130
    told += os.read(screen, 4096)
    os.close(screen)
    assert told.decode().splitlines()[-1] == "naju: interrupted"
    assert b"Traceback" not in told
