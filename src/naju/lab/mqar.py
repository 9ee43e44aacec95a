"""The grid of multi-query recall, as the paper has it: four learning rates for each model and size.

Two mixer blocks for every model, no MLP, tied embeddings; the paper says only "the same two-layer harness". Embeddings
begin with a deviation of 0.02, mixers as they do everywhere here.

The weight decay of 0.1 is on every parameter, as in Zoology's code, which hands all of them to AdamW; the paper leaves
that open. At these rates it is strong: a gate's bias of 5 would by decay alone be 0.2 after 8 epochs at 1e-2. Without
`decay_all` it is on matrices alone (`naju.training.optimizer.is_matrix`), not on biases, norms, D and A_log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from naju.lab.diagnostic_run import ModelSettings
from naju.lab.diagnostics import Changes
from naju.lab.mqar_run import Data, MqarRun
from naju.lab.options import MATRIX_DECAY, PAPER_NAMES, GridOptions, check_names, check_options, parse_seeds
from naju.lab.paper import paper_tables
from naju.lm.config import parse_options
from naju.tasks.mqar import TEST, TRAINING, Segment
from naju.training import TrainConfig

RATES = (1e-3, 3.16e-3, 1e-2, 3.16e-2)
WIDTHS = (64, 128, 256, 512)
EPOCHS = 32
# The paper's names of models that are called otherwise here.
MIXERS = {**PAPER_NAMES, "transformer": "attention"}
# What the paper's main comparison rests on comes first.
FIRST = ("naju", "mamba2", "mamba")


class Contender(NamedTuple):
    """A row of the paper's table, or of ours alone where `more` has other options of the mixer, as `--options` takes
    them. `d_state` is None where a mixer has no such choice."""

    mixer: str
    d_state: int | None
    reparam: bool
    more: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        state = [] if self.d_state is None else [f"N{self.d_state}"]
        return " ".join([self.mixer, *state, *(["reparam"] if self.reparam else []), *self.more])

    @property
    def options(self) -> dict[str, Any]:
        state = {} if self.d_state is None else {"d_state": self.d_state}
        return state | ({"gate_reparam": True} if self.reparam else {})


def _contender(row: Mapping[str, Any]) -> Contender:
    return Contender(MIXERS.get(row["model"], row["model"]), row["d_state"], row["gate_reparam"])


PAPER: Mapping[Contender, Mapping[str, Any]] = {_contender(row): row for row in paper_tables()["tab:mqar"].rows}
NAMES = tuple(dict.fromkeys(contender.mixer for contender in PAPER))


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What the full and the quick grid differ in."""

    data: Data
    widths: tuple[int, ...]
    contenders: tuple[Contender, ...]
    mixers: tuple[str, ...]
    rates: tuple[float, ...]
    batch_size: int
    epochs: int


FULL = Scale(
    data=Data(training=TRAINING, test=TEST),
    widths=WIDTHS,
    contenders=tuple(PAPER),
    mixers=NAMES,
    rates=RATES,
    batch_size=256,
    epochs=EPOCHS,
)
# Half a minute a run on one core, and a model that finds the mechanism passes 0.9; the last test slice asks for more
# pairs than were ever trained on.
QUICK = Scale(
    data=Data(
        training=(Segment(16, 2, 4000), Segment(32, 4, 8000)),
        test=(Segment(16, 2, 500), Segment(32, 4, 500), Segment(64, 8, 500)),
        n_symbols=64,
    ),
    widths=(32,),
    contenders=tuple(contender for contender in PAPER if contender.d_state != 64 and not contender.reparam),
    mixers=("naju", "mamba2", "attention"),
    rates=(3.16e-3, 1e-2),
    batch_size=32,
    epochs=7,
)


