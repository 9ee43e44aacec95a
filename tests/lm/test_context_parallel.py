"""A sequence that several processes share gives the loss and the gradients of one process that has it whole."""

import pytest
import torch
import torch.distributed as dist
from processes import together
from tiny_language import PLACE, prepare, run, split

from naju.lm.batches import read_batch
from naju.lm.config import Execution
from naju.lm.distributed import joined
from naju.lm.learner import Objective
from naju.models import LanguageModel
from naju.training import seeded_initialisation

OPTIONS = {
    "naju": ("d_state=4",),
    "mamba2": ("d_state=4", "d_head=8"),
    "transformer": ("n_heads=2",),
    "rwkv": (),
}


def loss_and_gradients(data, place, mixer, documents):
    """Of three rows of 24 tokens, each process with its stretch; gradients averaged as training does."""
    settings = run(data, mixer=mixer, options=OPTIONS[mixer], length=24, tokens_per_update=72, documents=documents)
    with seeded_initialisation(0):
        model = LanguageModel(settings.model.config(17))
    stretch = 24 // place.context_ranks
    text = split(data)
    starts = torch.tensor([0, 500, int(text.documents[3])]).numpy() + place.context_rank * stretch
    batch = read_batch(text, starts, stretch, reset=documents == "reset")
    objective = Objective(model, place)
    loss, _ = objective(batch.tokens, batch.targets, None, batch.packing, 72 / place.world)
    loss.backward()
    place.finish_gradients(model)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return place.sum(loss.detach()) / place.world, gradients


def on_a_group(data, cases):
    with joined(Execution(device="cpu", context_ranks=dist.get_world_size())) as place:
        return {case: loss_and_gradients(data, place, *case) for case in cases}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("data"))


ON_TWO = [(mixer, documents) for mixer in OPTIONS for documents in ("run-on", "reset")]
ON_FOUR = [("naju", "run-on"), ("naju", "reset")]


@pytest.fixture(scope="module")
def shared(data):
    """By the number of processes and the case, what each process found; starting processes is what takes time."""
    groups = {2: together(2, on_a_group, data, ON_TWO), 4: together(4, on_a_group, data, ON_FOUR)}
    return lambda processes, *case: [answers[case] for answers in groups[processes]]


@pytest.mark.parametrize(
    ("processes", "mixer", "documents"), [(2, *case) for case in ON_TWO] + [(4, *case) for case in ON_FOUR]
)
def test_it_equals_one_process(data, shared, processes, mixer, documents):
    loss, gradients = loss_and_gradients(data, PLACE, mixer, documents)
    for other_loss, others in shared(processes, mixer, documents):
        assert abs(other_loss - loss) <= 1e-5 * loss
        assert others.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert (others[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
