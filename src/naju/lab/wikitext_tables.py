"""Perplexities, pilots and costs of language models beside the paper's, one table for each text and budget.

Perplexities on another text than WikiText-103, or of another budget, do not compare with the paper's: what does is the
ratio to Naju's in the same column. Speeds are those of runs that were only timed: others may have shared a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from naju.lab.comparison import Comparison, told_seeds
from naju.lab.diagnostics import Spread, aligned
from naju.lab.paper import MeanStd, mean_std
from naju.lab.throughput import SpeedTable, told_speed, training_tables
from naju.lab.wikitext import FULL
from naju.lab.wikitext_models import CONTENDERS, PAPER, PILOTS, Shape, paper_pilot
from naju.lab.wikitext_rates import RATES, by_rate, files_of
from naju.lab.wikitext_run import WIKITEXT, millions

Result = Mapping[str, Any]
PAPER_SEEDS = 3
RIVAL = "naju"


class Perplexities(NamedTuple):
    """One model with one learning rate over its seeds. `ratio` is its mean validation over the best of Naju's of the
    same shape, here and in the paper."""

    shape: Shape
    rate: float | None
    validation: Comparison
    test: Comparison
    ratio: float | None
    paper_ratio: float | None
    parameters: int | None
    peak_gib: float | None
    diverged: int  # seeds without a number

    @property
    def label(self) -> str:
        return f"{self.shape.contender} d{self.shape.d_model} L{self.shape.length}"

    @property
    def seeds(self) -> str:
        return told_seeds(len(self.validation.values), self.diverged)


class PerplexityTable(NamedTuple):
    """Runs on one text with one budget; `is_papers` says whether both are the paper's."""

    text: str
    files: str
    tokens: int
    runs: int
    rows: tuple[Perplexities, ...]
    is_ambiguous: bool = False  # other files bear the same name

    @property
    def is_papers(self) -> bool:
        return (self.text, self.tokens) == (WIKITEXT, FULL.tokens)

    @property
    def title(self) -> str:
        return f"{_told_text(self.text, self.files, self.is_ambiguous)}, {millions(self.tokens)} tokens"


def _told_text(text: str, files: str, is_ambiguous: bool) -> str:
    return f"{text} (files {files})" if is_ambiguous else text


def perplexity_tables(results: Iterable[Result], shapes: Sequence[Shape] = ()) -> list[PerplexityTable]:
    """The paper's text and budget first. Rows are those of the results; with `shapes`, also these and a table of the
    paper's text, whether or not they have any."""
    groups = _by_text_and_budget(results)
    if shapes and not any((text, tokens) == (WIKITEXT, FULL.tokens) for text, _, tokens in groups):
        groups[WIKITEXT, "", FULL.tokens] = []
    tables = [
        PerplexityTable(text, files, tokens, len(found), tuple(_rows(found, shapes)), _is_ambiguous(text, groups))
        for (text, files, tokens), found in groups.items()
    ]
    return sorted(tables, key=lambda table: (table.runs == 0, not table.is_papers, table.title))


Groups = dict[tuple[str, str, int], list[Result]]  # by a text's name and files, and the tokens of a run


def _by_text_and_budget(results: Iterable[Result]) -> Groups:
    groups: Groups = {}
    for result in results:
        groups.setdefault((result["task"], files_of(result), result["config"]["tokens"]), []).append(result)
    return groups


def _is_ambiguous(text: str, groups: Groups) -> bool:
    return len({files for name, files, _ in groups if name == text}) > 1


def shape_of(result: Result) -> Shape:
    return Shape(str(result["mixer"]), int(result["config"]["d_model"]), int(result["config"]["length"]))


def _rows(results: Sequence[Result], shapes: Sequence[Shape]) -> list[Perplexities]:
    by_shape: dict[Shape, dict[float | None, list[Result]]] = {shape: {} for shape in shapes}
    for result in results:
        by_shape.setdefault(shape_of(result), {}).setdefault(float(result["config"]["lr"]), []).append(result)
    return [
        _row(shape, rate, runs, _rival(shape, by_shape))
        for shape, found in sorted(by_shape.items(), key=lambda group: _place(group[0]))
        for rate, runs in sorted(found.items(), key=lambda group: group[0] or 0.0) or [(None, [])]
    ]


