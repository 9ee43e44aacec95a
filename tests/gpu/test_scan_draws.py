"""What the scans drawn for a GPU cover, which needs no GPU to know."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from scan_draws import AXES, CASES_EACH, DEFAULT, GPU_BACKENDS, LENGTHS, Case, draws, fits

from numerics import REGIMES

CASES = draws()
VALUES = {"regime": tuple(REGIMES), "length": LENGTHS, **AXES}


def of(backend: str, **wanted: Any) -> list[Case]:
    return [case for case in CASES if {**wanted, "backend": backend}.items() <= case.items()]


def met(cases: Iterable[Case], *axes: str) -> set[tuple[Any, ...]]:
    return {tuple(case[axis] for axis in axes) for case in cases}


def test_the_draw_is_the_same_in_every_process() -> None:
    """Workers that share the tests must see the same ones."""
    assert draws() == CASES
    assert all(map(fits, CASES))


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_every_backend_meets_every_value(backend: str) -> None:
    assert len(of(backend)) == CASES_EACH
    for axis, values in VALUES.items():
        assert met(of(backend), axis) == {(value,) for value in values}, axis


@pytest.mark.parametrize(
    "axes",
    [("regime", "length"), ("regime", "dtype"), ("length", "dtype"), ("length", "d_state"), ("dtype", "d_state")],
)
def test_values_of_different_axes_meet(axes: tuple[str, str]) -> None:
    """A case's place in the table must not decide several of its values at once."""
    assert met(CASES, *axes) == set(itertools.product(*(VALUES[axis] for axis in axes)))


def test_a_quarter_of_the_usual_backends_cases_have_the_layers_default_sizes() -> None:
    assert 0.2 <= len(of("triton_chunked", **DEFAULT)) / CASES_EACH <= 0.3


def test_the_longest_sequence_meets_several_regimes_and_memories_that_hold() -> None:
    longest = of("triton_chunked", length=max(LENGTHS))
    regimes = {case["regime"] for case in longest}
    assert len(regimes) >= 5
    assert "near-1" in regimes
    assert len([regime for regime in regimes if regime.startswith("hold-")]) >= 3
    assert met(of("triton_chunked", length=max(LENGTHS), **DEFAULT), "regime")
