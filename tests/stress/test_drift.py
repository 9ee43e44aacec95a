"""How far a stream drifts from float64: the short form of `naju bench stress`, on every backend that runs here."""

import json

import pytest
import torch

from naju.bench import stress
from naju.bench.stress import DTYPES, GATES, StressBench, run_stress_bench, stress_rows
from naju.scan import backends, naju_step
from numerics import BACKEND_NAMES, TOLERANCE, relative_rms

FORGETFUL = sorted(set(GATES) - {"near 1"})
LENGTHS = (500, 2000, 8000)
GPU_BACKENDS = [name for name, missing in backends().items() if missing is None and name not in BACKEND_NAMES]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def rows(request):
    names = {"cpu": tuple(name for name in BACKEND_NAMES if backends()[name] is None), "cuda": tuple(GPU_BACKENDS)}
    truth = "reference" if request.param == "cpu" else "chunked"
    bench = StressBench(lengths=LENGTHS, piece=500, backends=names[request.param], truth=truth, device=request.param)
    return stress_rows(bench)


def measured(rows, gates):
    return [row for row in rows if row.get("gates") in gates]


def state_dtype(row):
    return torch.float64 if row["dtype"] == "float64" else torch.float32


def state_bound(row):
    """Of a state that forgets. Only triton_chunked rounds what it multiplies to the precision of its inputs."""
    dtype = getattr(torch, row["dtype"]) if row["backend"] == "triton_chunked" else state_dtype(row)
    return TOLERANCE[dtype, "forward"]


def test_every_backend_and_dtype_is_measured_or_says_why(rows):
    for dtype in DTYPES:
        own = [row for row in rows if row["dtype"] == dtype]
        assert {row["length"] for row in own} == set(LENGTHS)
        assert all("float64" in row["reason"] for row in own if "reason" in row)
    assert all("reason" not in row for row in rows if row["dtype"] != "float64")


def test_nothing_is_infinite_or_nan(rows):
    found = measured(rows, GATES)
    assert found
    assert all(row["not_finite"] == 0 and row["y"] is not None and row["state"] is not None for row in found)


def test_what_forgets_stays_within_the_tolerances_at_any_length(rows):
    for row in measured(rows, FORGETFUL):
        assert row["y"] <= TOLERANCE[getattr(torch, row["dtype"]), "forward"], row
        assert row["state"] <= state_bound(row), row


def test_what_keeps_everything_drifts_by_less_than_a_tenth_of_a_rounding_a_token(rows):
    for row in measured(rows, ["near 1"]):
        drift = 0.1 * torch.finfo(state_dtype(row)).eps / 2 * row["length"]
        rounds = row["backend"] == "triton_chunked" and row["dtype"] != "float32"
        assert row["state"] <= drift + (state_bound(row) if rounds else 0.0), row
        assert row["y"] <= TOLERANCE[getattr(torch, row["dtype"]), "forward"] + drift, row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_that_keep_everything_drift_as_roundings_do_that_lean_to_no_side(dtype):
    """A gate rounded near 1, or a product rounded before the write is added, drifts in proportion to the length."""
    bench, length = StressBench(lengths=(8000,), piece=500, device="cpu"), 8000
    near_one = list(GATES).index("near 1")
    state, truth = torch.zeros(1, 8, 8), torch.zeros(1, 8, 8, dtype=torch.float64)
    for _, inputs in stress.pieces(bench, length):
        rounded = {name: tensor[near_one].to(dtype) for name, tensor in inputs.items()}
        for t in range(bench.piece):
            token = {name: tensor[t : t + 1] for name, tensor in rounded.items()}
            _, state = naju_step(state, **token)
            _, truth = naju_step(truth, **{name: tensor.double() for name, tensor in token.items()})
    assert relative_rms(state, truth) <= torch.finfo(torch.float32).eps / 2 * length**0.5


def test_a_stream_is_the_sequence_in_one_piece():
    """What the drawn pieces are does not depend on who reads them, and carried states are what the pieces lack."""
    bench = StressBench(lengths=(60,), piece=20, device="cpu")
    inputs = [inputs for _, inputs in stress.pieces(bench, 60)]
    whole = {name: torch.cat([piece[name] for piece in inputs], dim=1) for name in inputs[0]}
    streamed, at_once = stress.Contender("reference"), stress.Contender("reference")
    y = torch.cat([streamed.read(piece) for piece in inputs], dim=1)
    assert torch.allclose(y, at_once.read(whole), rtol=1e-12, atol=1e-14)
    assert torch.allclose(streamed.state, at_once.state, rtol=1e-12, atol=1e-14)


def test_a_backend_that_leaks_shows(monkeypatch):
    """One that loses a millionth of the state between pieces is found out where the state lasts."""
    honest = stress.naju_scan

    def leaking(*, backend, **inputs):
        y, state = honest(**inputs, backend="chunked")
        return y, state * (1 - 1e-6) if backend == "associative" else state

    monkeypatch.setattr(stress, "naju_scan", leaking)
    bench = StressBench(lengths=(100, 1000), piece=10, backends=("associative", "chunked"), dtypes=("float64",))
    found = {(row["backend"], row["gates"], row["length"]): row["state"] for row in stress_rows(bench)}
    assert found["chunked", "near 1", 1000] < 1e-12
    assert found["associative", "near 1", 100] > 1e-6
    assert found["associative", "near 1", 1000] > 3 * found["associative", "near 1", 100]


def test_infinite_outputs_are_counted(monkeypatch):
    honest = stress.naju_scan

    def overflowing(**inputs):
        y, state = honest(**inputs)
        return (y * torch.inf, state) if inputs["h"].dtype == torch.float32 else (y, state)

    monkeypatch.setattr(stress, "naju_scan", overflowing)
    bench = StressBench(lengths=(10,), piece=10, d_inner=4, backends=("chunked",), dtypes=("float32",))
    found = stress_rows(bench)
    assert [row["not_finite"] for row in found] == [10 * 4] * len(GATES)
    assert all(row["y"] is None for row in found)


def test_the_command_writes_rows_and_a_picture(tmp_path, capsys):
    picture = tmp_path / "drift.png"
    sizes = {"lengths": (20, 40), "piece": 20, "dtypes": ("float64", "float32"), "backends": ("chunked", "reference")}
    run_stress_bench(StressBench(**sizes, device="cpu", out=tmp_path, picture=picture))
    written = [json.loads(line) for line in (tmp_path / "stress.jsonl").read_text().splitlines()]
    assert {row["length"] for row in written} == {20, 40}
    assert {"command", "machine", "when"} <= set(written[0])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "after 40 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("changes", [{"lengths": (30,)}, {"lengths": ()}, {"lengths": (0,)}, {"piece": 0}])
def test_lengths_that_cannot_be_are_refused(changes):
    with pytest.raises(ValueError, match="lengths must"):
        stress_rows(StressBench(**{"lengths": (20,), "piece": 20, **changes}))
