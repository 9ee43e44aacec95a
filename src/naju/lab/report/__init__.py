"""Pages from finished runs: the diagnostic suite's (the frontier, every table beside the paper's, curves, costs, and
what is missing), and one for each of the other experiments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import naju
from naju.bench.rows import RESULTS
from naju.lab.ablations import is_of_sweep
from naju.lab.diagnostics import SUCCESS, TASKS
from naju.lab.pages import render, write_page
from naju.lab.paper import diagnostics
from naju.lab.report import budgets, charts, gaps, tables
from naju.lab.report.experiments import Page, experiment_pages
from naju.lab.report.language_models import language_pages
from naju.lab.report.results import BOARDS, GROWING, Model, Reading, group_models, read_results


def write_report(runs: Path, output: Path, benchmarks: Path = RESULTS) -> Path:
    """Write `output/index.html` about a folder of runs or of copied results, with a page beside it for each experiment
    that it links to, and its first picture as `frontier.svg`, and say where it is. `benchmarks` has the rows of
    `naju bench`.

    Without any result it says so, on the page as well.
    """
    reading = read_results(runs)
    path = output / "index.html"
    pages = [*experiment_pages(reading, benchmarks), *language_pages(reading)]
    for page in pages:
        write_page(output / page.file, render("experiment.html", page=page))
    write_page(path, build_page(reading, pages))
    models = charts.comparable(_suite(reading))
    if models:
        write_page(
            output / "frontier.svg", render("figure.svg", chart=charts.frontier(models, charts.styles_of(models)))
        )
    print(f"Report on {len(reading.written)} finished runs: {path.resolve()}")
    for problem in reading.problems:
        print(f"  not in it: {problem}")
    return path


def build_page(reading: Reading, pages: Sequence[Page] = ()) -> str:
    """The diagnostic suite's."""
    models = _suite(reading)
    shown = [run for model in models for run in model.runs]
    counts = gaps.seed_counts(models)
    return render(
        "report.html",
        version=naju.__version__,
        results=shown,
        others=len(reading.written) > len(reading.results),
        pages=pages,
        problems=reading.problems,
        models=models,
        paper=diagnostics(),
        boards=BOARDS,
        growing=GROWING,
        success=SUCCESS,
        tasks=tuple(TASKS),
        counts=counts,
        missing=gaps.missing_seeds(counts),
        deviations=gaps.deviations(models),
        **(_measured(models) if models else {}),
    )


def _suite(reading: Reading) -> list[Model]:
    """Runs that are a row of a sweep by their options are on the sweep's page."""
    return group_models([one for one in reading.results if not is_of_sweep(one.mixer, one.variant)])


def _measured(models: list[Model]) -> dict[str, Any]:
    """Everything that needs at least one run."""
    drawn = charts.comparable(models)
    styles = charts.styles_of(drawn)
    boards = charts.boards_with_results(drawn)
    trained = [task for task in TASKS if any(run.curve for model in drawn for run in model.of(task))]
    return {
        "budgets": budgets.told_budgets(models),
        "variants": budgets.told_variants(models),
        "legend": [(model.label, styles[model.label]) for model in drawn],
        "not_drawn": budgets.told_models([model for model in models if model not in drawn]),
        "frontier": charts.frontier(drawn, styles),
        "corner": charts.corner(drawn, styles),
        "main": tables.main_table(models),
        "task_tables": [table for board in BOARDS if (table := tables.task_table(board, models)) is not None],
        "costs": tables.cost_table(models),
        "by_length": [charts.against_length(board, drawn, styles) for board in boards],
        "by_distance": [charts.against_distance(board, drawn, styles) for board in boards],
        "curves": [
            draw(task, drawn, styles) for draw in (charts.training_loss, charts.validation_accuracy) for task in trained
        ],
        "longest": max(model.far for model in drawn),
    }
