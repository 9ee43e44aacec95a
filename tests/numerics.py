"""One error metric, one tolerance table, and the inputs that scans are measured on.

Inputs are drawn in float64 and rounded to the dtype under test; the truth is the reference backend in float64 on the
rounded inputs, with the same random cotangents on `y` and on the final state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from naju.scan import backends, naju_scan

# Relative RMS error against float64. "law" is for two ways of computing the same thing in one precision.
TOLERANCE = {
    (torch.float64, "forward"): 1e-12,
    (torch.float64, "gradient"): 1e-12,
    (torch.float64, "law"): 1e-12,
    (torch.float32, "forward"): 2e-6,
    (torch.float32, "gradient"): 1e-5,
    (torch.float32, "law"): 1e-5,
    (torch.bfloat16, "forward"): 1e-2,
    (torch.bfloat16, "gradient"): 1e-2,
    (torch.float16, "forward"): 1e-2,
    (torch.float16, "gradient"): 1e-2,
}
# Elements below this may be lost: float16 cannot hold them, and float32 loses what is under its normal range (1e-38).
UNDERFLOW = {torch.float64: 0.0, torch.float32: 1e-35, torch.bfloat16: 1e-35, torch.float16: 6e-8}

TENSORS = ("h", "f_logit", "i_logit", "B", "C", "D", "z", "initial_state")
BACKEND_NAMES = ("reference", "associative", "chunked", "cpu_compiled")
TORCH_BACKENDS = ("reference", "associative", "chunked")

Draw = Callable[..., Tensor]
Scan = Callable[..., tuple[Tensor, Tensor]]
Outcome = dict[str, Tensor]


def or_skip(name: str) -> Any:
    """A backend as a test's parameter, skipped with its reason where it cannot run."""
    reason = backends()[name]
    return pytest.param(name, marks=pytest.mark.skipif(reason is not None, reason=f"{name}: {reason}"))


CPU_BACKENDS = [or_skip(name) for name in BACKEND_NAMES]
each_backend = pytest.mark.parametrize("backend", CPU_BACKENDS)
each_backend_and_auto = pytest.mark.parametrize("backend", [*CPU_BACKENDS, "auto"])