@dataclass(frozen=True, kw_only=True)
class Mqar:
    """Multi-query recall by width and size of the state, the best of four learning rates."""

    mixers: tuple[str, ...] = ()
    """Some of attention, mlstm (or xlstm), mamba, mamba2, naju; without any: all, or the quick grid's three."""
    widths: tuple[int, ...] = ()
    """Some of 64, 128, 256, 512 for every model; without any: all that the paper has for each."""
    states: tuple[int, ...] = ()
    """16, 64 or both, of the models that have a choice; without any: both."""
    reparam: Literal["without", "with", "both"] = "both"
    """Naju's gate reparameterisation."""
    options: tuple[str, ...] = ()
    """Other options of the mixers as name=number, such as f_bias=2 for naju."""
    rates: tuple[float, ...] = ()
    """Learning rates; without any: 1e-3, 3.16e-3, 1e-2, 3.16e-2."""
    seeds: tuple[str, ...] = ("1",)
    """Numbers and ranges, such as 1-3 5."""
    epochs: int | None = None
    """In place of 32, for all mixers alike."""
    rewriting: bool = False
    """Every key is bound twice on average, and only its last value counts."""
    filler: Literal["random", "zero"] = "random"
    """What stands between queries: any token, or 0."""
    decay_all: bool = True
    """Weight decay on every parameter, biases and norms too; without: on matrices alone."""
    bf16: bool = False
    """bfloat16 autocast; the protocol is float32."""
    quick: bool = False
    """A small but real grid, minutes on a CPU: naju, mamba2 and attention on shorter sequences of fewer symbols."""
    grid: GridOptions = field(default_factory=GridOptions)

    def __post_init__(self) -> None:
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs must be a positive integer, but is {self.epochs}")
        if len({f"{rate:g}" for rate in self.rates}) < len(self.rates):
            raise ValueError(f"rates must differ in six digits, but are {', '.join(map(str, self.rates))}")

    def cells(self) -> list[MqarRun]:
        """In the order in which they are filled: a seed of everything before the next, N = 64 and the middle widths
        of the state-space models first. Models that are compared get one rate after the other, so that they have had
        equal chances wherever the filling stops."""
        scale = QUICK if self.quick else FULL
        widths, rates = self.widths or scale.widths, self.rates or scale.rates
        check_names("widths", widths, scale.widths)
        chosen = [(contender, width) for contender in self._contenders(scale) for width in widths]
        if not self.quick and not self.widths:
            chosen = [cell for cell in chosen if paper_number(*cell) is not None]
        if not chosen:
            known = ", ".join(contender.label for contender in scale.contenders)
            raise ValueError(f"mixers, states and reparam leave none of {known}")
        tried = [(contender, width, rate) for rate in rates for contender, width in chosen]
        tried.sort(key=lambda one: (_group(one[0], one[1]), rates.index(one[2]), _rank(one[0])))
        cells = [self._cell(scale, *one, seed) for seed in parse_seeds(self.seeds) for one in tried]
        if self.options:
            check_options(cell.model for cell in cells)
        return cells

    def _contenders(self, scale: Scale) -> list[Contender]:
        names = tuple(MIXERS.get(name, name) for name in self.mixers) or scale.mixers
        check_names("mixers", names, NAMES)
        check_names("states", self.states, sorted({one.d_state for one in scale.contenders if one.d_state is not None}))
        return [
            contender
            for contender in scale.contenders
            if contender.mixer in names
            and (not self.states or contender.d_state in (None, *self.states))
            and (contender.mixer != "naju" or self.reparam in ("both", ("without", "with")[contender.reparam]))
        ]

    def _cell(self, scale: Scale, contender: Contender, width: int, rate: float, seed: int) -> MqarRun:
        data = Data(
            training=scale.data.training,
            test=scale.data.test,
            rewriting=self.rewriting,
            random_filler=self.filler == "random",
            n_symbols=scale.data.n_symbols,
        )
        state = [] if contender.d_state is None else [f"n{contender.d_state}"]
        more = self._more()
        kind = [*state, *(["reparam"] if contender.reparam else []), *more.marks]
        options = {**contender.options, **more.mixer_options}
        training = TrainConfig(
            steps=(self.epochs or scale.epochs) * data.epoch_steps(scale.batch_size),
            length=max(segment.length for segment in data.training),
            batch_size=scale.batch_size,
            lr=rate,
            weight_decay=0.1,
            decay_all=self.decay_all,
            warmup_ratio=0.0,
            clip=None,
            seed=seed,
            sequences=sum(segment.examples for segment in data.training),
            bf16=self.bf16,
        )
        return MqarRun(
            variant="-".join([f"d{width}", *kind, f"lr{rate:g}", *self._marks()]),
            data=data,
            model=ModelSettings(mixer=contender.mixer, mixer_options=options, d_model=width, n_layers=2),
            training=training,
            device=self.grid.chosen_device(),
        )

    def _more(self) -> Changes:
        """What no row of the paper's table chooses."""
        options = parse_options(self.options)
        if {"d_state", "gate_reparam"} & set(options):
            raise ValueError("options must leave d_state to states and gate_reparam to reparam, but have one of them")
        return Changes(mixer_options=options)

    def _marks(self) -> list[str]:
        marks = {
            "quick": self.quick,
            "rewriting": self.rewriting,
            "zeros": self.filler == "zero",
            f"{self.epochs}-epochs": self.epochs not in (None, (QUICK if self.quick else FULL).epochs),
            MATRIX_DECAY: not self.decay_all,
            "bf16": self.bf16,
        }
        return [mark for mark, differs in marks.items() if differs]


def paper_number(contender: Contender, width: int) -> float | None:
    found: float | None = PAPER.get(contender, {}).get(f"acc_d{width}")
    return found


def _group(contender: Contender, width: int) -> tuple[bool, ...]:
    """Of cells that are compared; the lowest goes first."""
    return contender.mixer not in FIRST, contender.reparam, contender.d_state != 64, width not in (128, 256)


def _rank(contender: Contender) -> int:
    return FIRST.index(contender.mixer) if contender.mixer in FIRST else len(FIRST)