def _place(shape: Shape) -> tuple[int, int, int]:
    return shape.d_model, shape.length, list(CONTENDERS).index(shape.contender)


def _rival(shape: Shape, by_shape: Mapping[Shape, Mapping[float | None, Sequence[Result]]]) -> Comparison:
    """Naju's validation in this shape, with its best learning rate."""
    rival = shape._replace(contender=RIVAL)
    found = [_comparison(runs, rival, "validation") for runs in by_shape.get(rival, {}).values()]
    finished = [one for one in found if one.ours is not None]
    return min(
        finished, key=lambda one: one.ours.mean if one.ours else 0.0, default=_comparison([], rival, "validation")
    )


def _row(shape: Shape, rate: float | None, found: Sequence[Result], beside: Comparison) -> Perplexities:
    validation, test = (_comparison(found, shape, name) for name in ("validation", "test"))
    newest = max(found, key=lambda result: str(result.get("when", "")), default={})
    return Perplexities(
        shape,
        rate,
        validation,
        test,
        _over(validation.ours, beside.ours),
        _over(validation.paper, beside.paper),
        newest.get("parameters"),
        newest.get("peak_memory_gib"),
        sum(result["validation_perplexity"] is None for result in found),
    )


def _comparison(found: Sequence[Result], shape: Shape, split: str) -> Comparison:
    """Over the seeds that have a number: a run may diverge, which its row tells, and a text may have no test split."""
    values = [result[f"{split}_perplexity"] for result in found]
    paper = mean_std(PAPER.get(shape, {}).get(f"{'val' if split == 'validation' else 'test'}_ppl"))
    return Comparison(tuple(value for value in values if value is not None), paper, PAPER_SEEDS)


def _over(one: Spread | MeanStd | None, other: Spread | MeanStd | None) -> float | None:
    return None if one is None or other is None else one.mean / other.mean


def told_perplexities(results: Sequence[Result]) -> str:
    """As text."""
    return "\n\n".join(map(_told, perplexity_tables(results))) or "no results yet"


def _told(table: PerplexityTable) -> str:
    own = ["seeds", "lr", "validation", "test", "over naju"]
    lines = [["", *own, *(f"paper's {name}" for name in own[2:]), "parameters", "peak GiB"]]
    for row in table.rows:
        cost = told(row.parameters, ","), told(row.peak_gib, ".2f")
        numbers = [told_number(row.validation), told_number(row.test), told(row.ratio, ".3f")]
        paper = [row.validation.told_paper(), row.test.told_paper(), told(row.paper_ratio, ".3f")]
        lines.append([row.label, row.seeds, told(row.rate, "g"), *numbers, *paper, *cost])
    return f"Perplexity on {table.title}; the paper's: {WIKITEXT}, {millions(FULL.tokens)} tokens\n{aligned(lines)}"


def told_number(number: Comparison) -> str:
    """A perplexity over seeds."""
    if number.ours is None:
        return "-"
    std = "" if number.ours.std is None else f"±{number.ours.std:.2f}"
    return f"{number.ours.mean:.2f}{std}"


