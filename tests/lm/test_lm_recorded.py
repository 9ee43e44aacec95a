"""Updates recorded as a CUDA graph: what is refused, where they read, and on a GPU that they are the eager ones."""

from dataclasses import replace

import pytest
import torch
from tiny_language import PLACE, prepare, run

from naju.lm.distributed import Place
from naju.lm.recorded import records
from naju.lm.train import check_run, train_language_model
from naju.training import Reporter
from naju.training.metrics import read_metrics

WAYS = {
    "one batch": {},
    "micro-batches": {"execution": {"micro_tokens": 32}},
    "lanes": {"carry_state": True},
    "lanes in micro-batches": {"carry_state": True, "execution": {"micro_tokens": 32}},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("data"))


def losses(settings, folder, place, notes):
    train_language_model(settings, folder, place, Reporter(note=notes.append))
    return [row["loss"] for row in read_metrics(folder)]


def with_graph(settings, asked):
    return replace(settings, execution=replace(settings.execution, cuda_graph=asked))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_batches_are_copied_to_where_the_update_reads(data, tmp_path, way, monkeypatch):
    """On a CPU nothing is recorded, but everything around it is the same."""
    settings, notes = run(data, **way), []
    want = losses(settings, tmp_path / "plain", PLACE, notes)
    monkeypatch.setattr("naju.lm.train.records", lambda run, place: True)
    assert losses(settings, tmp_path / "recorded", PLACE, notes) == want
    assert notes == []


@pytest.mark.parametrize("asked", ["auto", "off", "on"])
def test_updates_are_recorded_by_default_where_they_can_be(data, asked):
    on_a_gpu, resets = with_graph(run(data), asked), with_graph(run(data, documents="reset"), asked)
    gpu = Place(torch.device("cuda"))
    assert records(on_a_gpu, gpu) is (asked != "off")
    if asked == "on":
        with pytest.raises(ValueError, match="cuda_graph must be off but for one process on a GPU, but the device is"):
            check_run(on_a_gpu, PLACE)
        with pytest.raises(ValueError, match="cuda_graph must be off with documents 'reset'"):
            records(resets, gpu)
    else:
        check_run(on_a_gpu, PLACE)
        assert not records(resets, gpu)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("mixer", ["naju", "mamba2", "transformer"])
def test_replays_are_the_updates(data, tmp_path, mixer, way, compiled):
    if mixer == "transformer" and "carry_state" in way:
        pytest.skip("its state grows with the text")
    options = ("n_heads=2",) if mixer == "transformer" else ("d_state=16",)
    way = {**way, "execution": {**way.get("execution", {}), "device": "cuda", "compile": compiled}}
    settings, notes = run(data, mixer=mixer, options=options, d_model=32, **way), []
    place = Place(torch.device("cuda", 0))
    want = losses(with_graph(settings, "off"), tmp_path / "plain", place, notes)
    got = losses(settings, tmp_path / "recorded", place, notes)
    assert notes == []
    assert got == pytest.approx(want, rel=1e-2)
