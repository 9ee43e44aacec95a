"""`forward`, `training`, `profile` and `decode` at tiny sizes on a CPU: rows, refusals, and what they run."""

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from written_rows import rows

from naju.bench import decode
from naju.bench.decode import TOKENS, DecodeBench, Decoder, run_decode_bench
from naju.bench.forward import ForwardBench, run_forward_bench
from naju.bench.forward_plot import draw_times
from naju.bench.peers import check_names
from naju.bench.profile import ProfileBench, run_profile_bench
from naju.bench.shells import ResidualStack
from naju.bench.training import TrainingBench, run_training_bench, training_step

ALWAYS = {"bench", "model", "mode", "d_state", "parameters", "batch", "n_layers", "d_model", "dtype", "command"}
TIMED = ALWAYS | {"median_s", "spread_s", "rounds", "time_over_mamba2", "first_call_s", "peak_bytes", "machine"}
SMALL = {"n_layers": 1, "d_model": 16, "d_state": 4, "dtype": "float32", "modes": ("eager",), "rounds": 1}


class Mamba2(nn.Module):
    """Stands for mamba_ssm's: a step that writes its cache."""

    def __init__(self, d_model: int, d_state: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, u: Tensor) -> Tensor:
        return u * self.weight

    def allocate_inference_cache(self, batch: int, max_length: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(batch, 1), torch.zeros(batch, 1)

    def step(self, u: Tensor, conv_state: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert u.dim() == 3
        return u * self.weight, conv_state, state.add_(1)


@pytest.fixture
def mamba2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mamba_ssm", SimpleNamespace(Mamba2=Mamba2))


@pytest.fixture
def no_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)


@pytest.mark.usefixtures("mamba2", "no_fla")
def test_forward_writes_a_row_for_each_model_length_and_mode(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    models, plot = ("naju", "mamba2", "gla", "transformer-math"), tmp_path / "pictures" / "forward.png"
    run_forward_bench(
        ForwardBench(**SMALL, models=models, lengths=(8, 16), batch=2, device="cpu", plot=plot, out=tmp_path)
    )
    written = {(row["model"], row["length"]): row for row in rows(tmp_path, "forward")}
    assert set(written) == {(model, length) for model in models for length in (8, 16)}
    assert set(written["naju", 16]) >= TIMED
    assert written["naju", 16]["d_state"] == 4
    assert written["mamba2", 8]["time_over_mamba2"] == 1
    assert written["naju", 8]["time_over_mamba2"] == pytest.approx(
        written["naju", 8]["median_s"] / written["mamba2", 8]["median_s"]
    )
    assert set(written["gla", 8]) >= ALWAYS
    assert written["gla", 8]["reason"] == "the package fla is not installed"
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("mamba2", "no_fla")
def test_a_profile_has_a_row_for_each_operation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {name: SMALL[name] for name in ("d_model", "d_state", "dtype")}
    shared = {**sizes, "lengths": (8,), "batch": 2, "n_layers": 3, "rounds": 2, "most": 4, "device": "cpu"}
    run_profile_bench(ProfileBench(**shared, models=("mamba2", "gla"), out=tmp_path))
    run_profile_bench(ProfileBench(**shared, models=("mamba2",), backward=True, out=tmp_path))
    written = rows(tmp_path, "profile")
    (missing,) = (row for row in written if row["model"] == "gla")
    assert missing["reason"] == "the package fla is not installed"
    forward, both = (
        {row["kernel"]: row for row in written if row["passes"] == passes and "kernel" in row}
        for passes in ("forward", "forward and backward")
    )
    assert forward["aten::rms_norm"]["calls"] == 3  # one a layer
    assert "MulBackward0" in both
    assert "MulBackward0" not in forward
    told = capsys.readouterr().out
    for found in (forward, both):
        total = sum(row["mean_s"] for row in found.values())
        assert all(row["share"] == pytest.approx(row["mean_s"] / total) for row in found.values())
        assert f"all {len(found)}" in told


@pytest.mark.parametrize("missing", ["models", "lengths"])
def test_a_profile_of_nothing_is_refused(missing: str) -> None:
    with pytest.raises(ValueError, match=f"{missing} must hold at least one"):
        run_profile_bench(ProfileBench(**{"lengths": (8,), "device": "cpu", missing: ()}))


def test_a_picture_of_nothing_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="nothing was timed"):
        draw_times([{"model": "gla", "mode": "eager", "length": 8, "reason": "not here"}], "", tmp_path / "empty.png")


def test_a_picture_names_each_models_numbers_and_shares_colours_among_variants(tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures.Figure, "savefig", lambda figure, *given, **options: drawn.append(figure))
        sizes = {"naju": 64, "naju-rank64": 64, "hgrn": 1, "transformer-math": None}
        timed = [
            {
                "model": model,
                "mode": "graph",
                "batch": 2,
                "length": length,
                "d_state": d_state,
                "median_s": 1e-6 * length,
            }
            for model, d_state in sizes.items()
            for length in (32, 16)
        ]
        draw_times(timed, "Forward", tmp_path / "forward.png")
    (figure,) = drawn
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert set(lines) == {"naju (N 64)", "naju-rank64 (N 64)", "hgrn (N 1)", "transformer-math"}
    assert {text.get_text() for text in figure.legends[0].get_texts()} == set(lines)
    ours, low, other = (lines[label] for label in ("naju (N 64)", "naju-rank64 (N 64)", "hgrn (N 1)"))
    assert ours.get_color() == low.get_color() != other.get_color()
    assert list(ours.get_xdata()) == [16, 32]
    assert list(ours.get_ydata()) == pytest.approx([500, 500]), "nanoseconds a token"


@pytest.mark.usefixtures("mamba2")
def test_training_writes_tokens_per_second(tmp_path: Path) -> None:
    bench = TrainingBench(
        **SMALL, models=("naju", "mamba2"), lengths=(8, 16), tokens=32, vocab_size=11, device="cpu", out=tmp_path
    )
    run_training_bench(bench)
    written = rows(tmp_path, "training")
    assert [(row["batch"], row["length"]) for row in written] == [(4, 8), (4, 8), (2, 16), (2, 16)]
    for row in written:
        assert set(row) >= TIMED
        assert (row["rounds"], row["warm_up"], row["micro_steps"]) == (1, 0, 4)
        assert row["tokens_per_s"] == pytest.approx(4 * 32 / row["median_s"])


@pytest.mark.usefixtures("mamba2", "no_fla")
@pytest.mark.parametrize("name", ["forward", "training"])
def test_a_compiled_row_names_the_mode_of_the_compiler(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda module, mode: asked.append(mode) or module)
    small: dict[str, Any] = {**SMALL, "modes": ("eager", "compiled"), "models": ("mamba2", "gla"), "lengths": (8,)}
    for options in ({}, {"compile_mode": "default"}):
        if name == "forward":
            run_forward_bench(ForwardBench(**small, **options, batch=1, device="cpu", out=tmp_path))
        else:
            run_training_bench(TrainingBench(**small, **options, tokens=8, vocab_size=11, device="cpu", out=tmp_path))
    told = [row.get("compile_mode") for row in rows(tmp_path, name)]
    assert told == [None, None, "max-autotune", "max-autotune", None, None, "default", "default"]
    assert asked == ["max-autotune", "default"]


def test_every_peer_that_a_bench_measures_unasked_is_one() -> None:
    check_names({*ForwardBench().models, *TrainingBench().models})
    paper = {"naju", "naju-rank64", "naju-rank32", "mamba2", "mamba", "mamba-16", "gla", "hgrn", "retnet", "mlstm"}
    assert (
        set(ForwardBench().models) == set(TrainingBench().models) == paper | {"transformer-math", "transformer-flash"}
    )


def test_training_refuses_lengths_that_do_not_divide_the_tokens(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokens must be a multiple of every length, but is 32 with a length of 5"):
        run_training_bench(TrainingBench(**SMALL, lengths=(5,), tokens=32, device="cpu", out=tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_training_step_learns(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Embedding(7, 16), nn.Linear(16, 7))
    step = training_step(model, model.parameters(), torch.arange(9).remainder(7).expand(2, 9), dtype)
    losses = [float(step()) for _ in range(60)]  # type: ignore[arg-type]
    assert losses[-1] < losses[0] - 0.01
    assert all(p.dtype == torch.float32 and p.grad is None for p in model.parameters())


def test_micro_steps_add_up_to_one_update() -> None:
    model, calls = nn.Sequential(nn.Embedding(7, 16), nn.Linear(16, 7)), []
    apart = copy.deepcopy(model)
    tokens = torch.arange(9).remainder(7).expand(2, 9)
    training_step(model, model.parameters(), tokens, torch.float32)()
    training_step(lambda given: calls.append(given) or apart(given), apart.parameters(), tokens, torch.float32, 3)()
    assert len(calls) == 3
    torch.testing.assert_close(list(apart.parameters()), list(model.parameters()))  # AdamW minds no factor of 3


def test_the_steps_of_a_comparison_are_the_papers_unasked() -> None:
    assert (TrainingBench().rounds, TrainingBench().micro_steps, ForwardBench().rounds) == (200, 4, 20)


@pytest.mark.usefixtures("mamba2", "no_fla")
def test_decode_times_naju_after_each_context_and_a_peer_once(tmp_path: Path) -> None:
    bench = DecodeBench(
        **SMALL, models=("naju", "mamba2", "gla"), batches=(1, 3), contexts=(4, 6), device="cpu", out=tmp_path
    )
    run_decode_bench(bench)
    written = {(row["model"], row["batch"]): row for row in rows(tmp_path, "decode")}
    names = {"naju after 4", "naju after 6", "mamba2", "gla"}
    assert set(written) == {(name, batch) for name in names for batch in (1, 3)}
    assert [written[name, 3].get("context") for name in ("naju after 6", "mamba2")] == [6, None]
    for row in written.values():
        assert set(row) >= (ALWAYS if row["model"] == "gla" else TIMED)
        assert "reason" in row or row["microseconds_per_step"] == pytest.approx(row["median_s"] / TOKENS * 1e6)
        assert "reason" in row or row["bytes_per_s"] == pytest.approx(row["least_bytes"] / row["median_s"])
    one, three = (written["naju after 4", batch] for batch in (1, 3))
    assert three["flop"] == 3 * one["flop"] == 3 * written["naju after 6", 1]["flop"]
    weights = TOKENS * 4 * one["parameters"]
    assert three["least_bytes"] - weights == 3 * (one["least_bytes"] - weights), "weights are read once for all"


def test_decode_compares_with_one_time_only(tmp_path: Path) -> None:
    bench = DecodeBench(**SMALL, models=("naju",), against="naju", contexts=(4, 6), device="cpu", out=tmp_path)
    with pytest.raises(ValueError, match="'naju' is timed after every context"):
        run_decode_bench(bench)


def test_decoding_goes_on_from_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "PIECE", 4)
    stack = ResidualStack("naju", n_layers=2, d_model=16, d_state=4).double()
    first = torch.randn(16, dtype=torch.float64).expand(2, 16)
    run = decode._run(Decoder(stack, context=10), first)
    pieces = list(decode._pieces(stack, 10))
    assert [piece.shape[1] for piece in pieces] == [4, 4, 2]
    sequence = torch.cat(pieces, dim=1).expand(2, 10, 16)
    for _ in range(2):  # a run starts with the same input, and with the memory that the one before it left
        u = first
        for _ in range(TOKENS):
            sequence = torch.cat([sequence, u.unsqueeze(1)], dim=1)
            u = stack(sequence)[:, -1]
        torch.testing.assert_close(run(), u)


@pytest.mark.usefixtures("mamba2")
def test_a_peer_advances_its_own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = torch.zeros(2, 1), torch.zeros(2, 1)
    monkeypatch.setattr(Mamba2, "allocate_inference_cache", lambda mixer, batch, max_length: cache)
    stack = ResidualStack("mamba2", n_layers=1, d_model=16, d_state=4)
    decode._run(Decoder(stack, context=None), torch.randn(2, 16))()
    assert cache[1].eq(TOKENS).all()
