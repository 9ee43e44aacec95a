"""Multi-query recall as the paper reports it: the best of four learning rates for each model and size.

Two mixer blocks for every model, no MLP, tied embeddings; the paper says only "the same two-layer harness". Embeddings
begin with a deviation of 0.02, mixers as they do everywhere here. The best rate is the one with the best validation at
the end, and its test accuracy is shown.

The weight decay of 0.1 is on every parameter, as in Zoology's code, which hands all of them to AdamW; the paper leaves
that open. At these rates it is strong: a gate's bias of 5 would by decay alone be 0.2 after 8 epochs at 1e-2. Without
`decay_all` it is on matrices alone (`naju.training.optimizer.is_matrix`), not on biases, norms, D and A_log.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from naju.lab.comparison import Comparison, told_seeds
from naju.lab.diagnostic_run import ModelSettings
from naju.lab.diagnostics import Changes, aligned
from naju.lab.mqar_run import Data, MqarRun, rebound_keys, slice_name
from naju.lab.options import MATRIX_DECAY, PAPER_NAMES, GridOptions, check_names, check_options, parse_seeds
from naju.lab.paper import mean_std, paper_tables
from naju.lm.config import parse_options
from naju.tasks.mqar import TEST, TRAINING, Segment
from naju.training import TrainConfig

RATES = (1e-3, 3.16e-3, 1e-2, 3.16e-2)
WIDTHS = (64, 128, 256, 512)
EPOCHS = 32
HARDEST = slice_name(TEST[-1])
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
    """Instead of 32 epochs, for all alike."""
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


class RecallRow(NamedTuple):
    """A model of one width: its best rate a seed, and what the test of that run says."""

    contender: Contender
    width: int
    rates: dict[int, float]  # seed -> best rate, of those that have one
    diverged: int  # seeds that have none
    tried: int  # how many different rates have finished, with the seed that has the fewest
    overall: Comparison
    slices: tuple[Comparison, ...]  # the hardest last

    @property
    def hardest(self) -> Comparison:
        return self.slices[-1]

    @property
    def told_rates(self) -> str:
        """The best ones."""
        none = "diverged" if self.diverged else "-"
        return ", ".join(f"{rate:g}" for rate in dict.fromkeys(self.rates.values())) or none


class RecallTable(NamedTuple):
    """Runs on the same data with the same budget; `departures` says in words where these are not the paper's, `note`
    what its numbers are to be read against."""

    title: str
    departures: tuple[str, ...]
    slices: tuple[str, ...]
    rows: tuple[RecallRow, ...]
    note: str = ""

    @property
    def is_papers(self) -> bool:
        return not self.departures

    @property
    def hardest(self) -> str:
        return self.slices[-1]


def recall_tables(results: Iterable[Mapping[str, Any]]) -> list[RecallTable]:
    """One for each kind of data and budget, the paper's first."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for result in results:
        config = result["config"]
        groups.setdefault((_kind(config), str(config["test_segments"])), []).append(result)
    tables = [_table(title, found) for (title, _), found in groups.items()]
    return sorted(tables, key=lambda table: (not table.is_papers, table.title))


def papers_table(tables: Sequence[RecallTable]) -> RecallTable:
    """Of these the one at the paper's budget, with all of the paper's rows, whether ours stand beside them or not."""
    empty = RecallTable(_kind(Mqar().cells()[0].to_json()), (), tuple(map(slice_name, TEST)), ())
    table = next((table for table in tables if table.is_papers and table.slices == empty.slices), empty)
    own = {(row.contender, row.width) for row in table.rows}
    all_papers = [(contender, width) for contender in PAPER for width in WIDTHS if paper_number(contender, width)]
    absent = [_row(*model, table.slices, [], beside_paper=True) for model in all_papers if model not in own]
    return table._replace(rows=tuple(sorted([*table.rows, *absent], key=_row_place)))


def told_mqar(results: Sequence[Mapping[str, Any]]) -> str:
    """As text."""
    return "\n\n".join(map(_told, recall_tables(results))) or "no results yet"


def _kind(config: Mapping[str, Any]) -> str:
    """Data and budget in words."""
    keys = "keys bound twice, the last value counts" if config["rewriting"] else "each key bound once"
    filler = "random filler" if config["random_filler"] else "zero filler"
    epochs = f"{config['epochs']:g} epoch{'' if config['epochs'] == 1 else 's'}"
    budget = f"{config['sequences']:,} sequences, at most {epochs}"
    kind = f"{keys}, {filler}, {config['n_symbols']} symbols, {budget}, {'bfloat16' if config['bf16'] else 'float32'}"
    return kind if _decays_all(config) else f"{kind}, weight decay on matrices alone"


def _decays_all(config: Mapping[str, Any]) -> bool:
    return bool(config.get("decay_all", True))