def told(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


class PilotRow(NamedTuple):
    """Validation perplexity by rate, infinite where a run diverged; `best` is None before anything has finished."""

    contender: str
    ours: Mapping[float, float]
    paper: Mapping[float, float]
    best: float | None

    @property
    def is_open(self) -> bool:
        """Whether the best is the highest rate, so that a higher one may be better."""
        return self.best is not None and self.best == max(self.ours)


class PilotTable(NamedTuple):
    text: str  # with its files where others have that name too
    tokens: int
    rates: tuple[float, ...]
    rows: tuple[PilotRow, ...]

    @property
    def title(self) -> str:
        pilots = f"{self.text}, pilots of {millions(self.tokens)} tokens"
        return f"{pilots}: validation perplexity by learning rate, * the best"


def pilot_tables(results: Iterable[Result]) -> list[PilotTable]:
    """Every contender that has a pilot here or in the paper, in every table; without results, the paper's alone."""
    groups = _by_text_and_budget(results) or {(WIKITEXT, "", FULL.pilot_tokens): []}
    return [
        _pilot_table(_told_text(text, files, _is_ambiguous(text, groups)), tokens, found)
        for (text, files, tokens), found in groups.items()
    ]


def _pilot_table(text: str, tokens: int, results: Sequence[Result]) -> PilotTable:
    names = [name for name in CONTENDERS if name in PILOTS or any(result["mixer"] == name for result in results)]
    rows = [_pilot_row(name, [result for result in results if result["mixer"] == name]) for name in names]
    rates = sorted({rate for row in rows for rate in (*row.ours, *row.paper)})
    return PilotTable(text, tokens, tuple(rates), tuple(rows))


def _pilot_row(contender: str, results: Sequence[Result]) -> PilotRow:
    ours = by_rate(results)
    ladder = sorted({*RATES, *(thousandth / 1000 for thousandth in range(5, 9)), *ours})
    paper = {rate: number for rate in ladder if (number := paper_pilot(contender, rate)) is not None}
    finished = [rate for rate in ours if math.isfinite(ours[rate])]
    return PilotRow(contender, ours, paper, min(finished, key=lambda rate: ours[rate], default=None))


def told_pilots(results: Sequence[Result]) -> str:
    """As text: validation perplexity at each rate, the best with a star, and the paper's after a bar."""
    return "\n\n".join(map(_told_pilots, pilot_tables(results))) if results else "no results yet"


def _told_pilots(table: PilotTable) -> str:
    lines = [["", *(f"{rate:g}" for rate in table.rates)]]
    lines += [[row.contender, *(told_pilot(row, rate) for rate in table.rates)] for row in table.rows]
    return f"{table.title}; after a bar the paper's: {WIKITEXT}, {millions(FULL.pilot_tokens)} tokens\n{aligned(lines)}"


def told_pilot(row: PilotRow, rate: float) -> str:
    ours = _told_loss(row.ours.get(rate)) + ("*" if rate == row.best else "")
    return f"{ours} | {row.paper[rate]:.2f}" if rate in row.paper else ours


def _told_loss(loss: float | None) -> str:
    if loss is None:
        return "-"
    return "diverged" if math.isinf(loss) else f"{loss:.2f}"


def cost_tables(results: Iterable[Result]) -> list[SpeedTable]:
    """Throughput and memory of the timed runs, by micro-batch, as `naju reproduce throughput` shows its own."""
    by_size: dict[int, list[dict[str, Any]]] = {}
    for result in results:
        if "diverged" not in result:
            by_size.setdefault(micro_batch(result), []).append(_speed_row(result))
    return [
        table._replace(title=f"{table.title}, micro-batches of {size:,} tokens") if size else table
        for size, rows in (sorted(by_size.items()) or [(0, [])])
        for table in training_tables(rows)
    ]


def micro_batch(result: Result) -> int:
    """Its tokens; 0 where a file does not tell."""
    size = result["config"].get("micro_tokens")
    return size if isinstance(size, int) else 0


def _speed_row(result: Result) -> dict[str, Any]:
    """A result as a row of `naju bench training`."""
    name = "transformer-flash" if result["mixer"] == "transformer" else result["mixer"]
    peak = result["peak_memory_gib"]
    return {
        "model": name,
        "d_model": result["config"]["d_model"],
        "mode": _mode(result["config"]),
        "length": result["config"]["length"],
        "tokens_per_s": result["tokens_per_second"],
        "peak_bytes": None if peak is None else peak * 2**30,
        "machine": {"accelerator": result["machine"]["accelerator"] or result["machine"]["processor"]},
    }


def _mode(config: Mapping[str, Any]) -> str:
    ways = [way for way, key in (("compiled", "compile"), ("graph", "cuda_graph")) if config.get(key)]
    return " ".join(ways) or "eager"


def told_costs(results: Sequence[Result]) -> str:
    """As text."""
    texts = ", ".join(sorted({result["task"] for result in results}))
    return "\n\n".join([*map(told_speed, cost_tables(results)), f"on {texts}"]) if results else "no results yet"
