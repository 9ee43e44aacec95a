"""A classifier and a language model small enough to be trained for thousands of steps."""

import numpy as np
import torch

from naju import Classifier, ModelConfig
from naju.lm.config import Execution, LanguageRun, ModelSettings, Protocol
from naju.lm.distributed import Place
from naju.lm.token_files import Part, Vocabulary, write_token_files
from naju.tasks import build_task
from naju.training import FixedSet, Learner, TrainConfig, seeded_initialisation

CPU = torch.device("cpu")
PLACE = Place(CPU)
TASK = build_task("T3")
LENGTH = TASK.minimum_length()


def classifier_and_data(device=CPU, **settings):
    """A learner and its fixed set, shuffled for the first epoch."""
    config = TrainConfig(**{"steps": 20, "length": LENGTH, "batch_size": 8, "sequences": 256, **settings})
    with seeded_initialisation(0):
        model = Classifier(ModelConfig(TASK.vocab_size, 16, 1, mixer_options={"d_state": 4}), TASK.n_classes)
    data = FixedSet(TASK, config, device)
    data.shuffle(0)
    return Learner(model.to(device), config), data


def prepare(folder):
    splits = {"train": [_text(3000, 0)], "validation": [_text(300, 1)]}
    write_token_files(folder, splits, Vocabulary(17, 16))
    return folder


def _text(tokens, seed):
    """Each token follows from the one before, but for one in ten."""
    rng = np.random.default_rng(seed)
    text = np.zeros(tokens, np.int64)
    for place in range(1, tokens):
        text[place] = rng.integers(16) if rng.random() < 0.1 else (5 * text[place - 1] + 3) % 16
    return Part(text, np.array([tokens]))


def language_run(data, *, updates=12, log_every=2, precision="float32", parallel="ddp", **protocol):
    how = {"log_every": log_every, "precision": precision, "parallel": parallel}
    return LanguageRun(
        data=data,
        model=ModelSettings(mixer="naju", options=("d_state=4",), d_model=16, n_layers=1),
        protocol=Protocol(**{"length": 16, "tokens_per_update": 64, "tokens": updates * 64, **protocol}),
        execution=Execution(**how, validations=3, device="cpu", save_seconds=1e6),
    )
