"""The sequential Triton scan without a GPU: run by Triton's interpreter against float64, and compiled for GPUs.

The interpreter has to be chosen before Triton is imported, so one test runs this file again in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from interpreter import passes_under_the_interpreter
from naju.scan.dispatch import ScanInputs, check_inputs
from naju.scan.on_gpu import gpu_refuses
from naju.scan.on_gpu import interpreted as interpreting
from naju.scan.operator import ARGUMENTS
from naju.scan.triton_sequential import TRITON_SEQUENTIAL, blocks_for
from numerics import REGIMES, Outcome, ScanCase, assert_agrees, draw_case, outcome, truth

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
interpreted = pytest.mark.skipif(not interpreting(), reason="test_under_the_interpreter runs it")
not_interpreted = pytest.mark.skipif(interpreting(), reason="Triton's interpreter is on")


@needs_triton
@not_interpreted
def test_under_the_interpreter() -> None:
    passes_under_the_interpreter(__file__, "-k", "interpreted")


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN, so that an output which a kernel forgets to write is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _inputs(**arguments: Any) -> ScanInputs:
    optional = dict.fromkeys(("alpha", "D", "z", "initial_state", "cu_seqlens"))
    return check_inputs(**(optional | {"reverse": False} | arguments))


def scan(**arguments: Any) -> tuple[Tensor, Tensor]:
    inputs = _inputs(**arguments)
    assert TRITON_SEQUENTIAL.refuses(inputs) is None
    return TRITON_SEQUENTIAL.run(inputs)


def agrees(case: ScanCase) -> Outcome:
    got = outcome(case, scan)
    assert_agrees(got, truth(case), case.dtype)
    return got


@interpreted
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("regime", REGIMES)
def test_interpreted_in_every_gate_regime(regime: str, reverse: bool) -> None:
    agrees(draw_case(regime, length=19, d_inner=21, d_state=5, cu_seqlens=[0, 0, 7, 7, 12, 19, 19], reverse=reverse))


SIZES = [(1, 1, 1), (3, 17, 64), (9, 7, 19), (4, 70, 3), (5, 5, 129), (2, 9, 256)]  # length, d_inner, d_state


@interpreted
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_interpreted_at_awkward_sizes(size: tuple[int, int, int]) -> None:
    length, d_inner, d_state = size
    agrees(draw_case(batch=2, length=length, d_inner=d_inner, d_state=d_state, reverse=length % 2 == 0))


@interpreted
@pytest.mark.parametrize("absent", ["D", "z", "initial_state", "D z initial_state"])
def test_interpreted_without_optional_arguments(absent: str) -> None:
    agrees(draw_case(batch=2, length=9, d_inner=18, d_state=6, alpha=0.3).without(*absent.split()))


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_interpreted_in_half_precision(dtype: torch.dtype) -> None:
    case = draw_case(batch=2, length=9, d_inner=18, d_state=6, dtype=dtype)
    got = agrees(case)
    assert {name: got[f"d{name}"].dtype for name in case.tensors} == {n: t.dtype for n, t in case.tensors.items()}
    assert got["y"].dtype == dtype
    state = {name: got[name] for name in ("state", "dinitial_state")}
    assert_agrees(state, {name: truth(case)[name] for name in state}, torch.float32)


@interpreted
def test_interpreted_with_a_precision_for_every_tensor() -> None:
    dtypes = {"h": torch.bfloat16, "i_logit": torch.float16, "B": torch.float16, "z": torch.bfloat16}
    case = draw_case(batch=2, length=9, d_inner=18, d_state=6)
    tensors = {name: tensor.to(dtypes.get(name, torch.float32)) for name, tensor in case.tensors.items()}
    case = replace(case, tensors=tensors, dy=case.dy.bfloat16())
    got, want = outcome(case, scan), truth(case)
    assert_agrees(got, want, torch.bfloat16)
    assert {name: got[f"d{name}"].dtype for name in tensors} == {name: tensors[name].dtype for name in tensors}
    exact = {name: got[name] for name in ("state", "df_logit", "dC", "dD", "dinitial_state")}
    assert_agrees(exact, {name: want[name] for name in exact}, torch.float32, kind="gradient")


@interpreted
def test_interpreted_with_inputs_that_are_not_contiguous() -> None:
    """Halves of a wider projection are read where they are; other layouts are copied first."""
    case = draw_case(batch=2, length=9, d_inner=18, d_state=6)
    case = replace(case, dy=case.dy[:, :1, :1].expand_as(case.dy))

    def spread_out(**arguments: Tensor) -> tuple[Tensor, Tensor]:
        views = {name: torch.cat([tensor, tensor], dim=-1).chunk(2, dim=-1)[1] for name, tensor in arguments.items()}
        views["h"] = arguments["h"].transpose(1, 2).contiguous().transpose(1, 2)
        views["f_logit"] = arguments["f_logit"].transpose(0, 1).contiguous().transpose(0, 1)
        assert not any(view.is_contiguous() for name, view in views.items() if name != "D")
        return scan(**views)

    assert_agrees(outcome(case, spread_out), truth(case), torch.float32)


@interpreted
@pytest.mark.parametrize("packed", [True, False])
def test_interpreted_as_a_torch_operator(packed: bool) -> None:
    """Schema, fakes and autograd registration hold what they say, where states are kept and where not."""
    shape = {"cu_seqlens": [0, 3, 3, 4]} if packed else {"batch": 2}
    case = draw_case(length=4, d_inner=3, d_state=2, **shape)
    leaves = {name: tensor.requires_grad_() for name, tensor in case.tensors.items()}
    inputs = _inputs(**leaves, **case.options)
    arguments = tuple(getattr(inputs, name) for name in ARGUMENTS)
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.use_deterministic_algorithms(False)  # the schema test compares empty tensors with themselves
    torch.library.opcheck(torch.ops.naju.triton_sequential.default, (*arguments, True), test_utils=utilities)
    detached = tuple(value.detach() if isinstance(value, Tensor) else value for value in arguments)
    torch.library.opcheck(torch.ops.naju.triton_sequential.default, (*detached, False), test_utils=utilities)


@interpreted
def test_interpreted_without_a_backward_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw_case(batch=2, length=4, d_inner=3, d_state=2)
    wanted = scan(**{name: tensor.requires_grad_() for name, tensor in case.tensors.items()})
    monkeypatch.setattr("naju.scan.triton_sequential._kept", lambda *arguments: pytest.fail("states were kept"))
    with torch.no_grad():
        assert all(map(torch.equal, scan(**case.tensors), wanted))


ARCHITECTURES = (80, 89, 90, 100, 120)
ABSENT = ("D", "z", "cu_seqlens", "trajectory", "dD", "dz")
ALWAYS_FLOAT32 = ("initial_state", "state", "trajectory", "dstate", "dinitial_state", "dB", "dC", "dD")


def _signature(kernel: Any, dtype: str, absent: tuple[str, ...], blocks: dict[str, Any]) -> tuple[dict, dict]:
    """Types and constants of a kernel's parameters, as a launch would give them."""
    signature, constants = {}, {}
    for parameter in kernel.params:
        name = parameter.name
        if parameter.is_constexpr or name in absent:
            signature[name], constants[name] = "constexpr", None if name in absent else blocks.get(name, True)
        elif name == "cu_seqlens":
            signature[name] = "*i32"
        else:
            signature[name] = parameter.annotation_type or ("*fp32" if name in ALWAYS_FLOAT32 else dtype)
    return signature, constants


