"""The loop, its schedule and its seeds, on a task that takes a second to learn."""

from itertools import pairwise

import pytest
import torch
from tiny import TokenBeforeLast, config, model, parameters
from torch import nn

from naju.training import TrainConfig, seeded_generator, train
from naju.training.schedule import cosine_with_warmup


def test_it_learns():
    losses = train(model(), TokenBeforeLast(), config(steps=150))
    assert len(losses) == 150
    assert sum(losses[:5]) / 5 > 1.2
    assert sum(losses[-5:]) / 5 < 0.3


def test_a_run_is_a_function_of_its_arguments():
    before = torch.random.get_rng_state()
    first, second = model(), model()
    assert train(first, TokenBeforeLast(), config(steps=5)) == train(second, TokenBeforeLast(), config(steps=5))
    assert torch.equal(parameters(first), parameters(second))
    assert torch.equal(before, torch.random.get_rng_state())
    assert train(model(), TokenBeforeLast(), config(steps=5, seed=1)) != train(
        model(), TokenBeforeLast(), config(steps=5)
    )
    assert not torch.equal(parameters(model(0)), parameters(model(1)))


def test_a_model_learns_in_training_mode_whatever_it_did_before():
    module, modes = model().eval(), []
    module.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    train(module, TokenBeforeLast(), config(steps=2))
    assert modes == [True, True]


def test_two_models_with_one_config_see_the_same_sequences():
    seen = {}
    for name, module in (("small", model()), ("large", model(d_state=8))):
        rows = seen.setdefault(name, [])
        module.register_forward_pre_hook(lambda _, inputs, rows=rows: rows.append(inputs[0].clone()))
        train(module, TokenBeforeLast(), config(steps=3))
    assert all(torch.equal(a, b) for a, b in zip(seen["small"], seen["large"], strict=True))
    assert not torch.equal(seen["small"][0], seen["small"][1])


def test_every_step_reports_its_number_loss_and_learning_rate():
    steps = []
    losses = train(model(), TokenBeforeLast(), config(steps=10, warmup_ratio=0.2), steps.append)
    assert [step.step for step in steps] == list(range(1, 11))
    assert [step.loss for step in steps] == losses
    assert [step.lr for step in steps] == [pytest.approx(1e-2 * cosine_with_warmup(k, 10, 0.2)) for k in range(10)]


def test_reparameterised_gates_get_their_own_rate():
    """Without decay and clipping the first AdamW step moves a parameter by about its rate."""
    module = model(gate_reparam=True)
    gate, plain = module.backbone.blocks[0].mixer.write.bias, module.head.bias
    before = gate.detach().clone(), plain.detach().clone()
    train(module, TokenBeforeLast(), config(steps=1, warmup_ratio=0.0, weight_decay=0.0, clip=None))
    moved = [float((new - old).abs().max()) for new, old in zip((gate.detach(), plain.detach()), before, strict=True)]
    assert moved == [pytest.approx(1e-2 * 32**0.5, rel=1e-2), pytest.approx(1e-2, rel=1e-2)]


def test_clipping_limits_what_a_step_can_do():
    """Gradients clipped far below Adam's eps move nothing; without clipping the same step moves by the rate."""
    for clip, low, high in ((1e-13, 0.0, 1e-5), (None, 5e-3, 2e-2)):
        module = model()
        before = parameters(module)
        train(module, TokenBeforeLast(), config(steps=1, warmup_ratio=0.0, weight_decay=0.0, clip=clip))
        assert low <= float((parameters(module) - before).abs().max()) < high


def test_a_loss_that_is_not_finite_stops_and_names_the_step():
    module = model()

    def poison(step):
        if step.step == 3:
            nn.init.constant_(module.head.bias, float("nan"))

    with pytest.raises(FloatingPointError, match=r"the weight head\.bias became infinite or NaN at step 4"):
        train(module, TokenBeforeLast(), config(), poison)


def test_the_defaults_are_the_papers_shared_protocol():
    shared = TrainConfig(steps=1)
    assert (shared.length, shared.batch_size, shared.lr, shared.weight_decay) == (512, 32, 3e-4, 1e-4)
    assert (shared.warmup_ratio, shared.clip) == (0.05, 1.0)


def test_the_schedule_climbs_then_falls_to_almost_nothing():
    factors = [cosine_with_warmup(step, 200, 0.05) for step in range(200)]
    assert factors[:10] == pytest.approx([k / 10 for k in range(1, 11)])
    assert factors[10] == 1.0
    assert all(a > b for a, b in pairwise(factors[10:]))
    assert factors[105] == pytest.approx(0.5)
    assert 0 < factors[-1] < 1e-3
    assert [cosine_with_warmup(step, 30, 0.05) for step in range(3)] == [0.5, 1.0, 1.0]  # a step and a half are two
    assert cosine_with_warmup(0, 1, 0.0) == cosine_with_warmup(0, 1, 1.0) == 1.0


def test_purposes_have_streams_of_their_own():
    draws = [torch.rand(4, generator=seeded_generator(*which)) for which in ((0, "a"), (0, "b"), (1, "a"), (0, "a"))]
    assert torch.equal(draws[0], draws[3])
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be a positive integer, but is 0"),
        ({"batch_size": -1}, "batch_size must be a positive integer, but is -1"),
        ({"warmup_ratio": 1.5}, r"warmup_ratio must lie in \[0, 1\], but is 1.5"),
        ({"lr": 0.0}, "lr must be positive, but is 0.0"),
        ({"clip": 0.0}, "clip must be positive or None, but is 0.0"),
        ({"sequences": 15}, "sequences must fill a batch of 16, but is 15"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)
