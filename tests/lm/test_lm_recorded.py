"""Updates recorded as a CUDA graph: what is refused, where they read, and on a GPU that they are the eager ones."""

from dataclasses import replace

import pytest
import torch
from tiny_language import PLACE, prepare, run

from naju.lm.distributed import Place
from naju.lm.recorded import check_recordable
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


def recorded(settings):
    return replace(settings, execution=replace(settings.execution, cuda_graph=True))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_batches_are_copied_to_where_the_update_reads(data, tmp_path, way):
    """On a CPU nothing is recorded, but everything around it is the same."""
    settings, notes = run(data, **way), []
    want = losses(settings, tmp_path / "plain", PLACE, notes)
    assert losses(recorded(settings), tmp_path / "recorded", PLACE, notes) == want
    assert notes == []


def test_a_cpu_and_documents_that_reset_are_refused(data):
    with pytest.raises(ValueError, match="cuda_graph must be off but for one process on a GPU, but the device is cpu"):
        check_run(recorded(run(data)), PLACE)
    with pytest.raises(ValueError, match="cuda_graph must be off with documents 'reset'"):
        check_recordable(recorded(run(data, documents="reset")), Place(torch.device("cuda")))


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
    want = losses(settings, tmp_path / "plain", place, notes)
    got = losses(recorded(settings), tmp_path / "recorded", place, notes)
    assert notes == []
    assert got == pytest.approx(want, rel=1e-2)
