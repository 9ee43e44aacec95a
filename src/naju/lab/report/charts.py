"""The report's charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from naju.lab.pages import Chart, Line, Point, linear, logarithmic, named
from naju.lab.paper import PaperModel, diagnostics
from naju.lab.report.results import BOARDS, Model, Result, Seeds, family
from naju.mixers import MIXERS
from naju.tasks import TASKS

Styles = Mapping[str, int]
Curves = Mapping[tuple[str, int | str], Sequence[tuple[float, float]]]  # of a label and a seed
# Accuracies, with room for a marker at either end; and the best of them.
SHARES = linear(-0.03, 1.03, parts=6)
NEARLY_RIGHT = 0.9
BEST_SHARES = linear(NEARLY_RIGHT, 1.004, parts=6)


def comparable(models: Sequence[Model]) -> list[Model]:
    """Those of the paper's training length where there are any: a point of another says another thing."""
    papers = [model for model in models if model.far == diagnostics().lengths[-1]]
    return papers or list(models)


def styles_of(models: Sequence[Model]) -> dict[str, int]:
    """A style a label: a model looks the same in every chart, and as the paper's row about it. Known names have theirs
    in every report.

    A model whose size or variant has no such name looks like one of its mixer, unless another has that look already.
    """
    known, present = _known_labels(), {model.label for model in models}
    styles = {label: style for style, label in enumerate(known)}
    free = {label: mixer for label, mixer in known.items() if label not in present}
    for model in (model for model in models if model.label not in styles):
        alike = next((label for label, mixer in free.items() if mixer == model.mixer), None)
        if alike is None:
            styles[model.label] = max(styles.values()) + 1
        else:
            styles[model.label] = styles[alike]
            free.pop(alike)
    return styles


def _known_labels() -> dict[str, str]:
    """The paper's rows, then the mixers that it has no row of; each with its mixer."""
    rows = {row.label: row.mixer for row in diagnostics().models}
    return rows | {family(mixer): mixer for mixer in MIXERS if mixer not in rows.values()}


def frontier(models: Sequence[Model], styles: Styles) -> Chart:
    """Retention against overwriting at four times the training length; arrows lead from the paper's points to ours."""
    ours = {model.label: point for model in models if (point := _our_point(model, styles)) is not None}
    theirs = {row.label: _paper_point(row, styles) for row in diagnostics().models}
    beside = {model.label: model.paper.label for model in models if model.paper and model.label in ours}
    arrows = [((theirs[row].x, theirs[row].y), (ours[label].x, ours[label].y)) for label, row in beside.items()]
    return Chart(
        title="The retention–overwriting frontier",
        x_label="retention: T2 at four times the training length",
        y_label="overwriting: T4 at the same length",
        x=SHARES,
        y=SHARES,
        points=[*theirs.values(), *ours.values()],
        arrows=arrows,
        width=760,
        height=560,
    )


def corner(models: Sequence[Model], styles: Styles) -> Chart | None:
    """Our points in the frontier's best corner, where they would lie on each other; None where less than two are."""
    points = [point for model in models if (point := _our_point(model, styles)) is not None]
    points = [_within_corner(point) for point in points if min(point.x, point.y) >= NEARLY_RIGHT]
    if len(points) < 2:
        return None
    return Chart(
        title=f"The same above {NEARLY_RIGHT}, ours",
        x_label="retention",
        y_label="overwriting",
        x=BEST_SHARES,
        y=BEST_SHARES,
        points=points,
        width=760,
        height=420,
    )


def _within_corner(point: Point) -> Point:
    """Whiskers end at the axes."""
    x, y = (ends and (max(ends[0], NEARLY_RIGHT), ends[1]) for ends in (point.x_range, point.y_range))
    return replace(point, x_range=x, y_range=y)


def against_length(board: str, models: Sequence[Model], styles: Styles) -> Chart:
    lines = [_length_line(board, model, styles[model.label]) for model in models if model.lengths(board)]
    lengths = sorted({length for model in models for length in model.lengths(board)})
    return Chart(
        title=board,
        x_label="test length",
        y_label="accuracy",
        x=logarithmic(lengths, ticks=lengths),
        y=SHARES,
        lines=lines,
    )


