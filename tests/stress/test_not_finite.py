"""A loss or a gradient that is not finite: what is said, and that no weight and no checkpoint has seen it."""

import math
import re

import pytest
import torch
from small_runs import LENGTH, PLACE, TASK, classifier_and_data, language_run, prepare

from naju.lm import train as language
from naju.lm.distributed import Place, joined
from naju.training import Journal, NotFiniteError, Reporter, Rhythm, TrainConfig, fit, train
from naju.training.checkpoint import BEFORE, NEWEST, read_checkpoint
from naju.training.cuda_graph import recorded

OFTEN = Rhythm(log_every=3, validate_every=6, save_seconds=0)
NEVER = Rhythm(log_every=20, validate_every=20, save_seconds=1e6)
WEIGHT = "backbone.blocks.0.mixer.project_in.weight"


def spoil(learner, name, step, value=math.nan):
    """From `step` on, one element of the parameter's gradient has this value."""

    def spoilt(gradient):
        gradient = gradient.clone()
        gradient.view(-1)[3] = torch.where(learner.steps_done[0] + 1 >= step, value, gradient.view(-1)[3])
        return gradient

    dict(learner.model.named_parameters())[name].register_hook(spoilt)


def weights_and_moments(learner):
    return {name: t.clone() for name, t in learner.tensors().items() if name.startswith(("model.", "optimizer."))}


def assert_same(first, second):
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def learn(learner, data, steps):
    for _ in range(steps):
        learner.learn(*data.batch(learner.steps_done))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [1.0, None])
def test_a_spoilt_update_and_all_after_it_change_nothing(value, clip):
    undisturbed, data = classifier_and_data(clip=clip)
    learn(undisturbed, data, 4)
    learner, _ = classifier_and_data(clip=clip)
    spoil(learner, WEIGHT, 5, value)
    learn(learner, data, 8)
    assert_same(weights_and_moments(learner), weights_and_moments(undisturbed))
    with pytest.raises(NotFiniteError, match=f"the gradient of {re.escape(WEIGHT)} became infinite or NaN at step 5;"):
        learner.window()


def test_of_several_gradients_the_one_nearest_to_the_loss_is_named():
    learner, data = classifier_and_data()
    for name in ("head.weight", "backbone.embedding.weight", WEIGHT):
        spoil(learner, name, 2)
    learn(learner, data, 3)
    with pytest.raises(NotFiniteError, match=r"the gradient of head\.weight \(and 2 more\) became .* at step 2;"):
        learner.check_finite()


def test_an_infinite_loss_of_finite_weights_is_named():
    learner, data = classifier_and_data()
    learner.model.register_forward_hook(lambda module, inputs, logits: logits * torch.inf)
    learn(learner, data, 1)
    with pytest.raises(NotFiniteError, match=r"^the loss became infinite or NaN at step 1;"):
        learner.check_finite()


def fit_in(folder, rhythm, spoilt_at, stop_after=None):
    folder.mkdir(exist_ok=True)
    learner, data = classifier_and_data()
    spoil(learner, WEIGHT, spoilt_at)
    reporter = Reporter(stop=lambda: stop_after is not None and int(learner.steps_done) >= stop_after)
    with Journal(folder, learner) as journal:
        fit(learner, data, journal, rhythm, lambda: 0.0, reporter)


def test_the_loop_names_step_tensor_and_last_good_checkpoint(tmp_path):
    with pytest.raises(NotFiniteError) as caught:
        fit_in(tmp_path, OFTEN, 8)
    what, where = caught.value.args
    assert what.startswith(f"the gradient of {WEIGHT} became infinite or NaN at step 8;")
    assert where == f"the last good checkpoint is {tmp_path / NEWEST}, of step 6"
    assert str(caught.value) == f"{what}; {where}"
    undisturbed, data = classifier_and_data()
    learn(undisturbed, data, 6)
    saved = {n: t for n, t in read_checkpoint(tmp_path / NEWEST).tensors.items() if not n.startswith("loop.")}
    assert_same(saved, weights_and_moments(undisturbed))


