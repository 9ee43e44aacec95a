"""A text that a small model learns in seconds, and runs on it."""

import numpy as np
import torch

from naju.lm.config import Execution, LanguageRun, ModelSettings, Protocol
from naju.lm.distributed import Place
from naju.lm.token_files import Part, Vocabulary, open_split, write_token_files

VOCABULARY, END = 17, 16
SPLITS = {"train": 3000, "validation": 333, "test": 200}
PLACE = Place(torch.device("cpu"))


def text(tokens, seed):
    """Each token follows from the one before, but for one in ten; documents have 5 to 60 tokens."""
    rng = np.random.default_rng(seed)
    written = np.zeros(tokens, np.int64)
    for place in range(1, tokens):
        written[place] = rng.integers(END) if rng.random() < 0.1 else (5 * written[place - 1] + 3) % END
    ends = np.cumsum(rng.integers(5, 60, tokens))
    ends = np.append(ends[ends < tokens - 5], tokens)
    written[ends - 1] = END
    return Part(written, ends)


def prepare(folder, **splits):
    chosen = splits or SPLITS
    written = {name: [text(tokens, seed)] for seed, (name, tokens) in enumerate(chosen.items())}
    write_token_files(folder, written, Vocabulary(VOCABULARY, END))
    return folder


def split(folder, name="train"):
    return open_split(folder, name)


def run(data, *, mixer="naju", options=("d_state=4",), d_model=16, n_layers=2, execution=None, **protocol):
    settings = {"length": 16, "tokens_per_update": 128, "tokens": 12 * 128, "lr": 1e-2, **protocol}
    how = {"log_every": 1, "validations": 3, "device": "cpu", "save_seconds": 0, **(execution or {})}
    return LanguageRun(
        data=data,
        model=ModelSettings(mixer=mixer, options=options, d_model=d_model, n_layers=n_layers),
        protocol=Protocol(**settings),
        execution=Execution(**how),
    )
