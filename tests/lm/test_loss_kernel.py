"""The kernel of the cross-entropy against torch in float64: in Triton's interpreter without a GPU, on it with one."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch.nn import functional as F

from interpreter import passes_under_the_interpreter
from naju.lm.loss import IGNORED, chunk_loss, chunked_cross_entropy
from naju.scan.on_gpu import interpreted

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() and not interpreted() else "cpu"
runs_kernel = pytest.mark.skipif(DEVICE == "cpu" and not interpreted(), reason="test_under_the_interpreter runs it")
TOLERANCES = [(torch.float32, 2e-6), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)]


@pytest.mark.skipif(interpreted() or DEVICE == "cuda", reason="the kernel runs here as it is")
def test_under_the_interpreter() -> None:
    passes_under_the_interpreter(__file__, "-k", "kernel_")


def draw(classes: int, dtype: torch.dtype, tokens: int = 6, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits as columns of a wider matrix, and targets of which one does not count."""
    logits = (scale * torch.randn(tokens, classes + 3)).to(DEVICE, dtype)
    targets = torch.randint(classes, (tokens,))
    targets[1], targets[2], targets[3] = IGNORED, 0, classes - 1
    return logits, targets.to(DEVICE)


@runs_kernel
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("classes", [1, 7, 4096, 4097, 9001])
def test_kernel_loss_and_gradient_are_those_of_float64(classes: int, dtype: torch.dtype, tolerance: float) -> None:
    wide, targets = draw(classes, dtype)
    beyond = wide[:, classes:].clone()
    logits = wide[:, :classes]
    exact = logits.double().requires_grad_()
    want = F.cross_entropy(exact, targets, ignore_index=IGNORED, reduction="sum")
    (slope,) = torch.autograd.grad(want, exact)
    got = chunk_loss(logits, targets, learns=True)
    assert got.dtype == torch.float32
    assert abs(got.double() - want.detach()) <= 2e-6 * want.detach().clamp(min=1.0)
    assert (logits.double() - slope).abs().max() <= tolerance
    assert torch.equal(logits[1], torch.zeros_like(logits[1]))
    assert torch.equal(wide[:, classes:], beyond)


@runs_kernel
def test_kernel_leaves_logits_that_need_no_gradient() -> None:
    wide, targets = draw(50, torch.float32)
    before = wide.clone()
    chunk_loss(wide[:, :50], targets, learns=False)
    assert torch.equal(wide, before)


@runs_kernel
@pytest.mark.parametrize("target", [-1, 50, 2**40, -(2**40)])
def test_kernel_answers_a_target_that_is_no_class_with_nan(target: int) -> None:
    wide, targets = draw(50, torch.float32)
    targets[0] = target
    assert chunk_loss(wide[:, :50], targets, learns=True).isnan()


@runs_kernel
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, which the interpreter computes with
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_kernel_hides_no_logit_that_is_not_finite(value: float) -> None:
    wide, targets = draw(50, torch.float32)
    wide[0] = value
    assert not chunk_loss(wide[:, :50], targets, learns=True).isfinite()


@runs_kernel
def test_kernel_survives_large_logits() -> None:
    wide, targets = draw(5000, torch.float32, scale=1e4)
    want = F.cross_entropy(wide[:, :5000].double(), targets, ignore_index=IGNORED, reduction="sum")
    assert abs(chunk_loss(wide[:, :5000], targets, learns=True).double() - want) <= 1e-6 * want


@runs_kernel
@pytest.mark.parametrize("chunk", [1, 5, None])
def test_kernel_within_the_whole_loss(chunk: int | None) -> None:
    """With a vocabulary that is padded on a GPU."""
    features = torch.randn(13, 24, device=DEVICE, requires_grad=True)
    weight = torch.randn(101, 24, device=DEVICE, requires_grad=True)
    targets = torch.randint(101, (13,), device=DEVICE)
    got = chunked_cross_entropy(features, weight, targets, chunk=chunk)
    exact = [tensor.detach().double().requires_grad_() for tensor in (features, weight)]
    want = F.cross_entropy(exact[0] @ exact[1].T, targets)
    assert abs(got - want) <= 2e-6 * want
    slopes = zip(torch.autograd.grad(got, (features, weight)), torch.autograd.grad(want, exact), strict=True)
    assert all((one - other).norm() <= 2e-6 * other.norm() for one, other in slopes)


@pytest.mark.skipif(interpreted(), reason="Triton's interpreter is on")
@pytest.mark.parametrize("architecture", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("kind", ["*fp32", "*bf16", "*fp16"])
def test_it_compiles_for_every_architecture(architecture: int, kind: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from naju.lm.loss_kernel import BLOCK, WARPS, loss_of_row

    settings = {"IGNORED": IGNORED, "LEARNS": True, "BLOCK": BLOCK}
    types = {"logits": kind, "targets": "*i64", "losses": "*fp32", "row_stride": "i32", "classes": "i32"}
    source = ASTSource(fn=loss_of_row, signature=types | dict.fromkeys(settings, "constexpr"), constexprs=settings)
    options = {"num_warps": WARPS, "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    assert made.asm["cubin"]
