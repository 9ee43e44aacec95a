"""Every GPU backend against the chunked one in float64 on the same GPU: a covering draw of sizes, gates and options."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from scan_draws import DTYPES, GPU_BACKENDS, Case, draws

from naju.scan import backends, naju_scan
from numerics import REGIMES, assert_agrees, draw_case, draw_cases, outcome, pooled

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def boundaries(length: int, seed: int) -> list[int]:
    inner = sorted(random.Random(seed).randint(0, length) for _ in range(4))
    return [0, *inner, length]


def cases() -> list[Any]:
    return [pytest.param(turn, case, id=f"{turn}-{_label(case)}") for turn, case in enumerate(draws())]


def _label(case: Case) -> str:
    sizes = "x".join(str(case[name]) for name in ("batch", "length", "d_inner", "d_state"))
    flags = "".join(name[0] for name in ("reverse", "packed") if case[name])
    return f"{case['backend']}-{case['regime']}-{sizes}-{str(case['dtype']).removeprefix('torch.')}-{flags}"


@pytest.mark.parametrize(("turn", "case"), cases())
def test_gpu_backend_agrees_with_float64(turn: int, case: Case) -> None:
    reason = backends()[case["backend"]]
    if reason is not None:
        pytest.skip(f"{case['backend']}: {reason}")
    options = {name: case[name] for name in ("regime", "length", "d_inner", "d_state", "batch", "dtype", "reverse")}
    packed = boundaries(case["length"], turn) if case["packed"] else None
    drawn = draw_cases(**options, cu_seqlens=packed, seed=turn, device="cuda")
    exact = "chunked" if case["length"] > 100 else "reference"
    want = pooled([outcome(each.double(), exact) for each in drawn])
    got = pooled([outcome(each, case["backend"]) for each in drawn])
    assert all(tensor.isfinite().all() for tensor in got.values())
    assert_agrees(got, want, case["dtype"])


@pytest.mark.parametrize("d_state", [8, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_every_configuration_with_and_without_a_backward(backend: str, dtype: torch.dtype, d_state: int) -> None:
    """Blocks are chosen by d_state, by dtype, and by whether states are kept for a backward."""
    if backends()[backend] is not None:
        pytest.skip(f"{backend}: {backends()[backend]}")
    drawn = draw_case("hold-12", batch=2, length=333, d_inner=96, d_state=d_state, dtype=dtype, device="cuda")
    want = outcome(drawn.double(), "chunked")
    assert_agrees(outcome(drawn, backend), want, dtype)
    with torch.no_grad():
        y, state = naju_scan(**drawn.tensors, **drawn.options, backend=backend)
    assert_agrees({"y": y, "state": state}, {name: want[name] for name in ("y", "state")}, dtype)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_large_values_do_not_overflow(backend: str, regime: str) -> None:
    if backends()[backend] is not None:
        pytest.skip(f"{backend}: {backends()[backend]}")
    drawn = draw_case(regime, length=1000, d_inner=96, d_state=64, dtype=torch.bfloat16, device="cuda", scale=100)
    assert_agrees(outcome(drawn, backend), outcome(drawn.double(), "chunked"), torch.bfloat16)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_offsets_beyond_2_to_the_31(backend: str) -> None:
    """The last row of a batch whose tensors have more than 2^31 elements equals that row by itself."""
    if backends()[backend] is not None:
        pytest.skip(f"{backend}: {backends()[backend]}")
    batch, length, d_inner, d_state = 9, 4096, 65536, 1
    noise = torch.Generator("cuda").manual_seed(0)
    wide = [torch.randn(batch, length, d_inner, generator=noise, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    narrow = [
        torch.randn(batch, length, d_state, generator=noise, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    ]
    with torch.no_grad():
        y, state = naju_scan(*wide, *narrow, backend=backend)
        alone, alone_state = naju_scan(*(t[-1:].clone() for t in (*wide, *narrow)), backend=backend)
    assert torch.equal(y[-1:], alone)
    assert torch.equal(state[-1:], alone_state)
