"""Two thousand steps in bfloat16 at ten times the default rate, clipped: every number stays finite, in both loops."""

import math

import pytest
import torch
from small_runs import PLACE, classifier_and_data, language_run, prepare

from naju.lm.config import Protocol
from naju.lm.folder import load_model
from naju.lm.train import train_language_model
from naju.training import Journal, Rhythm, TrainConfig, fit
from naju.training.metrics import read_metrics

STEPS = 2000


def assert_all_finite(tensors):
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_a_classifier(tmp_path):
    lr = 10 * TrainConfig(steps=1).lr
    learner, data = classifier_and_data(steps=STEPS, lr=lr, bf16=True)
    rhythm = Rhythm(log_every=50, validate_every=STEPS)
    with Journal(tmp_path, learner) as journal:
        fit(learner, data, journal, rhythm, lambda: 0.0)
    rows = read_metrics(tmp_path)
    assert rows[-1]["step"] == STEPS
    assert max(row["lr"] for row in rows) > 0.9 * lr
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert_all_finite(learner.tensors())


def test_a_language_model(tmp_path):
    lr = 10 * Protocol().lr
    run = language_run(prepare(tmp_path / "text"), updates=STEPS, log_every=50, precision="bf16", lr=lr)
    result = train_language_model(run, tmp_path / "run", PLACE)
    rows = read_metrics(tmp_path / "run")
    assert rows[-1]["step"] == STEPS
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert result["validation_loss"] < rows[0]["loss"]
    assert_all_finite(load_model(tmp_path / "run" / "best").state_dict())


def test_ten_times_is_not_the_limit_of_what_is_noticed():
    """Without clipping and at a rate far beyond reason, training ends with a sentence and not with NaN weights."""
    learner, data = classifier_and_data(steps=40, lr=1e30, clip=None, bf16=True)
    for _ in range(40):
        learner.learn(*data.batch(learner.steps_done % 32))
    with pytest.raises(FloatingPointError, match="became infinite or NaN at step"):
        learner.window()
    assert all(torch.isfinite(parameter).all() for parameter in learner.model.parameters())
