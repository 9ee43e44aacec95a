"""Language-model grids of a second a run."""

from dataclasses import replace

import numpy as np

from naju.lab import wikitext
from naju.lab.wikitext_models import CONTENDERS
from naju.lm.token_files import Part, Vocabulary, write_token_files

SPLITS = {"train": 2000, "validation": 200, "test": 100}
TINY = replace(
    wikitext.FULL,
    n_layers=2,
    d_model=16,
    length=16,
    lengths=(16, 32),
    widths=(16, 32),
    tokens=6 * 128,
    pilot_tokens=3 * 128,
    tokens_per_update=128,
    micro_tokens=64,
    warm=1,
    timed=3,
)


def make_tiny(folder, monkeypatch):
    """A text of 17 different tokens in `folder/made-up`, small sizes, and states of 4."""
    monkeypatch.setattr(wikitext, "FULL", TINY)
    small = {name: one._replace(options=("d_state=4",)) for name, one in CONTENDERS.items() if "naju" in name}
    monkeypatch.setattr(wikitext, "CONTENDERS", {**CONTENDERS, **small})
    rng = np.random.default_rng(0)
    splits = {name: [Part(np.append(rng.integers(16, size=n - 1), 16), np.array([n]))] for name, n in SPLITS.items()}
    write_token_files(folder / "made-up", splits, Vocabulary(17, 16))
    return folder


def command(folder, name, *arguments):
    """`naju reproduce` on that text, as a list of arguments."""
    where = ("--data", folder / "made-up", "--runs", folder / "runs", "--device", "cpu", "--jobs", "1")
    return ["reproduce", name, *map(str, where), *arguments]