@needs_triton
@not_interpreted
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("which", ["forward_kernel", "backward_kernel"])
def test_it_compiles_for_every_architecture(which: str, architecture: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from naju.scan.triton_sequential import kernels

    kernel = getattr(kernels, which)
    needed_by_backward = () if which == "forward_kernel" else ("trajectory",)
    absent = tuple(name for name in ABSENT if name not in needed_by_backward)
    for d_inner, d_state, dtype, left_out in ((520, 64, "*bf16", ()), (96, 256, "*fp32", absent), (16, 1, "*fp16", ())):
        blocks = blocks_for(d_inner, d_state)
        options = {name: blocks.pop(name) for name in ("num_warps", "enable_fp_fusion")}
        signature, constants = _signature(kernel, dtype, left_out, blocks)
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        assert made.asm["cubin"]
        assert made.metadata.shared <= 48 * 1024


@needs_triton
@not_interpreted
def test_lengths_and_strides_are_not_compiled_in() -> None:
    from naju.scan.triton_sequential import kernels

    for kernel in (kernels.forward_kernel, kernels.backward_kernel):
        numbers = [parameter for parameter in kernel.params if parameter.annotation_type == "i64"]
        assert len(numbers) >= 13
        assert all(parameter.do_not_specialize for parameter in numbers)


@not_interpreted
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("naju.scan.on_gpu._triton_installed", lambda: True)
    assert TRITON_SEQUENTIAL.missing_here() == "no NVIDIA GPU is available to torch"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("naju.scan.on_gpu._newest_capability", lambda: (8, 0))
    assert TRITON_SEQUENTIAL.missing_here() is None
    monkeypatch.setattr("naju.scan.on_gpu._newest_capability", lambda: (7, 5))
    assert TRITON_SEQUENTIAL.missing_here() is None  # nobody has used the GPU yet
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert TRITON_SEQUENTIAL.missing_here() == "Triton needs a GPU of compute capability 8.0 and this one has 7.5"
    monkeypatch.setattr("naju.scan.on_gpu._triton_installed", lambda: False)
    assert TRITON_SEQUENTIAL.missing_here() == "triton is not installed"


def test_of_several_gpus_the_one_that_is_asked_for_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr("naju.scan.on_gpu._capability", {0: (9, 0), 1: (7, 5)}.__getitem__)
    new, old = (
        cast(Tensor, SimpleNamespace(device=torch.device(f"cuda:{index}"), dtype=torch.float32)) for index in range(2)
    )
    assert gpu_refuses(new, 4) is None
    assert gpu_refuses(old, 4) == "Triton needs a GPU of compute capability 8.0 and cuda:1 has 7.5"
    assert gpu_refuses(old, 4, in_triton=False) is None


@not_interpreted
def test_it_refuses_what_is_not_on_a_gpu() -> None:
    reason = TRITON_SEQUENTIAL.refuses(_inputs(**draw_case(length=2, d_inner=3, d_state=4).tensors))
    assert reason == "h is on cpu and it runs on NVIDIA GPUs only"


@interpreted
@pytest.mark.parametrize(
    ("dtype", "d_state", "reason"),
    [
        (torch.float32, 256, None),
        (torch.float32, 257, "d_state is 257 and it goes up to 256"),
        (torch.float64, 4, "h is float64 and it computes in float32"),
    ],
)
def test_interpreted_what_it_refuses(dtype: torch.dtype, d_state: int, reason: str | None) -> None:
    case = draw_case(length=2, d_inner=3, d_state=d_state, dtype=dtype)
    assert TRITON_SEQUENTIAL.refuses(_inputs(**case.tensors)) == reason


def test_the_backend_can_be_imported_without_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; from naju.scan.triton_sequential import *; print('imported')"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "imported", done.stderr
