"""`naju doctor`: versions, devices, every scan backend with its reason, and a self-test of each that can run.

Products of matrices are torch's, but they are tested too: on a GPU of which a process may use only a part they were
seen to be wrong, without an error.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import naju
from naju.bench.rows import machine, package_version
from naju.scan import backends, naju_scan

TOLERANCE = 1e-5
PRODUCT_TOLERANCE = 1e-2  # in bfloat16
SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
PACKAGES = ("numpy", "safetensors", "triton", "transformers", "matplotlib")


def run_doctor() -> bool:
    """Print the report; False if products, or a backend that should run, give wrong results."""
    print(f"naju {naju.__version__}, python {platform.python_version()}, torch {torch.__version__}")
    print(", ".join(f"{name} {package_version(name) or 'not installed'}" for name in PACKAGES))
    found = machine()
    print(f"CPU: {found['processor']}, cores: {found['cores']}, threads of torch: {found['threads']}")
    print(f"GPU: {found['accelerator'] or 'none that torch can use'}")
    told, healthy = _reported(_products)
    print(f"products in bfloat16: {told}")
    print("scan backends, in order of preference:")
    for name in backends():
        verdict, good = _verdict(name)
        healthy = healthy and good
        print(f"  {name:<18} {verdict}")
    print("all well" if healthy else "something is wrong on this machine: please report the lines above")
    return healthy


def _reported(test: Callable[[], tuple[str, bool]]) -> tuple[str, bool]:
    """A report has to go on: whatever broke is what the reader needs to see."""
    try:
        return test()
    except Exception as broken:
        return f"FAILS: {type(broken).__name__}: {broken}", False


def _products() -> tuple[str, bool]:
    """The three products of a linear layer's training, for some of the diagnostic suite's sizes, against float64."""
    device, rows = ("cuda", 16384) if torch.cuda.is_available() else ("cpu", 512)
    generator = torch.Generator().manual_seed(0)
    errors = []
    for d_in, d_out in ((128, 128), (256, 640), (512, 256)):
        u, dout, weight = (
            torch.randn(n, d, generator=generator).bfloat16() for n, d in ((rows, d_in), (rows, d_out), (d_out, d_in))
        )
        for left, right in ((u, weight.t()), (dout, weight), (dout.t(), u)):
            errors.append(_relative_error(left.to(device) @ right.to(device), left.double() @ right.double()))
    error = float(torch.tensor(errors).max())  # or NaN
    good = error <= PRODUCT_TOLERANCE
    share = "" if good or SHARE not in os.environ else f"; they may be right without {SHARE}"
    return f"{'ok' if good else 'WRONG'}: largest relative error {error:.1e}{share}", good


def _verdict(name: str) -> tuple[str, bool]:
    """What is missing may show only when a first use builds the backend."""
    if backends()[name] is None:
        tested = _reported(partial(_self_test, name))
        if backends()[name] is None:
            return tested
    return f"cannot run here: {backends()[name]}", True


def _self_test(name: str) -> tuple[str, bool]:
    """Outputs and gradients of a small awkward scan against the float64 loop."""
    _scan_and_gradients(name, torch.float32)
    start = time.perf_counter()
    got = _scan_and_gradients(name, torch.float32)
    seconds = time.perf_counter() - start
    wanted = _scan_and_gradients("reference", torch.float64)
    error = float(torch.tensor([_relative_error(*pair) for pair in zip(got, wanted, strict=True)]).max())  # or NaN
    good = error <= TOLERANCE
    return f"{'ok' if good else 'WRONG'}: largest relative error {error:.1e}, {seconds * 1e3:.1f} ms", good


def _scan_and_gradients(backend: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() and "cpu" not in backend else "cpu"
    batch, length, d_inner, d_state = 2, 77, 37, 13

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    wide, narrow = (batch, length, d_inner), (batch, length, d_state)
    names = ("h", "f_logit", "i_logit", "B", "C", "D", "z", "initial_state")
    shapes = (wide, wide, wide, narrow, narrow, (d_inner,), wide, (batch, d_inner, d_state))
    inputs = {name: draw(*shape) for name, shape in zip(names, shapes, strict=True)}
    y, state = naju_scan(**inputs, backend=backend)  # type: ignore[arg-type]
    cotangents = [torch.randn(t.shape, generator=generator).to(t) for t in (y, state)]
    return [y, state, *torch.autograd.grad([y, state], list(inputs.values()), cotangents)]


def _relative_error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double().cpu(), want.detach().cpu()
    return float((got - want).norm() / want.norm())
