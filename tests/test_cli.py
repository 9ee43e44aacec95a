"""The command as a person meets it: help, bad options, interruption, exit codes."""

import pytest

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


def test_interruption_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_scan_bench", interrupted)
    assert run("bench", "scan") == 130
    assert "interrupted" in capsys.readouterr().err


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