def test_a_damaged_checkpoint_is_not_called_good(tmp_path):
    with pytest.raises(NotFiniteError):
        fit_in(tmp_path, OFTEN, 8)
    (tmp_path / NEWEST).write_bytes((tmp_path / NEWEST).read_bytes()[:-7])
    with pytest.raises(NotFiniteError) as caught:
        fit_in(tmp_path, NEVER, 8)
    assert caught.value.args[1] == f"the last good checkpoint is {tmp_path / BEFORE}, of step 3"


def test_a_stop_after_a_spoilt_update_saves_nothing(tmp_path):
    with pytest.raises(NotFiniteError, match=r"at step 4;.*; there is no checkpoint yet$"):
        fit_in(tmp_path, NEVER, 4, stop_after=5)
    assert not (tmp_path / NEWEST).exists()


def test_training_on_fresh_sequences_stops_at_once():
    learner, _ = classifier_and_data()
    model, steps = learner.model, []
    model.head.weight.register_hook(lambda gradient: gradient * (torch.nan if len(steps) == 2 else 1.0))
    with pytest.raises(NotFiniteError, match=r"the gradient of head\.weight became infinite or NaN at step 3;"):
        train(model, TASK, TrainConfig(steps=10, length=LENGTH, batch_size=4), steps.append)
    assert len(steps) == 2


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("text"))


def spoil_after_reduction(monkeypatch, name, step):
    """As `spoil`, where gradients of all processes have come together: shards have no hooks."""
    steps = []

    def finish(place, model):
        steps.append(None)
        gradient = dict(model.named_parameters())[name].grad
        if len(steps) >= step:
            (gradient.to_local() if hasattr(gradient, "to_local") else gradient).view(-1)[3] = math.nan

    monkeypatch.setattr(Place, "finish_gradients", finish)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_language_loop_names_them_too(text, tmp_path, monkeypatch, parallel):
    spoil_after_reduction(monkeypatch, WEIGHT, 7)
    run = language_run(text, parallel=parallel)
    with joined(run.execution) as place, pytest.raises(NotFiniteError) as caught:
        language.train_language_model(run, tmp_path, place)
    what, where = caught.value.args
    assert what.startswith(f"the gradient of {WEIGHT} became infinite or NaN at step 7;")
    good = {"ddp": f"{tmp_path / NEWEST}, of step 4", "fsdp": f"{tmp_path / 'sharded' / 'step-000000004'}"}
    assert where == f"the last good checkpoint is {good[parallel]}"
    if parallel == "ddp":
        checkpoint = read_checkpoint(tmp_path / NEWEST)
        assert all(tensor.isfinite().all() for tensor in checkpoint.tensors.values())


def test_a_validation_loss_that_is_not_finite_stops_the_language_loop(text, tmp_path, monkeypatch):
    monkeypatch.setattr(language.Reader, "loss", lambda *args: math.inf)
    with pytest.raises(NotFiniteError, match=r"the validation loss became inf at step 4;.*; there is no checkpoint"):
        language.train_language_model(language_run(text), tmp_path, PLACE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_recorded_step_is_withheld_as_well():
    learner, data = classifier_and_data(torch.device("cuda"))
    spoil(learner, WEIGHT, 5)
    (replay,) = recorded([lambda: learner.learn(*data.batch(learner.steps_done))], learner.tensors().values())
    for _ in range(4):
        replay()
    before = weights_and_moments(learner)
    learner.check_finite()
    for _ in range(3):
        replay()
    assert_same(weights_and_moments(learner), before)
    with pytest.raises(NotFiniteError, match=f"the gradient of {re.escape(WEIGHT)} became infinite or NaN at step 5;"):
        learner.check_finite()
