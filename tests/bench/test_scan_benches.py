"""The scan's kernels and errors, measured on a CPU with the backends that run there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from written_rows import rows

from naju.bench import errors, scan_kernels
from naju.bench.errors import GATES, ErrorsBench, relative_rms, run_errors_bench
from naju.bench.scan_inputs import scan_inputs
from naju.bench.scan_kernels import WAYS, kernel_rows

SHAPE = (2, 24, 8, 4)
TENSORS = {"y", "state", "dh", "df_logit", "di_logit", "dB", "dC", "dD", "dz", "dinitial_state"}


def test_kernels_have_a_share_of_the_copy_or_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["chunked", "no_such_backend"]
    found = kernel_rows(names, SHAPE, torch.float32, rounds=2, device="cpu", copied_bytes=1 << 16)
    by_pass = {(row["backend"], row["pass"]): row for row in found}
    assert set(by_pass) == {(name, way) for name in names for way in WAYS}
    forward, keeping, both = (by_pass["chunked", way] for way in WAYS)
    assert forward["share_of_copy"] == pytest.approx(
        forward["least_bytes"] / forward["median_s"] / forward["copy_bytes_per_s"]
    )
    backward_s = both["median_s"] - keeping["median_s"]
    assert both["backward_over_forward"] == pytest.approx(backward_s / forward["median_s"])
    assert both["training_over_forward"] == pytest.approx(both["median_s"] / forward["median_s"])
    for row in (forward, keeping, both):
        assert row["flop_per_s"] == pytest.approx(row["flop"] / row["median_s"])
        assert row["bytes_per_s"] == pytest.approx(row["least_bytes"] / row["median_s"])
    assert both["flop"] > forward["flop"] == keeping["flop"]
    assert both["least_bytes"] > forward["least_bytes"]
    assert {"first_call_s", "peak_bytes", "batch", "length", "d_inner", "d_state", "dtype"} <= set(both)
    assert "unknown scan backend 'no_such_backend'" in by_pass["no_such_backend", WAYS[2]]["reason"]
    *_, head, first, second, third, _, _, _ = capsys.readouterr().out.splitlines()
    assert "backward  training" in head
    assert all("%" in line for line in (first, second, third))
    shown = third[head.index("backward") :].split()[:2]
    assert [float(number) for number in shown] == pytest.approx(
        [both["backward_over_forward"], both["training_over_forward"]], rel=0.01
    )
    assert head.index("reason") <= 120


def test_a_kernel_that_fails_beside_the_others_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, calls = scan_kernels.naju_scan, []

    def short_of_memory(*, backend: str, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        if backend == "associative":
            calls.append(backend)
            if len(calls) > 2 * len(WAYS):  # after every pass was tried
                raise torch.OutOfMemoryError("tried to allocate")
        return honest(**inputs, backend=backend)

    monkeypatch.setattr(scan_kernels, "naju_scan", short_of_memory)
    names = ["associative", "chunked"]
    found = kernel_rows(names, SHAPE, torch.float32, rounds=2, device="cpu", copied_bytes=1 << 16)
    assert [row.get("reason") for row in found] == [*["out of memory"] * 3, *[None] * 3]


def test_overwrites_are_seldom() -> None:
    f_logit = scan_inputs(1, 1000, 8, 4, overwrite_logit=-20.0)["f_logit"]
    assert 0.03 < float((f_logit == -20).float().mean()) < 0.07
    assert not (scan_inputs(1, 1000, 8, 4)["f_logit"] < -10).any()


def bench(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    sizes: dict[str, Any] = {"lengths": (40,), "d_inner": 8, "d_state": 4, "device": "cpu", "out": folder}
    run_errors_bench(ErrorsBench(**{**sizes, **changes}))
    return rows(folder, "errors")


def test_errors_name_every_tensor_and_are_those_of_the_dtype(tmp_path: Path) -> None:
    written = bench(tmp_path, backends=("chunked",), dtypes=("float32", "bfloat16"))
    assert len(written) == len(GATES) * 2
    for row in written:
        assert row["nan"] == 0
        assert row["relative_error"].keys() == TENSORS
        assert all(
            0 < error < (1e-5 if row["dtype"] == "float32" else 1e-2) for error in row["relative_error"].values()
        )


def test_a_wrong_backend_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = errors.naju_scan

    def wrong(*, backend: str, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        y, state = honest(**inputs, backend="chunked")
        return (1.1 * y, state * torch.nan) if backend == "associative" else (y, state)

    monkeypatch.setattr(errors, "naju_scan", wrong)
    written = {row["backend"]: row for row in bench(tmp_path, backends=("associative", "chunked"), dtypes=("float32",))}
    assert written["associative"]["relative_error"]["y"] == pytest.approx(0.1, rel=1e-4)
    assert written["associative"]["nan"] >= 8 * 4
    assert written["associative"]["relative_error"]["state"] is None
    assert written["chunked"]["relative_error"]["y"] < 1e-6
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[:2] == ["float32", "associative"]]
    assert line.split()[2:4] == ["0.1", "-"]


def test_a_backend_that_refuses_is_a_row(tmp_path: Path) -> None:
    written = bench(tmp_path, backends=("triton_chunked",), dtypes=("float32",))
    assert len(written) == len(GATES)
    assert all("cannot run" in row["reason"] for row in written)


def test_relative_rms() -> None:
    assert relative_rms(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.2)
