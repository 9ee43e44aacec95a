"""Multi-query recall beside the paper's numbers: the best of the learning rates for each model and size.

The best rate is the one with the best validation at the end, and its test accuracy is shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from naju.lab.comparison import Comparison, told_seeds
from naju.lab.diagnostics import aligned
from naju.lab.mqar import EPOCHS, FULL, NAMES, PAPER, WIDTHS, Contender, Mqar, paper_number
from naju.lab.mqar_run import rebound_keys, slice_name
from naju.lab.paper import mean_std
from naju.tasks.mqar import TEST, TRAINING, Segment

HARDEST = slice_name(TEST[-1])


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
    """One for each kind of data and budget, the paper's first, then those that depart from it least."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for result in results:
        config = result["config"]
        groups.setdefault((_kind(config), str(config["test_segments"])), []).append(result)
    tables = [_table(title, found) for (title, _), found in groups.items()]
    return sorted(tables, key=lambda table: (len(table.departures), table.title))


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
