"""A recorded step against the same step run eagerly, on a GPU."""

import pytest
import torch
from test_compiled import classifier
from tiny import TokenBeforeLast, config, model, parameters

from naju.training import FixedSet, Learner, loop
from naju.training.cuda_graph import recorded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

GPU = torch.device("cuda")


def learner_and_data(*, bf16, module=None):
    settings = config(steps=12, sequences=64, bf16=bf16)
    module = model() if module is None else module
    learner, data = Learner(module.to(GPU), settings), FixedSet(TokenBeforeLast(), settings, GPU)
    return learner, data, lambda: learner.learn(*data.batch(learner.steps_done))


def losses(learner, data, step):
    """Each step's loss, over three epochs."""
    found = []
    for count in range(12):
        if count % len(data.order) == 0:
            data.shuffle(count // len(data.order))
        step()
        found.append(learner.window().loss)
    return found


@pytest.mark.parametrize("bf16", [False, True])
def test_replays_are_the_steps(bf16):
    eager, replayed = learner_and_data(bf16=bf16), learner_and_data(bf16=bf16)
    wanted = losses(*eager)
    learner, data, step = replayed
    before = parameters(learner.model).clone()
    data.shuffle(0)
    (replay,) = recorded([step], learner.tensors().values())
    assert torch.equal(parameters(learner.model), before)
    assert int(learner.steps_done) == 0
    assert losses(learner, data, replay) == pytest.approx(wanted, rel=1e-3)
    assert int(learner.steps_done) == 12


def test_steps_of_several_lengths_share_memory_and_nothing_else():
    """They are replayed in any order."""

    def learner_and_steps():
        learner = Learner(model().to(GPU), config(steps=12, sequences=64))
        sets = [FixedSet(TokenBeforeLast(), config(sequences=64, length=length), GPU) for length in (6, 40, 300)]
        for data in sets:
            data.shuffle(0)
        return learner, [lambda data=data: learner.learn(*data.batch(learner.steps_done)) for data in sets]

    def losses_of(learner, steps):
        found = []
        for kind in (0, 2, 1, 1, 2, 0, 2, 2, 0, 0, 1, 2):
            steps[kind]()
            found.append(learner.window().loss)
        return found

    wanted, (learner, steps) = losses_of(*learner_and_steps()), learner_and_steps()
    assert losses_of(learner, recorded(steps, learner.tensors().values())) == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("mixer", ["mamba2", "retnet", "mlstm", "hgrn", "mamba", "transformer"])
def test_a_step_of_compiled_blocks_is_the_eager_one(mixer):
    eager, compiled = (learner_and_data(bf16=True, module=classifier(mixer, mixer)) for _ in range(2))
    wanted, (learner, data, _) = losses(*eager), compiled
    data.shuffle(0)
    (replay,), execution = loop.executables(learner, data, pytest.fail)
    assert execution == "CUDA graph of compiled blocks"
    assert losses(learner, data, replay) == pytest.approx(wanted, rel=1e-2)