def relative_rms(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def _holding(overwrite: float) -> Callable[[Draw, Draw], tuple[Tensor, Tensor]]:
    """Gates that hold (6±1) with 5 % overwrites at the given logit."""
    return lambda normal, uniform: (torch.where(uniform() < 0.05, overwrite, 6 + normal()), normal() - 1)


def _saturated(normal: Draw, uniform: Draw) -> tuple[Tensor, Tensor]:
    """Logits of either sign whose magnitudes spread evenly over the decades from 1 to 1e4."""
    f_logit, i_logit = (torch.sign(normal()) * 10 ** (4 * uniform()) for _ in range(2))
    return f_logit, i_logit


def _infinite(normal: Draw, uniform: Draw) -> tuple[Tensor, Tensor]:
    """A third of the logits -inf, a third +inf, a third ordinary."""

    def mixed() -> Tensor:
        third = (3 * uniform()).floor()
        return torch.where(third == 0, -math.inf, torch.where(third == 1, math.inf, normal()))

    return mixed(), mixed()


# Name of a gate regime to (f_logit, i_logit).
REGIMES: dict[str, Callable[[Draw, Draw], tuple[Tensor, Tensor]]] = {
    "ordinary": lambda normal, uniform: (2 * normal() + 2, normal() - 1),
    "hold-6": _holding(-6),
    "hold-12": _holding(-12),
    "hold-20": _holding(-20),
    "hold-100": _holding(-100),
    "hold-1e4": _holding(-1e4),
    "forget-8": lambda normal, uniform: (normal() - 8, normal() - 1),
    "forget-15": lambda normal, uniform: (normal() - 15, normal() - 1),
    "saturated": _saturated,
    "infinite": _infinite,
    "near-1": lambda normal, uniform: (normal() + 15, normal() + 15),
}


@dataclass(frozen=True, kw_only=True)
class ScanCase:
    """The tensors and options of one scan, and the cotangents of its two results."""

    tensors: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    dy: Tensor
    dstate: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["h"].dtype

    def double(self) -> ScanCase:
        tensors = {name: tensor.double() for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors, dy=self.dy.double(), dstate=self.dstate.double())

    def without(self, *names: str) -> ScanCase:
        return replace(self, tensors={name: tensor for name, tensor in self.tensors.items() if name not in names})


def draw_case(
    regime: str = "ordinary",
    *,
    batch: int = 1,
    length: int,
    d_inner: int,
    d_state: int,
    dtype: torch.dtype = torch.float32,
    cu_seqlens: Sequence[int] | None = None,
    seed: int = 0,
    device: str = "cpu",
    scale: float = 1.0,
    **options: Any,
) -> ScanCase:
    """`scale` is that of h, B and C."""
    drawn = {"generator": torch.Generator(device).manual_seed(seed), "dtype": torch.float64, "device": device}
    per_channel, per_state = (batch, length, d_inner), (batch, length, d_state)
    states = (batch if cu_seqlens is None else len(cu_seqlens) - 1, d_inner, d_state)
    f_logit, i_logit = REGIMES[regime](
        partial(torch.randn, per_channel, **drawn), partial(torch.rand, per_channel, **drawn)
    )
    shapes = {
        "h": per_channel,
        "B": per_state,
        "C": per_state,
        "D": (d_inner,),
        "z": per_channel,
        "initial_state": states,
    }
    tensors = {name: torch.randn(shape, **drawn) for name, shape in shapes.items()}
    tensors |= {name: scale * tensors[name] for name in ("h", "B", "C")}
    tensors |= {"f_logit": f_logit, "i_logit": i_logit}
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    if cu_seqlens is not None:
        options["cu_seqlens"] = torch.tensor(cu_seqlens, device=device)
    return ScanCase(
        tensors={name: tensors[name].to(state_dtype if name == "initial_state" else dtype) for name in TENSORS},
        options=options,
        dy=torch.randn(per_channel, **drawn).to(dtype),
        dstate=torch.randn(states, **drawn).to(state_dtype),
    )


def draw_cases(*arguments: Any, seed: int = 0, **options: Any) -> list[ScanCase]:
    """Several draws where outputs are small: one sum that happens to cancel must not decide a relative error."""
    count = 4 if options["length"] * options["d_inner"] < 300 else 1
    return [draw_case(*arguments, seed=1000 * seed + draw, **options) for draw in range(count)]


def outcome(case: ScanCase, scan: Scan | str) -> Outcome:
    """`y`, `state` and the gradient of every tensor, named `d` + its name, by a backend or by another scan function."""
    run = partial(naju_scan, backend=scan) if isinstance(scan, str) else scan
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in case.tensors.items()}
    y, state = run(**leaves, **case.options)
    grads = torch.autograd.grad([y, state], list(leaves.values()), [case.dy, case.dstate])
    return {"y": y.detach(), "state": state.detach()} | {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}


def truth(case: ScanCase) -> Outcome:
    return outcome(case.double(), "reference")


def pooled(outcomes: Sequence[Outcome]) -> Outcome:
    return {name: torch.cat([each[name].flatten() for each in outcomes]) for name in outcomes[0]}


def assert_agrees(got: Outcome, want: Outcome, dtype: torch.dtype, kind: str | None = None) -> None:
    """Every tensor of `want` is met within the tolerance of its kind; what is exactly zero must be exactly zero."""
    assert got.keys() == want.keys()
    complaints = []
    for name, wanted in want.items():
        tolerance = TOLERANCE[dtype, kind or ("forward" if name in ("y", "state") else "gradient")]
        if not _close(got[name], wanted, tolerance, UNDERFLOW[dtype]):
            complaints.append(f"{name}: {relative_rms(got[name], wanted):.2e} is over {tolerance:.0e}")
    assert not complaints, "; ".join(complaints)


def _close(got: Tensor, want: Tensor, tolerance: float, underflow: float) -> bool:
    if got.shape != want.shape:
        return False
    if not want.any():
        return not got.any()
    distance = (got.double() - want.double()).norm()
    return bool(distance <= tolerance * want.double().norm() + underflow * math.sqrt(want.numel()))
