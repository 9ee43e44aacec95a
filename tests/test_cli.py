"""The command as a person meets it: help, bad options, interruption, exit codes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import naju
from naju import cli


def run(*arguments: str) -> int:
    """The exit code of `naju arguments`."""
    try:
        cli.main(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    return 0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"naju {naju.__version__}\n"


def test_no_arguments_and_help_list_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("--help",)):
        assert run(*arguments) == 0
        told = capsys.readouterr().out
        assert all(command in told for command in ("demo", "doctor", "bench", "tasks"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("bench", "nonsense"),
        ("bench", "scan", "--rounds", "many"),
        ("demo", "--no-such-option"),
        ("tasks",),
    ],
)
def test_bad_options_exit_with_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_bad_values_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "scan", "--rounds", "0") == 2
    told = capsys.readouterr().err
    assert "rounds must be at least 1" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("demo", "--test-sequences", "0"), "test_sequences must be a positive integer, but is 0"),
        (("reproduce", "lra", "--budget", "0"), "budget must lie in (0, 1], but is 0.0"),
        (("reproduce", "mqar", "--jobs", "0"), "jobs must be a positive integer, but is 0"),
        (("reproduce", "mqar", "--gpus", "0"), "gpus must be a positive integer, but is 0"),
        (("lm", "generate", "model", "--temperature", "-1"), "temperature must be 0 (greedy) or positive, but is -1.0"),
    ],
)
def test_a_config_refuses_in_its_own_words(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert capsys.readouterr().err == f"naju: {sentence}\n"


def test_a_value_of_another_type_is_answered_with_the_help_of_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "scan", "--rounds", "many") == 2
    told = capsys.readouterr().err
    assert "Error parsing --rounds" in told
    assert "timed rounds" in told


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("errors", "--lengths", "8", "--backends", "chonked"), "backends must be some of .* but hold 'chonked'"),
        (("stress", "--backends", "chonked"), "backends must be some of .* but hold 'chonked'"),
        (("forward", "--lengths", "8", "--against", "mamba9"), "unknown model 'mamba9'; expected one of naju, "),
        (("steps", "--seconds", "nan"), "seconds must be positive and finite, but is nan"),
        (("model", "--d-model", "65"), "d_model must be a multiple of 32 for Mamba-2's heads of 64, but is 65"),
    ],
)
def test_a_bench_refuses_what_it_cannot_measure(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("bench", *arguments, "--out", str(tmp_path)) == 2
    told = capsys.readouterr().err
    assert re.fullmatch(f"naju: {sentence}.*\n", told)


def test_a_bench_looks_whether_it_can_write_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "run_scan_bench", lambda _: pytest.fail("measured"))
    (tmp_path / "file").touch()
    assert run("bench", "scan", "--out", str(tmp_path / "file")) == 2
    assert "cannot be written: File exists" in capsys.readouterr().err


def test_interruption_exits_with_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_scan_bench", interrupted)
    assert run("bench", "scan", "--out", str(tmp_path)) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_reader_that_has_had_enough_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    told = subprocess.run([sys.executable, "-m", "naju.cli", "tasks", "ls"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (told.returncode, told.stderr) == (141, b"")


def test_an_error_of_the_system_is_told_without_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("report", ".", "-o", __file__) == 2
    assert capsys.readouterr().err == f"naju: {__file__}: File exists\n"


def test_doctor_tests_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor") == 0
    told = capsys.readouterr().out
    assert all(name in told for name in naju.backends())
    assert "all well" in told


def test_doctor_reports_a_wrong_backend(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from naju import doctor

    honest = doctor.naju_scan

    def slightly_off(*arguments: object, backend: str, **options: object) -> object:
        y, state = honest(*arguments, backend=backend, **options)  # type: ignore[arg-type]
        return (y * 1.001, state) if backend == "chunked" else (y, state)

    monkeypatch.setattr(doctor, "naju_scan", slightly_off)
    assert run("doctor") == 1
    assert "WRONG" in capsys.readouterr().out


def test_doctor_reports_wrong_products(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    honest = torch.Tensor.__matmul__

    def without_its_last_row(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = honest(left, right)
        if product.dtype == torch.bfloat16:
            product[-1] = float("nan")
        return product

    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "40")
    monkeypatch.setattr(torch.Tensor, "__matmul__", without_its_last_row)
    assert run("doctor") == 1
    told = capsys.readouterr().out
    assert "products in bfloat16: WRONG: largest relative error nan" in told
    assert "without CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in told
    monkeypatch.undo()
    assert run("doctor") == 0
    assert "products in bfloat16: ok" in capsys.readouterr().out


def test_doctor_tells_of_a_backend_that_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from naju import doctor

    missing: dict[str, str | None] = dict.fromkeys(naju.backends())

    def fails_at_first_use(name: str) -> tuple[str, bool]:
        if name == "cpu_compiled":
            missing[name] = "the compiler is broken"
        return "ok", name != "cpu_compiled"

    monkeypatch.setattr(doctor, "backends", lambda: missing)
    monkeypatch.setattr(doctor, "_self_test", fails_at_first_use)
    assert run("doctor") == 0
    assert capsys.readouterr().out.count("cannot run here: the compiler is broken") == 1


def test_doctor_sees_nan_in_any_result(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from naju import doctor

    honest = doctor._scan_and_gradients

    def last_is_nan(backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
        *others, last = honest(backend, dtype)
        return [*others, last * float("nan") if backend == "chunked" else last]

    monkeypatch.setattr(doctor, "_scan_and_gradients", last_is_nan)
    assert run("doctor") == 1
    assert "WRONG: largest relative error nan" in capsys.readouterr().out