def against_distance(board: str, models: Sequence[Model], styles: Styles) -> Chart:
    """At four times the training length, bucket by bucket as the task names them."""
    buckets = TASKS[board.split()[0]].groups
    lines = []
    for model in models:
        measured = [model.at(board, model.far, bucket) for bucket in buckets]
        lines.append(_band_line(model.label, styles[model.label], list(enumerate(measured))))
    return Chart(
        title=board,
        x_label="where the answer was written",
        y_label="accuracy",
        x=named(buckets),
        y=SHARES,
        lines=[line for line in lines if line.points],
    )


def training_loss(task: str, models: Sequence[Model], styles: Styles) -> Chart:
    losses: Curves = {
        (model.label, run.seed): [(step, loss) for step, loss, _ in run.curve]
        for model in models
        for run in model.of(task)
    }
    # A loss of exactly zero has no place on this axis and is drawn at its lower end.
    positive = [loss for curve in losses.values() for _, loss in curve if loss > 0]
    return Chart(
        title=f"{task}: training loss",
        x_label="step",
        y_label="loss",
        x=linear(0.0, _last_step(task, models)),
        y=logarithmic(positive or [1.0]),
        lines=_run_lines(losses, styles),
    )


def validation_accuracy(task: str, models: Sequence[Model], styles: Styles) -> Chart:
    curves: Curves = {
        (model.label, run.seed): [(step, share) for step, _, share in run.curve if share is not None]
        for model in models
        for run in model.of(task)
    }
    return run_curves(f"{task}: validation accuracy at the training length", curves, styles)


def run_curves(title: str, curves: Curves, styles: Styles) -> Chart:
    """Accuracies against steps, a line a run."""
    last = max((step for curve in curves.values() for step, _ in curve), default=1.0)
    return Chart(
        title=title, x_label="step", y_label="accuracy", x=linear(0.0, last), y=SHARES, lines=_run_lines(curves, styles)
    )


def boards_with_results(models: Sequence[Model]) -> list[str]:
    return [board for board in BOARDS if any(model.lengths(board) for model in models)]


def _our_point(model: Model, styles: Styles) -> Point | None:
    retention, overwriting = model.at("T2", model.far), model.at("T4", model.far)
    if retention is None or overwriting is None:
        return None
    return Point(
        title=f"{model.label}, ours: T2 {_told(retention)}, T4 {_told(overwriting)}",
        label=model.label,
        style=styles[model.label],
        x=retention.mean,
        y=overwriting.mean,
        x_range=(retention.worst, retention.best),
        y_range=(overwriting.worst, overwriting.best),
    )


def _paper_point(row: PaperModel, styles: Styles) -> Point:
    retention, overwriting = (row.accuracy[task][diagnostics().lengths[-1]] for task in ("T2", "T4"))
    told = ", ".join(f"{task} {cell.mean} ± {cell.std}" for task, cell in (("T2", retention), ("T4", overwriting)))
    return Point(
        title=f"{row.label}, the paper: {told}",
        label=row.label,
        style=styles[row.label],
        x=retention.mean,
        y=overwriting.mean,
        hollow=True,
    )


def _told(seeds: Seeds) -> str:
    return f"{seeds.mean:.3f} (worst {seeds.worst:.3f}, seeds {seeds.count})"


def _length_line(board: str, model: Model, style: int) -> Line:
    return _band_line(model.label, style, [(length, model.at(board, length)) for length in model.lengths(board)])


def _band_line(label: str, style: int, measured: Sequence[tuple[float, Seeds | None]]) -> Line:
    seen = [(x, seeds) for x, seeds in measured if seeds is not None]
    return Line(
        title=label,
        style=style,
        points=[(x, seeds.mean) for x, seeds in seen],
        band=[(x, seeds.worst, seeds.best) for x, seeds in seen],
        marked=True,
    )


def _run_lines(curves: Curves, styles: Styles) -> list[Line]:
    return [
        Line(title=f"{label}, seed {seed}", style=styles[label], points=curve)
        for (label, seed), curve in curves.items()
        if curve
    ]


def _last_step(task: str, models: Sequence[Model]) -> float:
    runs: list[Result] = [run for model in models for run in model.of(task)]
    return max((run.steps for run in runs), default=1)
