"""One step of training against torch written out, and what makes it fit for a recording."""

import pytest
import torch
from tiny import TokenBeforeLast, config, model, parameters
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from naju.training import FixedSet, Learner
from naju.training.optimizer import parameter_groups
from naju.training.schedule import cosine_with_warmup

CPU = torch.device("cpu")


def batches(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [TokenBeforeLast().sample(16, 6, generator)[:2] for _ in range(count)]


def written_out(module, settings, data):
    """The same training with an ordinary optimizer and scheduler."""
    optimizer = torch.optim.AdamW(parameter_groups(module, lr=settings.lr, weight_decay=settings.weight_decay))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: cosine_with_warmup(step, settings.steps, settings.warmup_ratio)
    )
    losses = []
    for tokens, targets in data:
        loss = F.cross_entropy(module(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), settings.clip)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", [{}, {"gate_reparam": True}])
def test_it_is_adamw_with_clipping_and_the_schedule(options):
    settings, data = config(steps=20, weight_decay=0.1, clip=0.5), batches(20)
    ours, theirs = model(**options), model(**options)
    learner = Learner(ours, settings)
    losses = [learner.learn(*batch).item() for batch in data]
    assert losses == pytest.approx(written_out(theirs, settings, data), rel=1e-4)
    assert torch.allclose(parameters(ours), parameters(theirs), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("decay_all", [True, False])
def test_what_decays_shrinks_where_nothing_else_moves_it(decay_all):
    settings = config(steps=1, weight_decay=0.5, lr=0.1, decay_all=decay_all)
    module = model()
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    learner = Learner(module, settings)
    learner._begin_step()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    learner._end_step(torch.zeros(()), 0)
    kept = {name for name, parameter in module.named_parameters() if torch.equal(parameter, before[name])}
    shrunk = 1 - 0.5 * learner.rate(1)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] * (1.0 if name in kept else shrunk))
    gates = {f"backbone.blocks.0.mixer.{gate}.bias" for gate in ("forget", "write")}
    assert gates.isdisjoint(kept) if decay_all else gates <= kept
    assert not any(name.endswith("weight") and before[name].dim() > 1 for name in kept)


def test_making_a_learner_changes_no_weight_and_counts_no_step():
    module = model()
    before = parameters(module).clone()
    learner = Learner(module, config())
    assert torch.equal(parameters(module), before)
    moments = [tensor for name, tensor in learner.tensors().items() if name.startswith("optimizer.")]
    assert len(moments) == 3 * len(list(module.parameters()))
    assert not any(tensor.any() for tensor in moments)
    assert int(learner.steps_done) == 0


def test_a_window_adds_up_and_begins_anew():
    module, data = model(), batches(3)
    learner = Learner(module, config(steps=3))
    right, losses = 0, []
    for tokens, targets in data:
        right += int((module(tokens).argmax(-1) == targets).sum())
        losses.append(learner.learn(tokens, targets).item())
    assert learner.window() == (pytest.approx(sum(losses)), right)
    assert learner.window() == (0.0, 0.0)
    assert int(learner.steps_done) == 3


def test_restored_it_goes_on_as_if_nothing_had_happened_in_the_same_memory():
    settings, data = config(steps=6), batches(6)
    learner = Learner(model(), settings)
    for batch in data[:3]:
        learner.learn(*batch)
    saved = {name: tensor.clone() for name, tensor in learner.tensors().items()}
    addresses = {name: tensor.data_ptr() for name, tensor in learner.tensors().items()}
    first = [learner.learn(*batch).item() for batch in data[3:]]
    learner.restore(saved)
    assert {name: tensor.data_ptr() for name, tensor in learner.tensors().items()} == addresses
    assert [learner.learn(*batch).item() for batch in data[3:]] == first
    fresh = Learner(model(seed=1), settings)
    fresh.restore(saved)
    assert [fresh.learn(*batch).item() for batch in data[3:]] == first


def test_tensors_of_another_model_are_refused():
    learner = Learner(model(), config())
    saved = learner.tensors()
    del saved["model.head.bias"]
    with pytest.raises(ValueError, match=r"do not belong to this model.*model\.head\.bias"):
        learner.restore(saved)


def test_the_first_loss_that_was_not_finite_is_named_later():
    module, data = model(), batches(5)
    learner = Learner(module, config(steps=5))
    for step, batch in enumerate(data, 1):
        if step == 3:
            nn.init.constant_(module.head.bias, float("nan"))
        learner.learn(*batch)
    with pytest.raises(FloatingPointError, match="infinite or NaN at step 3;"):
        learner.window()


def test_restored_to_before_what_was_not_finite_it_learns_again():
    learner, batch = Learner(model(), config(steps=5)), batches(1)[0]
    saved = {name: tensor.clone() for name, tensor in learner.tensors().items()}
    nn.init.constant_(learner.model.head.bias, float("nan"))
    learner.learn(*batch)
    learner.restore(saved)
    before = parameters(learner.model)
    learner.learn(*batch)
    learner.check_finite()
    assert not torch.equal(parameters(learner.model), before)


class NoLooking(TorchDispatchMode):
    """Refuses to hand a tensor's value to Python, which on a GPU would wait for the device."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        assert function is not torch.ops.aten._local_scalar_dense.default, "a step looks at a value"
        return function(*arguments, **(options or {}))


def test_a_step_looks_at_no_value():
    settings = config(sequences=64, steps=8)
    learner, data = Learner(model(), settings), FixedSet(TokenBeforeLast(), settings, CPU)
    data.shuffle(0)
    with NoLooking():
        learner.learn(*data.batch(learner.steps_done))
        with pytest.raises(AssertionError, match="looks at a value"):
            learner.window()


def test_under_bf16_products_are_rounded_and_weights_are_not():
    seen = []
    module = model()
    module.head.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    learner = Learner(module, config(bf16=True))
    loss = learner.learn(*batches(1)[0])
    assert seen == [torch.bfloat16]
    assert loss.dtype == torch.float32
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
