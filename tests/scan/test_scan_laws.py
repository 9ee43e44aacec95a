"""What must hold between scans, whatever the numbers: cutting, stepping, causality, holding, packing, mirroring."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from naju import naju_scan, naju_step
from numerics import (
    REGIMES,
    Outcome,
    Scan,
    ScanCase,
    assert_agrees,
    draw_case,
    each_backend,
    each_backend_and_auto,
    outcome,
    truth,
)

PER_TOKEN = ("h", "f_logit", "i_logit", "B", "C", "z")
both_directions = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])


def sliced(tensors: dict[str, Any], where: slice) -> dict[str, Any]:
    """The per-token tensors of some tokens, and D."""
    return {name: tensors[name][:, where] if name in PER_TOKEN else tensors[name] for name in (*PER_TOKEN, "D")}


def in_pieces(boundaries: Sequence[int], backend: str) -> Scan:
    """A scan done piece by piece, the state carried from each to the next in the direction of time."""

    def scan(initial_state: Tensor, reverse: bool = False, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        pieces = [slice(*piece) for piece in itertools.pairwise(boundaries)]
        outputs, state = {}, initial_state
        for piece in reversed(pieces) if reverse else pieces:
            part = sliced(tensors, piece)
            outputs[piece.start], state = naju_scan(**part, initial_state=state, reverse=reverse, backend=backend)
        return torch.cat([outputs[piece.start] for piece in pieces], dim=1), state

    return scan


def step_by_step(
    initial_state: Tensor, D: Tensor | None = None, alpha: float | None = None, **tensors: Tensor
) -> tuple[Tensor, Tensor]:
    outputs, state = [], initial_state
    for t in range(tensors["h"].shape[1]):
        y, state = naju_step(state, **{name: tensor[:, t] for name, tensor in tensors.items()}, D=D, alpha=alpha)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


def one_after_another(boundaries: Sequence[int], backend: str) -> Scan:
    """Packed sequences, each scanned on its own."""

    def scan(initial_state: Tensor, cu_seqlens: Tensor, reverse: bool = False, **tensors: Tensor) -> Any:
        outputs, states = [], []
        for row, (left, right) in enumerate(itertools.pairwise(boundaries)):
            state = initial_state[row : row + 1]
            if left < right:
                part = sliced(tensors, slice(left, right))
                y, state = naju_scan(**part, initial_state=state, reverse=reverse, backend=backend)
                outputs.append(y)
            states.append(state)
        return torch.cat(outputs, dim=1), torch.cat(states)

    return scan


@each_backend
@given(
    length=st.integers(1, 80),
    cuts=st.lists(st.integers(1, 79), unique=True, max_size=6),
    regime=st.sampled_from(list(REGIMES)),
    reverse=st.booleans(),
)
def test_any_cut_equals_one_scan(backend: str, length: int, cuts: list[int], regime: str, reverse: bool) -> None:
    boundaries = [0, *sorted(cut for cut in cuts if cut < length), length]
    case = draw_case(regime, batch=2, length=length, d_inner=9, d_state=6, reverse=reverse, seed=length)
    assert_agrees(outcome(case, in_pieces(boundaries, backend)), outcome(case, backend), torch.float32, "law")


@each_backend
@pytest.mark.parametrize("regime", REGIMES)
def test_stepping_equals_scanning(backend: str, regime: str) -> None:
    case = draw_case(regime, batch=3, length=37, d_inner=9, d_state=6)
    assert_agrees(outcome(case, step_by_step), outcome(case, backend), torch.float32, "law")


@pytest.mark.parametrize("absent", [(), ("D",), ("z",), ("D", "z")])
@pytest.mark.parametrize("alpha", [None, 2, -0.3])
def test_optional_arguments_of_a_step(absent: tuple[str, ...], alpha: float | None) -> None:
    case = draw_case(batch=2, length=6, d_inner=9, d_state=6, alpha=alpha).without(*absent)
    assert_agrees(outcome(case, step_by_step), truth(case), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_stepping_in_other_precisions(dtype: torch.dtype) -> None:
    case = draw_case(batch=2, length=20, d_inner=5, d_state=4, dtype=dtype)
    got = outcome(case, step_by_step)
    assert_agrees(got, truth(case), dtype)
    assert got["y"].dtype == dtype
    assert got["state"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@each_backend
@both_directions
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any), regime=st.sampled_from(list(REGIMES)))
def test_packed_equals_separate(backend: str, reverse: bool, lengths: list[int], regime: str) -> None:
    boundaries = [0, *itertools.accumulate(lengths)]
    case = draw_case(
        regime, length=boundaries[-1], d_inner=9, d_state=6, cu_seqlens=boundaries, reverse=reverse, seed=len(lengths)
    )
    assert_agrees(outcome(case, one_after_another(boundaries, backend)), outcome(case, backend), torch.float32, "law")


@each_backend
@pytest.mark.parametrize("cu_seqlens", [None, [0, 5, 5, 36, 50]], ids=["batch", "packed"])
def test_reverse_equals_mirroring(backend: str, cu_seqlens: list[int] | None) -> None:
    batch = 1 if cu_seqlens else 2
    case = draw_case(batch=batch, length=50, d_inner=9, d_state=6, cu_seqlens=cu_seqlens, reverse=True)

    def mirrored(initial_state: Tensor, reverse: bool, cu_seqlens: Tensor | None = None, **tensors: Tensor) -> Any:
        turned = {name: t if name == "D" else t.flip(1) for name, t in tensors.items()}
        if cu_seqlens is None:
            y, state = naju_scan(**turned, initial_state=initial_state, backend=backend)
            return y.flip(1), state
        y, state = naju_scan(
            **turned, initial_state=initial_state.flip(0), cu_seqlens=50 - cu_seqlens.flip(0), backend=backend
        )
        return y.flip(1), state.flip(0)

    assert_agrees(outcome(case, mirrored), outcome(case, backend), torch.float32, "law")


@each_backend
@both_directions
def test_batch_rows_are_independent(backend: str, reverse: bool) -> None:
    case = draw_case(batch=3, length=40, d_inner=9, d_state=6, reverse=reverse)
    alone, together = outcome(_only_row(case, 1), backend), outcome(case, backend)
    del alone["dD"], together["dD"]  # D is shared by all rows
    assert_agrees({name: tensor[1:2] for name, tensor in together.items()}, alone, torch.float32, "law")


def _only_row(case: ScanCase, row: int) -> ScanCase:
    tensors = {name: t if name == "D" else t[row : row + 1] for name, t in case.tensors.items()}
    return replace(case, tensors=tensors, dy=case.dy[row : row + 1], dstate=case.dstate[row : row + 1])


@each_backend
@both_directions
@pytest.mark.parametrize("t", [0, 1, 15, 16, 17, 31, 32, 39])
def test_causality_by_gradient(backend: str, reverse: bool, t: int) -> None:
    """The output at t has gradient exactly 0 to every later input, and some to the drive of every token until then."""
    case = draw_case(batch=2, length=40, d_inner=9, d_state=6)
    leaves = {name: tensor.requires_grad_() for name, tensor in case.tensors.items()}
    y, _ = naju_scan(**leaves, reverse=reverse, backend=backend)
    dy_t = torch.zeros_like(y)
    dy_t[:, t] = case.dy[:, t]
    grads = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy_t), strict=True))
    later, until = (slice(None, t), slice(t, None)) if reverse else (slice(t + 1, None), slice(None, t + 1))
    for name in PER_TOKEN:
        assert not grads[name][:, later].any(), f"{name} after {t} reaches the output at {t}"
    for name in ("h", "i_logit", "B"):
        assert grads[name][:, until].abs().amax(dim=(0, 2)).all(), f"{name} up to {t} misses the output at {t}"
    for name in ("C", "z"):
        others = torch.arange(40) != t
        assert not grads[name][:, others].any(), f"{name} of another token reaches the output at {t}"


@each_backend
@both_directions
@pytest.mark.parametrize("t", [0, 15, 16, 38])
def test_causality_by_poison(backend: str, reverse: bool, t: int) -> None:
    """Outputs until t are the same bits when every later input is NaN: not even a product with zero connects them."""
    case = draw_case(batch=2, length=40, d_inner=9, d_state=6, reverse=reverse)
    later = torch.arange(40) < t if reverse else torch.arange(40) > t
    healthy, _ = naju_scan(**case.tensors, **case.options, backend=backend)
    for name in PER_TOKEN:
        case.tensors[name][:, later] = math.nan
    poisoned, _ = naju_scan(**case.tensors, **case.options, backend=backend)
    assert torch.equal(poisoned[:, ~later], healthy[:, ~later])
    assert poisoned[:, later].isnan().all()


@each_backend_and_auto
@both_directions
@pytest.mark.parametrize("length", [1, 16, 100])
def test_held_state_is_kept_bit_for_bit(backend: str, reverse: bool, length: int) -> None:
    case = draw_case(batch=2, length=length, d_inner=9, d_state=6, reverse=reverse)
    case.tensors["f_logit"].fill_(math.inf)
    case.tensors["i_logit"].fill_(-math.inf)
    case.dy.zero_()
    got = outcome(case, backend)
    assert torch.equal(got["state"], case.tensors["initial_state"])
    assert torch.equal(got["dinitial_state"], case.dstate)
    assert not got["df_logit"].any()
    assert not got["di_logit"].any()


@each_backend_and_auto
@both_directions
@pytest.mark.parametrize("length", [1, 16, 100])
def test_overwritten_state_is_the_last_write_bit_for_bit(backend: str, reverse: bool, length: int) -> None:
    case = draw_case(batch=2, length=length, d_inner=9, d_state=6, reverse=reverse)
    case.tensors["f_logit"].fill_(-math.inf)
    case.tensors["i_logit"].fill_(math.inf)
    got = outcome(case, backend)
    last = 0 if reverse else -1
    write = case.tensors["h"][:, last].unsqueeze(-1) * case.tensors["B"][:, last].unsqueeze(-2)
    assert torch.equal(got["state"], write)
    assert not got["dinitial_state"].any()
    assert not got["df_logit"].any()


@each_backend_and_auto
@pytest.mark.parametrize("written_at", [0, 15, 16, 33])
def test_one_write_is_held_to_the_end_bit_for_bit(backend: str, written_at: int) -> None:
    case = draw_case(batch=2, length=70, d_inner=9, d_state=6)
    f_logit, i_logit = torch.full((2, 2, 70, 9), math.inf)
    i_logit.neg_()
    f_logit[:, written_at] = -math.inf
    i_logit[:, written_at] = math.inf
    tensors = case.tensors | {"f_logit": f_logit, "i_logit": i_logit}
    _, state = naju_scan(**tensors, backend=backend)
    write = case.tensors["h"][:, written_at].unsqueeze(-1) * case.tensors["B"][:, written_at].unsqueeze(-2)
    assert torch.equal(state, write)


def test_a_step_holds_and_overwrites_bit_for_bit() -> None:
    case = draw_case(batch=2, length=1, d_inner=9, d_state=6)
    token = {name: case.tensors[name][:, 0] for name in PER_TOKEN}
    state, infinite = case.tensors["initial_state"], torch.full_like(token["h"], math.inf)
    _, held = naju_step(state, **token | {"f_logit": infinite, "i_logit": -infinite})
    _, overwritten = naju_step(state, **token | {"f_logit": -infinite, "i_logit": infinite})
    assert torch.equal(held, state)
    assert torch.equal(overwritten, token["h"].unsqueeze(-1) * token["B"].unsqueeze(-2))


@each_backend
@both_directions
def test_an_empty_sequence_hands_its_state_through(backend: str, reverse: bool) -> None:
    boundaries = [0, 0, 7, 7, 7, 20, 20]
    case = draw_case(length=20, d_inner=9, d_state=6, cu_seqlens=boundaries, reverse=reverse)
    got = outcome(case, backend)
    empty = [row for row, (left, right) in enumerate(itertools.pairwise(boundaries)) if left == right]
    assert torch.equal(got["state"][empty], case.tensors["initial_state"][empty])
    assert torch.equal(got["dinitial_state"][empty], case.dstate[empty])


@each_backend
@both_directions
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("sick", [0, 1, 2])
@pytest.mark.parametrize("name", [*PER_TOKEN, "initial_state"])
def test_a_poisoned_packed_sequence_touches_no_other(
    backend: str, reverse: bool, poison: float, sick: int, name: str
) -> None:
    """Outputs, final states and gradients of the other sequences, under a loss on those others, are the same bits."""
    boundaries = [0, 19, 24, 43]
    case = draw_case(length=43, d_inner=9, d_state=6, cu_seqlens=boundaries, reverse=reverse)
    tokens, rows = torch.ones(43, dtype=torch.bool), torch.arange(3) != sick
    tokens[boundaries[sick] : boundaries[sick + 1]] = False
    case.dy[:, ~tokens] = 0
    case.dstate[~rows] = 0
    healthy = _elsewhere(outcome(case, backend), tokens, rows)
    if name == "initial_state":
        case.tensors[name][sick] = poison
    else:
        case.tensors[name][:, ~tokens] = poison
    poisoned = _elsewhere(outcome(case, backend), tokens, rows)
    assert all(tensor.isfinite().all() for tensor in healthy.values())
    for result, tensor in healthy.items():
        assert torch.equal(poisoned[result], tensor), f"{name} of sequence {sick} reaches {result} of another"


def _elsewhere(results: Outcome, tokens: Tensor, rows: Tensor) -> Outcome:
    """What belongs to the healthy sequences; the gradient of D is shared and stays out."""
    of_states = {name: results[name][rows] for name in ("state", "dinitial_state")}
    return of_states | {
        name: t[:, tokens] for name, t in results.items() if name not in ("state", "dinitial_state", "dD")
    }


@each_backend
def test_a_poisoned_batch_row_touches_no_other(backend: str) -> None:
    case = draw_case(batch=2, length=40, d_inner=9, d_state=6)
    case.dy[1], case.dstate[1] = 0, 0
    healthy = outcome(case, backend)
    for name in (*PER_TOKEN, "initial_state"):
        case.tensors[name][1] = math.nan
    poisoned = outcome(case, backend)
    for name in healthy.keys() - {"dD"}:
        assert torch.equal(poisoned[name][0], healthy[name][0]), f"the other row reaches {name}"


@each_backend
def test_the_drive_enters_linearly(backend: str) -> None:
    """Without z, the outputs and the state of a sum of drives and states are the sums of theirs."""
    one, two = (draw_case(batch=2, length=50, d_inner=9, d_state=6, seed=seed).tensors for seed in (0, 1))
    scan = partial(naju_scan, **{name: one[name] for name in ("f_logit", "i_logit", "B", "C", "D")}, backend=backend)
    first, second, both = (
        scan(h=h, initial_state=state)
        for h, state in (
            (one["h"], one["initial_state"]),
            (two["h"], two["initial_state"]),
            (one["h"] + two["h"], one["initial_state"] + two["initial_state"]),
        )
    )
    sums = {name: a + b for name, a, b in zip(("y", "state"), first, second, strict=True)}
    assert_agrees(dict(zip(("y", "state"), both, strict=True)), sums, torch.float32, "law")