def _departures(config: Mapping[str, Any]) -> tuple[str, ...]:
    sequences = sum(segment.examples for segment in TRAINING)
    told = {
        "keys bound twice, where the paper binds each once": config["rewriting"],
        "zero filler instead of random": not config["random_filler"],
        f"{config['n_symbols']:,} symbols instead of {FULL.data.n_symbols:,}": config["n_symbols"]
        != FULL.data.n_symbols,
        f"{config['sequences']:,} sequences instead of {sequences:,}": config["sequences"] != sequences,
        f"{config['epochs']:g} epochs instead of {EPOCHS}": config["epochs"] != EPOCHS,
        "bfloat16 instead of float32": config["bf16"],
        "weight decay on matrices alone instead of on everything": not _decays_all(config),
    }
    return tuple(sentence for sentence, departs in told.items() if departs)


def _table(title: str, results: Sequence[Mapping[str, Any]]) -> RecallTable:
    config = results[0]["config"]
    groups: dict[tuple[Contender, int], list[Mapping[str, Any]]] = {}
    for result in results:
        groups.setdefault((_contender_of(result["config"]), result["config"]["d_model"]), []).append(result)
    segments = [Segment(*segment) for segment in config["test_segments"]]
    if not segments:
        raise ValueError("test_segments must be some, but are none")
    slices = tuple(map(slice_name, segments))
    rows = [_row(*model, slices, found, beside_paper=not config["rewriting"]) for model, found in groups.items()]
    note = _told_last_value(segments) if config["rewriting"] else ""
    return RecallTable(title, _departures(config), slices, tuple(sorted(rows, key=_row_place)), note)


def _contender_of(config: Mapping[str, Any]) -> Contender:
    options = dict(config["mixer_options"])
    d_state, reparam = options.pop("d_state", None), bool(options.pop("gate_reparam", False))
    more = tuple(f"{name}={json.dumps(value)}" for name, value in sorted(options.items()))
    return Contender(config["mixer"], d_state, reparam, more)


def last_value_shares(segments: Sequence[Segment]) -> tuple[float, ...]:
    """In each slice with keys bound again, what a model gets that ignores the key and answers the value of the last
    pair: it is right for one key of all that are asked for."""
    return tuple(1 / rebound_keys(segment) for segment in segments)


def _told_last_value(segments: Sequence[Segment]) -> str:
    shares, examples = last_value_shares(segments), [segment.examples for segment in segments]
    mean = sum(share * count for share, count in zip(shares, examples, strict=True)) / sum(examples)
    by_slice = ", ".join(f"{share:.3f}" for share in shares)
    return (
        "A model that ignores the key and always answers the value of the last pair gets one over the number of keys: "
        f"{mean:.3f} over all slices, {by_slice} slice by slice."
    )


def _row(
    contender: Contender,
    width: int,
    slices: tuple[str, ...],
    results: Sequence[Mapping[str, Any]],
    *,
    beside_paper: bool,
) -> RecallRow:
    best: dict[int, Mapping[str, Any]] = {}
    tried: dict[int, set[float]] = {}
    for result in sorted(results, key=_validation, reverse=True):
        if "diverged" not in result:
            best.setdefault(result["seed"], result)
        tried.setdefault(result["seed"], set()).add(result["config"]["lr"])
    paper = PAPER.get(contender, {}) if beside_paper else {}
    known = {"all": paper.get(f"acc_d{width}"), HARDEST: paper.get("kv256_acc_d512") if width == 512 else None}
    overall, *by_slice = (Comparison(_shares(best, part), mean_std(known.get(part))) for part in ("all", *slices))
    return RecallRow(
        contender,
        width,
        {seed: run["config"]["lr"] for seed, run in sorted(best.items())},
        len(tried) - len(best),
        min(map(len, tried.values()), default=0),
        overall,
        tuple(by_slice),
    )


def _validation(result: Mapping[str, Any]) -> float:
    return -1.0 if "diverged" in result else float(result["final_validation"])


def _shares(best: Mapping[int, Mapping[str, Any]], part: str) -> tuple[float, ...]:
    """In the order of seeds."""
    return tuple(float(run["accuracy"][part]["all"]) for _, run in sorted(best.items()))


def _row_place(row: RecallRow) -> tuple[Any, ...]:
    known = NAMES.index(row.contender.mixer) if row.contender.mixer in NAMES else len(NAMES)
    return row.contender.d_state or 0, known, row.contender.reparam, row.contender.more, row.width


def _told(table: RecallTable) -> str:
    measured = ["all", table.hardest, "paper all", "paper hardest", "difference"]
    lines = [["", "d_model", "seeds", "rates", "best", *measured]]
    for row in table.rows:
        known = [str(row.overall), str(row.hardest), row.overall.told_paper(3), row.hardest.told_paper(3)]
        seeds = [str(row.width), told_seeds(len(row.rates), row.diverged), str(row.tried), row.told_rates]
        lines.append([row.contender.label, *seeds, *known, row.overall.told_difference()])
    return "\n".join([f"MQAR: {table.title}", aligned(lines), *([table.note] if table.note else [])])
