"""Charts: axes with readable ticks, values in their place, labels that do not hide each other."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from written_results import result

from naju.lab.pages import Bars, Chart, Line, Point, linear, logarithmic, named
from naju.lab.pages.chart import colour, dash, outline
from naju.lab.report.charts import styles_of
from naju.lab.report.results import group_models, parse_result

numbers = st.floats(-1e6, 1e6, allow_nan=False)


@given(low=numbers, size=st.floats(1e-3, 1e6))
def test_linear_ticks_are_few_and_inside(low, size):
    assume(size > 1e-6 * abs(low))
    scale = linear(low, low + size)
    values = [tick.value for tick in scale.ticks]
    assert 2 <= len(values) <= 7
    assert values == sorted(values)
    assert all(low - 1e-6 * size <= value <= low + size * (1 + 1e-6) for value in values)


def test_ticks_are_round_numbers():
    assert [tick.label for tick in linear(-0.03, 1.03, parts=6).ticks] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert [tick.label for tick in linear(0, 46875).ticks] == ["0", "10k", "20k", "30k", "40k"]
    assert [tick.label for tick in logarithmic([0.02, 3.0]).ticks] == ["0.01", "0.1", "1", "10"]
    assert [tick.label for tick in logarithmic([3e-5, 0.2]).ticks] == ["1e-5", "1e-4", "1e-3", "0.01", "0.1", "1"]
    assert [tick.label for tick in logarithmic([64, 256], ticks=[64, 128, 256]).ticks] == ["64", "128", "256"]


def test_an_axis_without_extent_gets_one():
    assert linear(2.0, 2.0).high > 2.0
    assert logarithmic([1.0]).high == 10.0


@given(values=st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=6), log=st.booleans())
def test_scales_keep_the_order(values, log):
    scale = logarithmic(values) if log else linear(min(values), max(values))
    shares = [scale.share(value) for value in sorted(values)]
    assert shares == sorted(shares)
    assert all(0 <= share <= 1 for share in shares)


def test_what_lies_beyond_an_axis_is_drawn_at_its_end():
    assert logarithmic([0.1, 1.0]).share(0.0) == 0.0
    assert linear(0, 1).share(7.0) == 1.0


@pytest.mark.parametrize("told_by", [outline, dash], ids=["marker", "dash"])
def test_no_two_of_many_styles_look_alike(told_by):
    """Training curves have no markers, and points no dashes."""
    assert len({(colour(style), told_by(style)) for style in range(29)}) == 29


def test_the_first_style_shares_neither_colour_nor_marker():
    for look in (colour, outline):
        assert [style for style in range(29) if look(style) == look(0)] == [0]


def drawn(mixer, variant="default"):
    return parse_result(result(mixer, "T2", 1, variant=variant))


def test_all_models_of_a_report_look_different_with_and_without_markers():
    variants = [
        drawn(mixer, variant) for mixer in ("naju", "mlstm", "coupled") for variant in ("default", "hidden-head")
    ]
    styles = styles_of(group_models(variants))
    assert {"xLSTM (hidden-head)", "Transformer 3 × epochs", "Attention"} <= set(styles)
    for told_by in (outline, dash):
        assert len({(colour(style), told_by(style)) for style in styles.values()}) == len(styles)


def test_a_known_name_looks_the_same_beside_whatever_else_was_run():
    alone = styles_of(group_models([drawn("coupled")]))
    crowd = styles_of(group_models([drawn("coupled"), drawn("mlstm"), drawn("mlstm", "larger"), drawn("gla", "wide")]))
    assert crowd["Coupled"] == alone["Coupled"]
    assert colour(alone["Coupled"]) != colour(alone["xLSTM"])
    assert styles_of(group_models([drawn("coupled", "quick")]))["Coupled (quick)"] == alone["Coupled"]


def crowded(count):
    angles = [2 * math.pi * k / count for k in range(count)]
    return [
        Point(title="", label=f"model {k}", style=k, x=0.1 + 0.02 * math.cos(a), y=0.1 + 0.02 * math.sin(a))
        for k, a in enumerate(angles)
    ]


def with_points(points):
    return Chart(title="", x_label="", y_label="", x=linear(0, 1), y=linear(0, 1), points=points, width=760, height=560)


def test_labels_without_any_room_are_left_out():
    assert len(with_points(crowded(8)).notes()) == 8
    assert 5 < len(with_points(crowded(200)).notes()) < 60


@pytest.mark.parametrize("count", [2, 5, 8])
def test_labels_of_crowded_points_do_not_overlap(count):
    chart = with_points(crowded(count))
    boxes = []
    for note in chart.notes():
        width = 6.1 * len(note.point.label)
        left = note.x - {"start": 0, "middle": width / 2, "end": width}[note.anchor]
        boxes.append((left, note.y - 10, left + width, note.y + 2))
    for k, (left, top, right, bottom) in enumerate(boxes):
        assert left >= 0
        assert right <= chart.width
        assert top >= 0
        assert bottom <= chart.height
        for other in boxes[:k]:
            assert left >= other[2] or right <= other[0] or top >= other[3] or bottom <= other[1]


def test_lines_bands_and_bars_lie_where_the_data_are():
    line = Line(title="seeds", style=0, points=[(0, 0.0), (1, 1.0)], band=[(0, 0.0, 0.5), (1, 0.5, 1.0)])
    bars = Bars([0, 0.5, 1], [1.0, 0.25])
    chart = Chart(title="", x_label="", y_label="", x=linear(0, 1), y=linear(0, 1), lines=[line], bars=bars)
    left, right = chart.left, chart.width - chart.right
    bottom, top = chart.height - chart.bottom, chart.top
    middle = (bottom + top) / 2
    assert chart.path(line.points) == f"{float(left)},{float(bottom)} {float(right)},{float(top)}"
    corners = [tuple(map(float, corner.split(","))) for corner in chart.area(line.band).split()]
    assert corners == [(left, bottom), (right, middle), (right, top), (left, middle)]
    assert chart.py(bars.heights[0]) == top


def test_categories_stand_apart():
    scale = named(["far", "middle", "near"])
    shares = [scale.share(tick.value) for tick in scale.ticks]
    assert shares[0] > 0.05
    assert shares[2] < 0.95
    assert shares[1] == pytest.approx(0.5)
