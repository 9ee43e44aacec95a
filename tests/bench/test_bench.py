"""The benchmarks run at tiny sizes and leave rows that say what was measured, where and by which command."""

from pathlib import Path

import pytest
import torch
from written_rows import rows

from naju.bench.measure import Timing, peak_bytes, time_in_turn
from naju.bench.model import ModelBench, run_model_bench
from naju.bench.scan import ScanBench, run_scan_bench


def test_scan_bench_writes_rows(tmp_path: Path) -> None:
    bench = ScanBench(batch=1, length=40, d_inner=8, d_state=4, rounds=1, lengths=(16, 32), device="cpu", out=tmp_path)
    run_scan_bench(bench)
    run_scan_bench(bench)
    written = rows(tmp_path, "scan")
    assert len(written) % 2 == 0, "a second run appends"
    against = {row["backend"]: row for row in written if row["bench"] == "scan forward+backward"}
    assert against["reference"]["times_faster_than_reference"] == 1
    assert {"chunked", "reference"} <= set(against)
    assert all({"machine", "command", "when", "median_s", "spread_s"} <= set(row) for row in written)


def test_model_bench_writes_rows(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    bench = ModelBench(
        batch=1, length=16, d_model=64, n_layers=1, d_state=8, vocab_size=32, rounds=1, lengths=(16,), contexts=(4, 8)
    )
    run_model_bench(ModelBench(**{**vars(bench), "out": tmp_path}))
    kinds = {str(row["bench"]) for row in rows(tmp_path, "model")}
    assert kinds == {"model training step", "model forward by length", "model decoding step"}
    peers = [row["model"] for row in rows(tmp_path, "model") if row["bench"] == "model training step"]
    assert len(peers) == 2


def test_contenders_take_turns() -> None:
    calls: list[str] = []
    timings = time_in_turn({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=2)
    assert calls == ["a", "a", "b", "b"] * 2
    assert len(timings["a"].seconds) == 2


def test_spread_of_one_round_is_that_round() -> None:
    assert Timing((2.0,)).spread == (2.0, 2.0)


def test_peak_memory_sees_an_allocation() -> None:
    megabyte = 1 << 20
    peak = peak_bytes(lambda: torch.ones(16 * megabyte))
    if peak is None:
        pytest.skip("this system does not tell a process's peak memory")
    assert peak >= 48 * megabyte
