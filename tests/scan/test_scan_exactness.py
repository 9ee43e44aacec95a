"""Every CPU backend against the float64 loop: outputs and every gradient, in every gate regime, at awkward sizes."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from naju import naju_scan
from numerics import (
    REGIMES,
    TOLERANCE,
    TORCH_BACKENDS,
    Outcome,
    Scan,
    ScanCase,
    assert_agrees,
    draw_case,
    draw_cases,
    each_backend,
    or_skip,
    outcome,
    pooled,
    relative_rms,
    truth,
)

LENGTHS = (1, 2, 3, 15, 16, 17, 31, 33, 64, 100, 517)
D_INNER = (1, 3, 16, 31, 32, 33, 40)
D_STATE = (1, 2, 5, 8, 19, 64)
MODES = [(reverse, packed) for reverse in (False, True) for packed in (False, True)]


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN, so that an output which a kernel forgets to write is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def packing(length: int) -> list[int]:
    """Boundaries with an empty sequence at both ends and in the middle."""
    middle = length // 3
    return [0, 0, middle, middle, min(length, middle + 17), length, length]


def covering_row(row: int) -> dict[str, object]:
    """88 rows hold every (regime, direction, packing), and every pair of sizes, since 11, 7 and 6 share no factor."""
    length, (reverse, packed) = LENGTHS[row % 11], MODES[row % 4]
    batch = {"cu_seqlens": packing(length)} if packed else {"batch": 2}
    return {
        "regime": list(REGIMES)[row // 8],
        "length": length,
        "d_inner": D_INNER[row % 7],
        "d_state": D_STATE[row % 6],
        "reverse": reverse,
        "seed": row,
        **batch,
    }


@functools.lru_cache(maxsize=4)
def _cases_and_truth(row: int) -> tuple[list[ScanCase], Outcome]:
    cases = draw_cases(**covering_row(row))
    return cases, pooled([truth(case) for case in cases])


@each_backend
@pytest.mark.parametrize("row", range(8 * len(REGIMES)))
def test_float32_at_awkward_sizes(row: int, backend: str) -> None:
    cases, want = _cases_and_truth(row)
    assert_agrees(pooled([outcome(case, backend) for case in cases]), want, torch.float32)


@functools.lru_cache(maxsize=4)
def _hard_case_and_truth(regime: str, reverse: bool, dtype: torch.dtype) -> tuple[ScanCase, Outcome]:
    case = draw_case(regime, batch=2, length=260, d_inner=33, d_state=19, dtype=dtype, reverse=reverse, seed=7)
    return case, truth(case)


@each_backend
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("regime", REGIMES)
def test_float32_in_every_gate_regime(regime: str, reverse: bool, backend: str) -> None:
    case, want = _hard_case_and_truth(regime, reverse, torch.float32)
    assert_agrees(outcome(case, backend), want, torch.float32)


@each_backend
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("regime", ["ordinary", "hold-12"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs(dtype: torch.dtype, regime: str, reverse: bool, backend: str) -> None:
    case, want = _hard_case_and_truth(regime, reverse, dtype)
    got = outcome(case, backend)
    assert_agrees(got, want, dtype)
    assert {name: got[name].dtype for name in ("y", "dh", "dD", "dz")} == dict.fromkeys(("y", "dh", "dD", "dz"), dtype)
    # The state is float32 and so is all arithmetic on the way to it and to its gradient.
    assert got["state"].dtype == got["dinitial_state"].dtype == torch.float32
    assert relative_rms(got["state"], want["state"]) <= TOLERANCE[torch.float32, "forward"]
    assert relative_rms(got["dinitial_state"], want["dinitial_state"]) <= TOLERANCE[torch.float32, "gradient"]


@each_backend
@pytest.mark.parametrize("regime", REGIMES)
def test_large_values_do_not_overflow(regime: str, backend: str) -> None:
    case = draw_case(regime, length=70, d_inner=9, d_state=6, dtype=torch.bfloat16, scale=100)
    assert_agrees(outcome(case, backend), truth(case), torch.bfloat16)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_float64(regime: str, backend: str) -> None:
    case = draw_case(regime, length=100, d_inner=5, d_state=3, dtype=torch.float64, cu_seqlens=packing(100))
    assert_agrees(outcome(case, backend), truth(case), torch.float64)


@pytest.mark.parametrize("regime", ["hold-6", "hold-12", "hold-20", "hold-100", "hold-1e4"])
@pytest.mark.parametrize("backend", [or_skip("chunked"), or_skip("cpu_compiled")])
def test_float32_over_a_long_sequence(regime: str, backend: str) -> None:
    """The truth is the chunked backend in float64, which `test_float64` holds against the loop."""
    case = draw_case(regime, length=2048, d_inner=33, d_state=16)
    assert_agrees(outcome(case, backend), outcome(case.double(), "chunked"), torch.float32)


@each_backend
def test_float32_and_half_precision_arguments_mix(backend: str) -> None:
    case = draw_case(length=40, d_inner=9, d_state=6, dtype=torch.bfloat16, batch=2)
    case.tensors.update({name: case.tensors[name].float() * 1.001 for name in ("f_logit", "B", "D")})
    got = outcome(case, backend)
    assert_agrees(got, truth(case), torch.bfloat16)
    assert got["y"].dtype == torch.bfloat16
    assert {name: got[f"d{name}"].dtype for name in case.tensors} == {n: t.dtype for n, t in case.tensors.items()}


@pytest.mark.parametrize("absent", [("D",), ("z",), ("initial_state",), ("D", "z", "initial_state")])
@pytest.mark.parametrize("alpha", [None, 1, -0.3])
@each_backend
def test_optional_arguments(absent: tuple[str, ...], alpha: float | None, backend: str) -> None:
    case = draw_case(length=35, d_inner=7, d_state=5, batch=2, alpha=alpha).without(*absent)
    assert_agrees(outcome(case, backend), truth(case), torch.float32)


def test_the_reference_is_the_definition() -> None:
    """Written out once more, entry by entry, so that the oracle itself does not stand unexamined."""
    case = draw_case(batch=2, length=4, d_inner=3, d_state=2, dtype=torch.float64, alpha=0.7)
    h, f_logit, i_logit, B, C, D, z, x = (case.tensors[name].clone() for name in case.tensors)
    y = torch.zeros_like(h)
    f, i, silu = torch.sigmoid(f_logit), torch.sigmoid(i_logit), z / (1 + torch.exp(-z))
    for b, t, d in torch.cartesian_prod(*(torch.arange(size) for size in h.shape)).tolist():
        reading = torch.zeros((), dtype=torch.float64)
        for n in range(B.shape[2]):
            x[b, d, n] = f[b, t, d] * x[b, d, n] + i[b, t, d] * h[b, t, d] * B[b, t, n]
            reading += x[b, d, n] * C[b, t, n]
        y[b, t, d] = (0.7 * reading + D[d] * h[b, t, d]) * silu[b, t, d]
    got_y, got_state = naju_scan(**case.tensors, **case.options, backend="reference")
    torch.testing.assert_close(got_y, y, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(got_state, x, rtol=1e-13, atol=1e-13)


@st.composite
def any_cases(draw: st.DrawFn) -> list[ScanCase]:
    """Any shape, packing, direction and range of gates, with any of the optional arguments left out."""
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any) | st.none())
    length = draw(st.integers(1, 50)) if lengths is None else sum(lengths)
    boundaries = None if lengths is None else [sum(lengths[:k]) for k in range(len(lengths) + 1)]
    shape = {"length": length, "d_inner": draw(st.integers(1, 40)), "d_state": draw(st.integers(1, 20))}
    batch = draw(st.integers(1, 3)) if boundaries is None else 1
    alpha = draw(st.none() | st.floats(0.01, 2))
    reverse, seed = draw(st.booleans()), draw(st.integers(0, 999))
    absent = draw(st.lists(st.sampled_from(["D", "z", "initial_state"]), unique=True))
    low, high = sorted(draw(st.tuples(*[st.sampled_from([-1e4, -100.0, -20.0, -6.0, 0.0, 3.0, 8.0, 100.0, 1e4])] * 2)))
    cases = draw_cases(batch=batch, **shape, cu_seqlens=boundaries, alpha=alpha, reverse=reverse, seed=seed)
    for case in cases:
        spread = torch.rand(case.tensors["f_logit"].shape, generator=torch.Generator().manual_seed(seed))
        case.tensors["f_logit"] = low + (high - low) * spread
    return [case.without(*absent) for case in cases]


@each_backend
@settings(max_examples=100)
@given(cases=any_cases())
def test_anything_that_can_be_drawn(backend: str, cases: list[ScanCase]) -> None:
    want = pooled([truth(case) for case in cases])
    assert_agrees(pooled([outcome(case, backend) for case in cases]), want, torch.float32)


GRADCHECK = {
    "everything": {"batch": 2, "length": 4, "d_inner": 2, "d_state": 2},
    "reverse": {"length": 5, "d_inner": 2, "d_state": 1, "reverse": True},
    "packed": {"length": 5, "d_inner": 1, "d_state": 2, "cu_seqlens": [0, 2, 2, 5]},
    "packed and reverse": {"length": 5, "d_inner": 1, "d_state": 2, "cu_seqlens": [0, 1, 5, 5], "reverse": True},
    "two chunks": {"length": 18, "d_inner": 1, "d_state": 1},
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("absent", [(), ("D", "z", "initial_state")], ids=["full", "bare"])
@pytest.mark.parametrize("variant", GRADCHECK)
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_gradcheck(backend: str, variant: str, absent: tuple[str, ...]) -> None:
    """Reverse mode, forward mode and batched gradients against finite differences."""
    function, leaves = _function_of_leaves(backend, variant, absent)
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True)


@pytest.mark.parametrize("variant", ["reverse", "packed"])
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_gradgradcheck(backend: str, variant: str) -> None:
    function, leaves = _function_of_leaves(backend, variant, ())
    assert torch.autograd.gradgradcheck(function, leaves)


def _function_of_leaves(backend: str, variant: str, absent: tuple[str, ...]) -> tuple[Scan, list[torch.Tensor]]:
    case = draw_case(**GRADCHECK[variant], dtype=torch.float64, seed=3).without(*absent)
    names = list(case.tensors)

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return naju_scan(**dict(zip(names, tensors, strict=True)), **case.options, backend=backend)

    return function, [tensor.requires_grad_() for tensor in case.tensors.values()]
