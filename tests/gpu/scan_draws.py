"""The scans that every GPU backend is compared with float64 on: sizes, gates and options, drawn to meet each other."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import torch

from numerics import REGIMES

GPU_BACKENDS = ("triton_chunked", "cuda_sequential", "triton_sequential")
CASES_EACH = 50
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (1, 3, 63, 64, 65, 1000, 4096, 70001)
AXES: dict[str, tuple[Any, ...]] = {
    "d_inner": (16, 96, 256, 520, 2048),
    "d_state": (1, 8, 16, 48, 64, 128),
    "dtype": DTYPES,
    "batch": tuple(range(1, 9)),
    "reverse": (False, True),
    "packed": (False, False, True),
}
DEFAULT = {"dtype": torch.bfloat16, "d_state": 64}  # of the layer: every fourth case of the backend that "auto" takes
LARGEST = 2**30  # batch * length * d_inner * d_state: the sequential Triton kernel stores them all
WIDEST = 2**26  # batch * length * d_inner: float64 has some forty tensors of them
LONGEST_KEPT = 65  # tokens: what float32 keeps for longer drifts, by what tests/stress/test_drift.py allows
SEED = 39  # with which the longest sequence meets nine of the regimes in triton_chunked

Case = dict[str, Any]


def draws(seed: int = SEED) -> list[Case]:
    """CASES_EACH cases of every backend. Regimes and lengths are dealt, so that all of them meet; the rest is drawn,
    and of many candidates that one is taken whose pairs of values were met least so far."""
    rng, met = random.Random(seed), Counter[Any]()
    deck = [{"regime": regime, "length": length} for regime in REGIMES for length in LENGTHS]
    rng.shuffle(deck)
    cases = []
    for (turn, backend), dealt in zip(itertools.product(range(CASES_EACH), GPU_BACKENDS), itertools.cycle(deck)):
        default = DEFAULT if backend == "triton_chunked" and turn % 4 == 0 else {}
        candidates = [candidate(rng, {"backend": backend, **dealt, **default}) for _ in range(100)]
        cases.append(min(filter(fits, candidates), key=lambda case: sum(met[each] for each in meetings(case))))
        met.update(meetings(cases[-1]))
    return cases


def candidate(rng: random.Random, fixed: Case) -> Case:
    case = {name: rng.choice(values) for name, values in AXES.items()} | fixed
    return case | ({"batch": 1} if case["packed"] else {})


def fits(case: Case) -> bool:
    wide = case["batch"] * case["length"] * case["d_inner"]
    drifts = case["regime"] == "near-1" and case["dtype"] == torch.float32 and case["length"] > LONGEST_KEPT
    return wide <= WIDEST and wide * case["d_state"] <= LARGEST and not drifts


def meetings(case: Case) -> list[Any]:
    """Its pairs of values: in any backend, and in its own."""
    pairs = list(itertools.combinations(case.items(), 2))
    return [*pairs, *((case["backend"], pair) for pair in pairs)]
