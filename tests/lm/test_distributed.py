"""Two processes train as one does: replicated, sharded, and with a sequence shared between them."""

import math

import numpy as np
import pytest
from processes import together
from tiny_language import PLACE, prepare, run

from naju.lm.distributed import joined
from naju.lm.folder import load_model
from naju.lm.sharded_checkpoint import FOLDER
from naju.lm.train import train_language_model
from naju.training import Reporter, StoppedError
from naju.training.metrics import read_metrics

WAYS = {
    "ddp": {"execution": {"parallel": "ddp", "micro_tokens": 32}},
    "ddp, carried": {"carry_state": True, "documents": "reset"},
    "fsdp": {"execution": {"parallel": "fsdp", "micro_tokens": 32}},
    "context": {"execution": {"context_ranks": 2}},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("data"))


def go(settings, folder, stop_after=math.inf):
    """To the end or to a stop: the result, or None, and what was noted."""
    folder.mkdir(parents=True, exist_ok=True)
    notes, seen = [], [0]
    reporter = Reporter(
        progress=lambda step, loss: seen.append(step), note=notes.append, stop=lambda: seen[-1] >= stop_after
    )
    with joined(settings.execution) as place:
        try:
            return train_language_model(settings, folder, place, reporter), notes
        except StoppedError:
            return None, notes


def go_every_way(data, folder):
    """Each way stopped after five updates and resumed: two results, as starting processes is what takes time."""
    found = {}
    for name, changes in WAYS.items():
        settings = run(data, **changes)
        found[name] = go(settings, folder / name, stop_after=5)[0], go(settings, folder / name)[0]
    return found


@pytest.fixture(scope="module")
def on_two(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return folder, together(2, go_every_way, data, folder)


def losses(folder):
    return [row["loss"] for row in read_metrics(folder)]


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_learn_what_one_does(data, on_two, tmp_path, way):
    changes = {**WAYS[way], "execution": {}}
    alone = train_language_model(run(data, **changes), tmp_path, PLACE)
    folder, answers = on_two
    for answer in answers:
        stopped, result = answer[way]
        assert stopped is None
        assert result["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-4)
        assert result["best_step"] == alone["best_step"]
    np.testing.assert_allclose(losses(folder / way), losses(tmp_path), rtol=1e-4)
    first, second = (load_model(place / "best").state_dict() for place in (folder / way, tmp_path))
    for name, tensor in first.items():
        assert (tensor - second[name]).norm() <= 1e-2 * second[name].norm(), name


def test_a_sharded_run_goes_on_with_another_number_of_processes(data, tmp_path):
    settings = run(data, execution={"parallel": "fsdp", "keep": 2})
    alone = train_language_model(run(data), tmp_path / "alone", PLACE)
    together(2, go, settings, tmp_path / "two, then one", 7)
    together(1, go, settings, tmp_path / "one, then two", 7)
    assert len(losses(tmp_path / "two, then one")) == 7
    (first, _), (second, _) = (
        together(1, go, settings, tmp_path / "two, then one")[0],
        together(2, go, settings, tmp_path / "one, then two")[0],
    )
    for result, name in ((first, "two, then one"), (second, "one, then two")):
        assert result["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-4)
        np.testing.assert_allclose(losses(tmp_path / name), losses(tmp_path / "alone"), rtol=1e-4)
        assert len(list((tmp_path / name / FOLDER).iterdir())) == 2


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("harm", "told"), [(flip, "checksum"), (lambda path: path.unlink(), "is missing")])
def test_a_damaged_shard_is_reported_and_the_checkpoint_before_used(data, tmp_path, harm, told):
    settings = run(data, execution={"parallel": "fsdp"})
    go(settings, tmp_path / "whole")
    go(settings, tmp_path / "hurt", stop_after=7)
    newest = max((tmp_path / "hurt" / FOLDER).iterdir())
    harm(next(newest.glob("*.distcp")))
    result, notes = go(settings, tmp_path / "hurt")
    assert [newest.name in note and told in note for note in notes] == [True]
    assert losses(tmp_path / "hurt") == losses(tmp_path / "whole")
    assert result is not None


@pytest.mark.parametrize(("first", "then", "told"), [("ddp", "fsdp", "without"), ("fsdp", "ddp", "with")])
def test_a_run_of_the_other_kind_does_not_begin_again(data, tmp_path, first, then, told):
    go(run(data, execution={"parallel": first}), tmp_path, stop_after=3)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=f"holds checkpoints of a run {told} parallel 'fsdp'"):
        go(run(data, execution={"parallel": then}), tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def refusals(data, folder):
    found = []
    for changes in ({"length": 16, "tokens_per_update": 48}, {"length": 15, "tokens_per_update": 60}):
        how = {"context_ranks": 2} if changes["length"] == 15 else {}
        try:
            go(run(data, execution=how, **changes), folder)
        except ValueError as error:
            found.append(str(error))
    return found


def test_what_cannot_be_split_is_refused(data, tmp_path):
    for told in together(2, refusals, data, tmp_path):
        assert told[0] == "an update must have a multiple of 2 sequences for as many processes, but has 3"
        assert told[1] == "length must be a multiple of context_ranks 2, but is 15"
