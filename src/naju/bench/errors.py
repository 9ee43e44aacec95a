"""`naju bench errors`: relative errors of outputs and gradients, dtype by backend by tensor, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from naju.bench.compare import Failed, at_least_one, attempt
from naju.bench.measure import default_device
from naju.bench.rows import RESULTS, print_table, save_rows
from naju.bench.scan_inputs import scan_inputs
from naju.scan import backends, naju_scan

ORACLE = "chunked"
SLOW = ("reference", "associative")  # a loop in Python, and one that holds every state at once
GATES = {"start of training": None, "hold, overwrite at -8": -8.0, "hold, overwrite at -20": -20.0}

Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class ErrorsBench:
    """Compare every backend with the chunked one in float64 on the same rounded inputs; NaN are counted."""

    lengths: tuple[int, ...] = (4096, 65_536)
    d_inner: int = 64
    d_state: int = 64
    dtypes: tuple[Literal["float32", "bfloat16", "float16"], ...] = ("float32", "bfloat16", "float16")
    backends: tuple[str, ...] | None = None
    """by default all that can run here, without the slow ones that are there to be read"""
    device: str = field(default_factory=default_device)
    out: Path = RESULTS
    """folder for the rows"""


def run_errors_bench(bench: ErrorsBench) -> None:
    names = chosen_backends(bench.backends, bench.device, without=SLOW)
    for length in at_least_one("lengths", bench.lengths):
        rows = [row for gates in GATES for dtype in bench.dtypes for row in _rows(bench, names, length, gates, dtype)]
        print(f"\nrelative error against float64, length {length}, d_inner {bench.d_inner}, d_state {bench.d_state}")
        _print(rows)
        path = save_rows("errors", rows, bench.out)
    print(f"rows appended to {path}")


def chosen_backends(names: Sequence[str] | None, device: str, without: Sequence[str] = ()) -> Sequence[str]:
    """Those, or else all `without` some that can run on this kind of device."""
    known = backends()
    strangers = [name for name in names or () if name not in known]
    if strangers:
        raise ValueError(f"backends must be some of {', '.join(known)}, but hold {strangers[0]!r}")
    elsewhere = ("cpu_compiled",) if torch.device(device).type == "cuda" else ()
    return names or [name for name, missing in known.items() if missing is None and name not in (*without, *elsewhere)]


def _rows(bench: ErrorsBench, names: Sequence[str], length: int, gates: str, dtype: str) -> list[dict[str, Any]]:
    shape = (1, length, bench.d_inner, bench.d_state)
    options = {"dtype": getattr(torch, dtype), "device": bench.device}
    inputs = scan_inputs(*shape, overwrite_logit=GATES[gates], **options)
    inputs["initial_state"] = torch.randn(1, bench.d_inner, bench.d_state, device=bench.device)
    cotangents = [torch.randn_like(inputs["h"]), torch.randn_like(inputs["initial_state"])]
    want = outcome({n: t.double() for n, t in inputs.items()}, [t.double() for t in cotangents], ORACLE)
    about = {"bench": "errors", "gates": gates, "length": length, "d_inner": bench.d_inner, "d_state": bench.d_state}
    rows: list[dict[str, Any]] = []
    for name in names:
        got = attempt(partial(outcome, inputs, cotangents, name))
        row = {**about, "dtype": dtype, "backend": name}
        rows.append(row | ({"reason": got.reason} if isinstance(got, Failed) else _errors(got, want)))
    return rows


def outcome(inputs: Tensors, cotangents: list[Tensor], backend: str) -> Tensors:
    """y, the final state, and the gradient of every argument, named d + the argument."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    results = naju_scan(**leaves, backend=backend)  # type: ignore[arg-type]
    grads = torch.autograd.grad(results, list(leaves.values()), cotangents)
    y, state = (result.detach() for result in results)
    return {"y": y, "state": state} | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def _errors(got: Tensors, want: Tensors) -> dict[str, Any]:
    """The error of every tensor; one with NaN in it has none, and its NaN are counted."""
    nan = {name: int(tensor.isnan().sum()) for name, tensor in got.items()}
    errors = {name: None if nan[name] else relative_rms(got[name], wanted) for name, wanted in want.items()}
    return {"relative_error": errors, "nan": sum(nan.values())}


def relative_rms(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def _print(rows: Sequence[dict[str, Any]]) -> None:
    """One line for each dtype and backend, one column for each tensor: the worst over the kinds of gates."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["dtype"], row["backend"]), []).append(row)
    lines = [{"dtype": dtype, "backend": backend} | _worst(group) for (dtype, backend), group in groups.items()]
    tensors = dict.fromkeys(tensor for row in rows for tensor in row.get("relative_error", ()))
    print_table(lines, ["dtype", "backend", *tensors, "nan", "reason"])


def _worst(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    worst: dict[str, Any] = {"nan": sum(row.get("nan", 0) for row in rows)}
    for row in rows:
        if "reason" in row:
            worst["reason"] = row["reason"]
        for tensor, error in row.get("relative_error", {}).items():
            if error is not None:
                worst[tensor] = max(worst.get(tensor, 0.0), error)
    return worst
