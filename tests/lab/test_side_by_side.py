"""The multi-process service is begun, used and ended; a script stands in for NVIDIA's program."""

import os
import signal

import pytest

from naju.lab.side_by_side import CONTROL, PIPES, side_by_side


@pytest.fixture
def control(tmp_path, monkeypatch):
    """A control program that writes down how it was called, and fails if told to."""

    def install(code=0):
        program, calls = tmp_path / "bin" / CONTROL, tmp_path / "calls"
        program.parent.mkdir()
        lines = ["#!/bin/sh", '[ "$1" = -d ] || read word', f'echo "$1$word ${PIPES}" >> {calls}']
        program.write_text("\n".join([*lines, "echo no such thing >&2", f"exit {code}\n"]))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        return calls

    monkeypatch.delenv(PIPES, raising=False)
    monkeypatch.setattr("naju.lab.side_by_side.DEFAULT_PIPES", tmp_path / "none")
    return install


def test_processes_inside_find_a_service_that_ends_with_them(control):
    calls = control()
    with side_by_side("cuda", 2):
        pipes = os.environ[PIPES]
        assert os.path.isdir(pipes)
        assert calls.read_text() == f"-d {pipes}\n"
    assert calls.read_text() == f"-d {pipes}\nquit {pipes}\n"
    assert PIPES not in os.environ
    assert not os.path.exists(pipes)


def test_it_ends_after_an_error_too(control):
    calls = control()
    with pytest.raises(KeyboardInterrupt), side_by_side("cuda", 2):
        signal.raise_signal(signal.SIGINT)
    assert calls.read_text().splitlines()[-1].startswith("quit ")
    assert PIPES not in os.environ


@pytest.mark.parametrize(("device", "jobs"), [("cpu", 4), ("cuda", 1)])
def test_it_is_only_for_several_on_one_gpu(control, device, jobs):
    calls = control()
    with side_by_side(device, jobs):
        assert PIPES not in os.environ
    assert not calls.exists()


def test_one_that_is_there_is_left_alone(control, monkeypatch):
    calls = control()
    monkeypatch.setenv(PIPES, "/elsewhere")
    with side_by_side("cuda", 2):
        assert os.environ[PIPES] == "/elsewhere"
    assert not calls.exists()


def test_without_it_runs_take_turns(control, capsys, monkeypatch):
    calls = control(code=1)
    with side_by_side("cuda", 2):
        assert PIPES not in os.environ
    assert len(calls.read_text().splitlines()) == 1
    assert capsys.readouterr().err == f"naju: runs take turns on the GPU, for {CONTROL} says: no such thing\n"
    monkeypatch.setenv("PATH", "/nowhere")
    with side_by_side("cuda", 2):
        assert PIPES not in os.environ
