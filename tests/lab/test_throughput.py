"""`naju reproduce throughput`: what it measures, which stored rows stand beside the paper's, and its picture."""

import json
from pathlib import Path
from typing import Any

import pytest

from naju.bench.forward import ForwardBench
from naju.lab import throughput
from naju.lab.throughput import Throughput, run_throughput, speed_tables

DAY = "2026-11-16"


def forward_row(model: str, length: int, seconds: float | None, **changes: Any) -> dict[str, Any]:
    shape = {"bench": "forward", "model": model, "mode": "graph", "batch": 8, "n_layers": 4, "d_model": 256}
    about = {"dtype": "bfloat16", "d_state": 64, "when": f"{DAY}T08:00", "machine": {"accelerator": "a GPU"}}
    return {**shape, **about, "length": length, "median_s": seconds, **changes}


def stored(folder: Path, *rows: dict[str, Any]) -> Path:
    (folder / "forward.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def cell(folder: Path, label: str, length: int) -> throughput.Pair:
    table = speed_tables(folder)[0]
    row = next(row for row in table.rows if row.label == label)
    return row.cells[table.lengths.index(length)]


def test_another_width_is_compared_with_the_rival_of_its_own_alone(tmp_path: Path) -> None:
    rows = [forward_row(model, 2048, 0.004, mode="eager", d_model=128) for model in ("naju", "mamba2")]
    folder = stored(tmp_path, *rows, forward_row("mamba2", 2048, 0.001, mode="eager"))
    pair = cell(folder, "naju d128 eager", 2048)
    assert (pair.ours, pair.paper) == (4, 4.7)
    assert (pair.our_ratio, pair.paper_ratio) == (1, None), "the paper has no Mamba-2 of this width"


def test_what_another_mode_of_the_compiler_made_stands_nowhere(tmp_path: Path) -> None:
    compiled = {"length": 512, "mode": "compiled"}
    folder = stored(
        tmp_path,
        forward_row("naju", seconds=0.001, **compiled, compile_mode="max-autotune"),
        forward_row("naju", seconds=0.002, **compiled, compile_mode="default"),
    )
    assert cell(folder, "naju d256 compiled", 512).ours == 1


def test_a_compiled_row_has_to_name_the_mode_of_the_compiler(tmp_path: Path) -> None:
    folder = stored(tmp_path, forward_row("naju", 512, 0.001), forward_row("naju", 512, 0.002, mode="compiled"))
    with pytest.raises(ValueError, match=r"line 2 of .*forward\.jsonl is no row of `naju bench`: .*compile_mode"):
        speed_tables(folder)


def test_to_show_is_not_to_measure() -> None:
    with pytest.raises(ValueError, match="show measures nothing"):
        run_throughput(Throughput(quick=True, show=True))


def test_the_low_ranks_are_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(throughput, "run_forward_bench", asked.append)
    monkeypatch.setattr(throughput, "run_training_bench", asked.append)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    run_throughput(Throughput(rows=tmp_path))
    forward, narrow, training = asked
    assert {"naju-rank64", "naju-rank32"} <= set(forward.models) & set(training.models)
    assert set(ForwardBench().models) <= set(forward.models)
    assert narrow.d_model == 128


def picture_of(folder: Path) -> tuple[list[dict[str, Any]], str, Path]:
    """What is drawn: rows, title and file."""
    drawn: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput, "draw_times", lambda *given: drawn.append(given))
        run_throughput(Throughput(show=True, rows=folder, plot=folder / "forward.png"))
    (given,) = drawn
    return given


def test_the_picture_is_of_the_newest_rows_of_the_usual_sizes(tmp_path: Path) -> None:
    new, long, peer = (
        forward_row("naju", 512, 0.002),
        forward_row("naju", 1024, 0.003),
        forward_row("transformer-math", 512, 0.009, d_state=None),
    )
    others = {"batch": 1, "n_layers": 2, "d_model": 128, "dtype": "float32", "d_state": 16, "mode": "eager"}
    unusual = [forward_row("naju", 512, 0.1, **{name: value}) for name, value in others.items()]
    ran_out = forward_row("transformer-math", 1024, None, d_state=None, reason="out of memory")
    folder = stored(tmp_path, forward_row("naju", 512, 0.005), new, long, peer, *unusual, ran_out)
    rows, title, path = picture_of(folder)
    assert rows == [new, long, peer]
    assert title == f"Forward on a GPU, {DAY}: batch 8, n_layers 4, dtype bfloat16, d_model 256"
    assert path == tmp_path / "forward.png"


def test_the_picture_is_of_the_day_and_machine_that_timed_most_models(tmp_path: Path) -> None:
    days = [("2026-11-16", "a GPU"), ("2026-11-17", "a GPU"), ("2026-11-17", "another"), ("2026-11-18", "a GPU")]
    models = [("naju", "mamba2", "mamba"), ("naju", "mamba2", "mamba-16"), ("mamba",), ("naju", "mamba2")]
    by_day = [
        [forward_row(model, 512, 0.001, when=day, machine={"accelerator": gpu}) for model in models_then]
        for (day, gpu), models_then in zip(days, models, strict=True)
    ]
    rows, title, _ = picture_of(stored(tmp_path, *(row for rows in by_day for row in rows)))
    assert rows == by_day[1], "of two such days the later"
    assert title.startswith("Forward on a GPU, 2026-11-17: ")


def test_a_picture_of_nothing_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="nothing was timed, so there is no picture to draw into"):
        run_throughput(Throughput(show=True, rows=tmp_path, plot=tmp_path / "forward.png"))
