"""The benchmarks run at tiny sizes and leave rows that say what was measured, where and by which command."""

import re
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from written_rows import rows

from naju import cli
from naju.bench.measure import Timing, peak_bytes, time_in_turn
from naju.bench.mixers import MixersBench, run_mixers_bench
from naju.bench.model import ModelBench, run_model_bench
from naju.bench.rows import save_rows
from naju.bench.scan import ScanBench, run_scan_bench
from naju.lab.throughput import Throughput
from naju.mixers import MIXERS, build_mixer


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


@pytest.mark.parametrize("command", [*get_args(cli.Benches), Throughput])
def test_no_path_of_ones_own_lands_in_a_row(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = command if isinstance(command, type) else get_args(command)[0]
    paths = [f"--{name}" for name, hint in get_type_hints(kind).items() if Path in (hint, *get_args(hint))]
    assert paths
    words = [word for path in paths for word in (path, "my/own", "--rounds", "2", f"{path}=my/own", "--quick")]
    monkeypatch.setattr(sys, "argv", ["/my/own/naju", "bench", *words])
    save_rows("any", [{}], tmp_path)
    (row,) = rows(tmp_path, "any")
    assert row["command"] == " ".join(["naju bench", *["--rounds 2 --quick"] * len(paths)])


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


def test_every_mixer_is_timed_at_every_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_mixers_bench(MixersBench(lengths=(16, 8), d_model=32, rounds=1, device="cpu", out=tmp_path))
    written = {(row["mixer"], row["length"]): row for row in rows(tmp_path, "mixers")}
    assert set(written) == {(name, length) for name in MIXERS for length in (8, 16)}
    for (name, length), row in written.items():
        assert row["microseconds_per_token"] == pytest.approx(1e6 * row["median_s"] / length)
        assert row["state_size"] == build_mixer(name, 32).state_size
    heading = capsys.readouterr().out.splitlines()[1]
    assert re.split("  +", heading)[:4] == ["mixer", "us at 8", "us at 16", "growth"]
    run_mixers_bench(MixersBench(mixers=("transformer",), lengths=(4097,), d_model=32, rounds=1, out=tmp_path))
    with pytest.raises(ValueError, match="but there is \\['mambo'\\]"):
        run_mixers_bench(MixersBench(mixers=("naju", "mambo"), out=tmp_path))


def test_contenders_take_turns() -> None:
    calls: list[str] = []
    timings = time_in_turn({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=2)
    assert calls == ["a", "a", "b", "b"] * 2
    assert len(timings["a"].seconds) == 2


def test_a_warm_up_is_not_timed() -> None:
    calls: list[str] = []
    timings = time_in_turn({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=1, warm_up=2)
    assert calls == ["a", "b"] * 2 + ["a", "a", "b", "b"]
    assert len(timings["a"].seconds) == 1


def test_spread_of_one_round_is_that_round() -> None:
    assert Timing((2.0,)).spread == (2.0, 2.0)


def test_peak_memory_sees_an_allocation() -> None:
    megabyte = 1 << 20
    peak = peak_bytes(lambda: torch.ones(16 * megabyte))
    if peak is None:
        pytest.skip("this system does not tell a process's peak memory")
    assert peak >= 48 * megabyte
