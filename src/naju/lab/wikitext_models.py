"""The models of the paper's language-model tables by the names of our commands, and what its tables say of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from naju.lab.paper import paper_tables
from naju.mixers import MIXERS


class Contender(NamedTuple):
    """A mixer with options as `naju lm train` takes them; `tuned_as` is the contender whose learning rate it takes,
    and `attention` "math" keeps fused attention kernels out."""

    mixer: str
    options: tuple[str, ...] = ()
    tuned_as: str | None = None
    attention: str = "auto"


_NAMED = {
    "naju": Contender("naju", ("d_state=64",)),
    "naju-rank64": Contender("naju", ("d_state=64", "gate_rank=64"), "naju"),
    "naju-rank32": Contender("naju", ("d_state=64", "gate_rank=32"), "naju"),
    "naju-reparam": Contender("naju", ("d_state=64", "gate_reparam=true")),
    # Other starts: with what is near, and with memories of all lengths.
    "naju-local": Contender("naju", ("d_state=64", "f_bias=2", "D_init=1")),
    "naju-spread": Contender("naju", ("d_state=64", "f_bias=[-1,6]", "D_init=1")),
    "mamba2": Contender("mamba2", ("d_state=64",)),
    "mamba": Contender("mamba", ("d_state=64",)),
    "mamba-16": Contender("mamba", ("d_state=16",)),
    "transformer": Contender("transformer"),
    "transformer-math": Contender("transformer", (), "transformer", "math"),
}
CONTENDERS: Mapping[str, Contender] = {**_NAMED, **{name: Contender(name) for name in MIXERS if name not in _NAMED}}
GATE_RANKS = ("naju", "naju-rank64", "naju-rank32")


class Shape(NamedTuple):
    """What a row of the paper's tables is about."""

    contender: str
    d_model: int
    length: int


def contender_of(row: Mapping[str, Any]) -> str:
    """A row of the paper's as our commands call it."""
    if row["model"] == "mamba" and row["d_state"] == 16:
        return "mamba-16"
    return str(row["model"]) if row.get("gate_rank", "full") == "full" else f"naju-rank{row['gate_rank']}"


def paper_rows(table: str) -> dict[Shape, Mapping[str, Any]]:
    """In the paper's order; where a table names no context length, it is 1024."""
    return {
        Shape(contender_of(row), row["d_model"], row.get("context_length", 1024)): row
        for row in paper_tables()[table].rows
    }


# The three tables agree where they share a row.
PAPER: Mapping[Shape, Mapping[str, Any]] = {
    **paper_rows("tab:wt103"),
    **paper_rows("tab:wt103_width"),
    **paper_rows("tab:gate_rank"),
}
PILOTS: Mapping[str, Mapping[str, Any]] = {contender_of(row): row for row in paper_tables()["tab:wt103_lr"].rows}


def paper_rate(contender: str) -> float:
    """The one its runs have; Naju's for a model that it does not have."""
    tuned_as = CONTENDERS[contender].tuned_as or contender
    return float(PILOTS.get(tuned_as, PILOTS["naju"])["used_lr"])


def paper_pilot(contender: str, rate: float) -> float | None:
    """Validation perplexity of a pilot of the paper's."""
    thousandths = rate * 1000
    key = f"lr_{round(thousandths)}e-3"
    found: float | None = PILOTS.get(contender, {}).get(key) if abs(thousandths - round(thousandths)) < 1e-6 else None
    return found
