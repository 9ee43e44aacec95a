"""Contenders share one loop; whatever fails in it becomes a result."""

import pytest
import torch
from torch import Tensor, nn

from naju.bench.compare import (
    Failed,
    Measured,
    attempt,
    build_all,
    compare,
    given_or_default,
    print_comparison,
    result_rows,
)
from naju.bench.measure import Run, time_in_turn
from naju.bench.peers import PeerMissingError


def raising(error: Exception) -> Run:
    def run() -> object:
        raise error

    return run


def test_a_failure_is_one_line() -> None:
    assert attempt(lambda: 3) == 3
    assert attempt(raising(torch.OutOfMemoryError("tried to allocate"))) == Failed("out of memory")
    assert attempt(raising(ValueError("first\nsecond"))) == Failed("ValueError: first")
    assert attempt(raising(PeerMissingError("the package x is not installed"))) == Failed(
        "the package x is not installed"
    )


def test_modules_are_drawn_from_the_same_seed() -> None:
    a, b = build_all(["a", "b"], lambda name: nn.Linear(2, 2)).values()
    assert isinstance(a, nn.Linear)
    assert isinstance(b, nn.Linear)
    assert torch.equal(a.weight, b.weight)


def test_the_rest_is_measured_when_one_fails(capsys: pytest.CaptureFixture[str]) -> None:
    width = {"peer": 4, "wrong": 5, "other": 4}
    modules = {name: nn.Linear(size, size) for name, size in width.items()} | {"absent": Failed("not here")}
    u = torch.randn(2, 4)
    results = compare(modules, lambda module: lambda: module(u), ["eager"], rounds=2, device="cpu")
    assert isinstance(results["other", "eager"], Measured)
    rows = {
        row["model"]: row for row in result_rows(results, lambda name: {"d_state": width.get(name)}, against="peer")
    }
    assert rows["peer"]["time_over_peer"] == 1
    assert rows["other"]["median_s"] / rows["peer"]["median_s"] == pytest.approx(rows["other"]["time_over_peer"])
    assert rows["wrong"]["reason"].startswith("RuntimeError: ")
    assert rows["absent"]["reason"] == "not here"
    assert "median_s" not in rows["wrong"]
    print_comparison(list(rows.values()), "peer", "median_s", "ms", 1e3)
    _, head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:7] == ["model", "N", "eager", "ms", "eager", "/", "peer"]
    assert lines[-1].split() == ["absent", "-", "-", "-", "-", "not", "here"]


class FitsAlone(nn.Module):
    """Runs while it is tried, and runs out of memory once it is timed beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, u: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            raise torch.OutOfMemoryError("tried to allocate")
        return u


def test_what_fails_beside_the_others_is_a_result_too() -> None:
    modules = {"large": FitsAlone(), "peer": nn.Identity()}
    results = compare(modules, lambda module: lambda: module(torch.ones(1)), ["eager"], rounds=3, device="cpu")
    assert results["large", "eager"] == Failed("out of memory")
    peer = results["peer", "eager"]
    assert isinstance(peer, Measured)
    assert len(peer.timing.seconds) == 3
    assert modules["large"].calls == 3, "who is out is not run again"


@pytest.mark.parametrize(
    ("modes", "key", "unit", "scale"),
    [(("eager", "graph"), "median_s", "ms", 1e3), (("eager", "compiled"), "tokens_per_s", "tokens/s", 1)],
)
def test_a_table_shows_the_spread_of_every_mode_in_120_columns(
    modes: tuple[str, ...], key: str, unit: str, scale: float, capsys: pytest.CaptureFixture[str]
) -> None:
    timed = {"median_s": 0.04, "spread_s": [0.03, 0.05], "tokens_per_s": 431_000.0, "time_over_mamba2": 1.08}
    timed |= {"d_state": 64, "peak_bytes": 5_590_000_000, "flop_per_s": 2.14e14, "bytes_per_s": 1.1e12}
    print_comparison(
        [{"model": "transformer-flash", "mode": mode, **timed} for mode in modes], "mamba2", key, unit, scale
    )
    note, head, line = capsys.readouterr().out.splitlines()
    assert line.count("±25.0%") == 2
    assert max(map(len, (note, head, line))) <= 120


def test_no_ratio_without_the_peer_and_a_warm_up_of_a_quarter_of_the_rounds() -> None:
    results = compare({"a": nn.Identity()}, lambda module: lambda: module(0), ["eager"], rounds=9, device="cpu")
    (row,) = result_rows(results, lambda name: {}, against="mamba2")
    assert row["time_over_mamba2"] is None
    assert (row["rounds"], row["warm_up"]) == (9, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_graph_without_a_gpu_is_a_reason() -> None:
    results = compare({"a": nn.Identity()}, lambda module: lambda: module(0), ["graph"], rounds=1, device="cpu")
    assert results == {("a", "graph"): Failed("RuntimeError: a CUDA graph needs an NVIDIA GPU")}


def test_short_runs_are_repeated_to_fill_the_time() -> None:
    calls: list[str] = []
    timing = time_in_turn({"a": lambda: calls.append("a")}, rounds=1, at_least=1e-3)["a"]
    assert len(calls) > 12
    assert timing.median < 1e-4


def test_sizes_are_asked_for_where_there_is_no_gpu() -> None:
    assert given_or_default("lengths", None, (1, 2), "cuda") == (1, 2)
    assert given_or_default("lengths", (3,), (1, 2), "cpu") == (3,)
    with pytest.raises(ValueError, match="the device is cpu: give smaller ones by --lengths"):
        given_or_default("lengths", None, (1, 2), "cpu")
    with pytest.raises(ValueError, match="lengths must hold at least one number, but is empty"):
        given_or_default("lengths", (), (1, 2), "cpu")
