"""A task that takes a second to learn, and models for it."""

from dataclasses import dataclass

import torch

from naju import Classifier, ModelConfig
from naju.tasks import Batch, Task
from naju.training import TrainConfig, seeded_initialisation


@dataclass(frozen=True)
class TokenBeforeLast(Task):
    """The answer is the last token but one."""

    groups = ("all",)
    vocab_size = 4
    n_classes = 4

    def minimum_length(self):
        return 2

    def token_names(self):
        return tuple("abcd")

    def sample(self, count, length, generator):
        tokens = torch.randint(4, (count, length), generator=generator, device=generator.device)
        return Batch(tokens, tokens[:, -2], torch.zeros(count, dtype=torch.int64, device=generator.device))


def model(seed=0, **options):
    config = ModelConfig(vocab_size=4, d_model=16, n_layers=1, mixer_options={"d_state": 4, **options})
    with seeded_initialisation(seed):
        return Classifier(config, 4)


def config(**changes):
    return TrainConfig(**{"steps": 60, "length": 6, "batch_size": 16, "lr": 1e-2, **changes})


def parameters(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
