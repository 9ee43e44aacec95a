"""The pages about language models: perplexities by context, width and gate rank, pilots, and what training costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from naju.lab.comparison import Comparison
from naju.lab.report.experiments import Cell, Page, Row, Table, doc_of, speed_table_of
from naju.lab.report.results import Reading
from naju.lab.throughput import RIVAL
from naju.lab.wikitext import (
    FULL,
    LanguageGateRank,
    LanguageGrid,
    LrPilot,
    WikitextContext,
    WikitextEfficiency,
    WikitextWidth,
)
from naju.lab.wikitext_models import GATE_RANKS, Shape, paper_rows
from naju.lab.wikitext_rates import chosen_rate
from naju.lab.wikitext_run import LANGUAGE, PILOT, SPEED, WIKITEXT, millions
from naju.lab.wikitext_tables import (
    PAPER_SEEDS,
    Perplexities,
    PerplexityTable,
    PilotRow,
    PilotTable,
    cost_tables,
    micro_batch,
    perplexity_tables,
    pilot_tables,
    shape_of,
    told,
    told_number,
    told_pilot,
)

COMPARABLE = (
    f"The paper's numbers are of {WIKITEXT} with {millions(FULL.tokens)} tokens. On another text or with fewer tokens, "
    "perplexities compare with each other and not with these; the ratio to Naju's of the same size stands beside the "
    "paper's."
)


class Section(NamedTuple):
    """A page of perplexities: its command, the paper's table, and which runs belong to it. Titles do not name a text:
    the tables do."""

    command: str
    title: str
    options: type[LanguageGrid]
    table: str
    has: Callable[[Shape], bool]


SECTIONS = (
    Section(
        "wikitext-context",
        "Language models by training context",
        WikitextContext,
        "tab:wt103",
        lambda shape: shape.d_model == FULL.d_model,
    ),
    Section(
        "wikitext-width",
        "Language models by width",
        WikitextWidth,
        "tab:wt103_width",
        lambda shape: shape.length == FULL.length,
    ),
    Section(
        "gate-rank",
        "Low-rank gate projections in Naju as a language model",
        LanguageGateRank,
        "tab:gate_rank",
        lambda shape: shape.contender in GATE_RANKS and shape[1:] == (FULL.d_model, FULL.length),
    ),
)


def language_pages(reading: Reading) -> list[Page]:
    return [*(_perplexity_page(section, reading) for section in SECTIONS), _pilot_page(reading), _cost_page(reading)]


def _perplexity_page(section: Section, reading: Reading) -> Page:
    shapes = tuple(paper_rows(section.table))
    own = [result for result in reading.of(LANGUAGE) if section.has(shape_of(result))]
    tables = perplexity_tables(own, shapes)
    whole = sum(table.runs for table in tables if table.is_papers)
    standing = f"{whole} of {PAPER_SEEDS * len(shapes)} runs on {WIKITEXT}, {len(own)} on all texts"
    notes = (COMPARABLE, *_rate_notes(tables, reading))
    made = tuple(map(_perplexity_table, tables))
    return Page(section.command, section.title, doc_of(section.options), standing, made, notes)


def _rate_notes(tables: list[PerplexityTable], reading: Reading) -> list[str]:
    """Where the learning rates of the runs come from, as the pilots stand now."""
    notes = []
    for table in tables:
        used = {(row.shape.contender, row.rate) for row in table.rows if row.rate is not None}
        for contender, rate in sorted(used):
            chosen = chosen_rate(contender, table.text, reading.of(PILOT), table.files)
            origin = chosen.origin if chosen.value == rate else f"not the {chosen.value:g} that is {chosen.origin}"
            notes.append(f"{contender} on {table.text}: learning rate {rate:g}, {origin}.")
    return list(dict.fromkeys(notes))


def _perplexity_table(table: PerplexityTable) -> Table:
    headings = ("seeds", "rate", "validation", "test", "validation over Naju's", "parameters", "peak GiB")
    return Table(table.title, headings, tuple(_perplexity_row(row, differs=table.is_papers) for row in table.rows))


def _perplexity_row(row: Perplexities, *, differs: bool) -> Row:
    ratio = Cell((told(row.ratio, ".3f"), *([f"paper {row.paper_ratio:.3f}"] if row.paper_ratio is not None else [])))
    cost = told(row.parameters, ","), told(row.peak_gib, ".2f")
    numbers = [_perplexity(number, differs=differs) for number in (row.validation, row.test)]
    known = (Cell((row.seeds,)), Cell((told(row.rate, "g"),)))
    return Row(row.label, (*known, *numbers, ratio, *(Cell((fact,)) for fact in cost)))


def _perplexity(number: Comparison, *, differs: bool) -> Cell:
    lines = [told_number(number)]
    lines += [f"paper {number.told_paper()}"] if number.paper is not None else []
    lines += [number.told_difference(2)] if differs and number.difference is not None else []
    return Cell(tuple(lines))


def _pilot_page(reading: Reading) -> Page:
    tables = pilot_tables(reading.of(PILOT))
    still = [f"{row.contender} on {table.text}" for table in tables for row in table.rows if row.is_open]
    notes = (
        f"The paper's pilots have {millions(FULL.pilot_tokens)} tokens of {WIKITEXT}. Validation alone decides.",
        "The paper trains Mamba with N = 64 at 0.004, though its best pilot was at 0.008 and the highest; here every "
        "model takes its own best.",
        *(
            [f"The best rate is the highest tried, so that a higher one may be better: {', '.join(still)}."]
            * bool(still)
        ),
    )
    standing = f"{len(reading.of(PILOT))} pilots"
    made = tuple(map(_pilot_table, tables))
    return Page("lr-pilot", "Learning rates of language models", doc_of(LrPilot), standing, made, notes)


def _pilot_table(table: PilotTable) -> Table:
    rows = tuple(Row(row.contender, tuple(_pilot_cell(row, rate) for rate in table.rates)) for row in table.rows)
    return Table(table.title, tuple(f"{rate:g}" for rate in table.rates), rows)


def _pilot_cell(row: PilotRow, rate: float) -> Cell:
    ours, *paper = told_pilot(row, rate).split(" | ")
    return Cell((ours, *(f"paper {number}" for number in paper)))


def _cost_page(reading: Reading) -> Page:
    results = reading.of(SPEED)
    tables = cost_tables(results)
    machines = sorted({machine for table in tables for machine in table.machines})
    texts = sorted({result["task"] for result in results})
    sizes = sorted({size for result in results if (size := micro_batch(result))})
    told_sizes = " and ".join(f"{size:,}" for size in sizes) or "none yet"
    notes = (
        f"The paper's machine is one RTX 5090; ours: {', '.join(machines) or 'nothing measured yet'}. In brackets "
        f"are ratios to {RIVAL}'s, which compare; tokens a second do not.",
        f"Read: {', '.join(texts) or 'nothing yet'}. Updates of {FULL.tokens_per_update:,} tokens in micro-batches of "
        f"{FULL.micro_tokens:,} in the paper and of {told_sizes} here; {FULL.timed} updates timed after {FULL.warm} "
        "others. Logits are made and forgotten in pieces here, which takes less memory, and torch.compile has its "
        "default mode, where the paper's was max-autotune.",
    )
    made = tuple(map(speed_table_of, tables))
    standing = f"{len(results)} timed runs"
    about = doc_of(WikitextEfficiency)
    return Page("wikitext-efficiency", "What training a language model costs", about, standing, made, notes)
