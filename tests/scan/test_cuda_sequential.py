"""The CUDA scan without a GPU: its source runs on the CPU against float64, and nvcc compiles it where there is one."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from naju.scan import BACKENDS, backends, cuda_sequential, naju_scan
from naju.scan.cpu_compiled.build import BuildError, find_compiler
from naju.scan.cuda_sequential import CUDA_SEQUENTIAL, load
from naju.scan.dispatch import ScanInputs, check_inputs, choose
from naju.scan.operator import ARGUMENTS, scan_of
from numerics import REGIMES, Outcome, ScanCase, assert_agrees, draw_case, outcome, truth

HERE = Path(__file__).parent
EMULATOR = HERE / "cuda_on_cpu.h"
WRAPPER = """
#include "{emulator}"
#include "{source}"
static void call_kernel(void) {{ ((void (*)(const Problem))launched)(*argument); }}
"""


def _missing(find: Callable[[], str]) -> bool:
    try:
        find()
    except BuildError:
        return True
    return False


needs_compiler = pytest.mark.skipif(_missing(find_compiler), reason="no C++ compiler was found")
needs_nvcc = pytest.mark.skipif(_missing(load.find_nvcc), reason="nvcc was not found")


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """scan.cu compiled for the CPU with `cuda_on_cpu.h` in place of CUDA's headers, by shape."""
    folder = tmp_path_factory.mktemp("cuda_on_cpu")
    for name in ("cuda_bf16.h", "cuda_fp16.h", "cuda_runtime.h"):
        (folder / name).touch()
    wrapper = folder / "wrapper.cpp"
    wrapper.write_text(WRAPPER.format(emulator=EMULATOR, source=load.SOURCE))

    @functools.cache
    def library(shape: load.Shape) -> ctypes.CDLL:
        made = folder / f"scan-{shape.lanes}-{shape.entries}.so"
        command = [find_compiler(), "-O2", "-std=c++17", "-shared", "-fPIC", "-w", f"-I{folder}", *shape.definitions()]
        subprocess.run([*command, str(wrapper), "-o", str(made)], check=True, timeout=120)
        return ctypes.CDLL(str(made))

    return library


@pytest.fixture
def on_cpu(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(loaded: ctypes.CDLL, function: str, problem: load.Problem, device: torch.device) -> None:
        error = getattr(loaded, function)(ctypes.byref(problem), 0, None)
        assert error == 0, load.explained(loaded, error)

    monkeypatch.setattr(load, "library", emulated)
    monkeypatch.setattr(load, "launch", launch)


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN, so that an output which a kernel forgets to write is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class _Scan(torch.autograd.Function):
    """The backend's own forward and backward, joined as its operator does; that one exists for CUDA tensors only."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        y, state, ctx.kept = cuda_sequential._forward(scan_of(arguments), keep=True)
        ctx.arguments = arguments
        return y, state

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
        grads = cuda_sequential._backward(dy, dstate, ctx.kept, scan_of(ctx.arguments))
        given = zip(grads, ctx.arguments[:8], strict=True)
        return *(None if argument is None else grad for grad, argument in given), None, None, None


def _inputs(*required: Tensor, **options: Any) -> ScanInputs:
    optional = dict.fromkeys(("alpha", "D", "z", "initial_state", "cu_seqlens"))
    return check_inputs(*required, **(optional | {"reverse": False} | options))


def scan(**arguments: Any) -> tuple[Tensor, Tensor]:
    inputs = _inputs(**arguments)
    y, state = _Scan.apply(*(getattr(inputs, name) for name in ARGUMENTS))
    return y, state


def agrees(case: ScanCase) -> Outcome:
    got = outcome(case, scan)
    assert_agrees(got, truth(case), case.dtype)
    return got


@needs_compiler
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("regime", REGIMES)
def test_every_gate_regime(regime: str, reverse: bool) -> None:
    agrees(draw_case(regime, length=53, d_inner=19, d_state=37, cu_seqlens=[0, 0, 7, 7, 12, 53, 53], reverse=reverse))


SIZES = [  # length, d_inner, d_state: every compiled shape, around a step (8), a tile and a segment (32)
    (1, 1, 1),
    (7, 65, 5),
    (40, 3, 8),
    (33, 66, 16),
    (17, 64, 9),
    (64, 33, 32),
    (70, 17, 64),
    (32, 16, 33),
    (41, 9, 128),
    (35, 5, 256),
    (8, 4, 200),
]


@needs_compiler
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_awkward_sizes(size: tuple[int, int, int]) -> None:
    length, d_inner, d_state = size
    agrees(draw_case(batch=2, length=length, d_inner=d_inner, d_state=d_state, reverse=length % 2 == 0))


@needs_compiler
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("reverse", [False, True])
def test_packed_sequences_of_several_segments(reverse: bool) -> None:
    """Boundaries around multiples of a segment: where the checkpoints of neighbours could meet."""
    boundaries = [0, 1, 32, 64, 97, 97, 98, 191, 191, 192]
    agrees(draw_case("hold-12", length=192, d_inner=3, d_state=5, cu_seqlens=boundaries, reverse=reverse))


@needs_compiler
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("absent", ["D", "z", "initial_state", "D z initial_state"])
def test_optional_arguments(absent: str) -> None:
    agrees(draw_case(batch=2, length=35, d_inner=18, d_state=6, alpha=0.3).without(*absent.split()))


@needs_compiler
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    case = draw_case(batch=2, length=35, d_inner=18, d_state=20, dtype=dtype)
    got = agrees(case)
    assert {name: got[f"d{name}"].dtype for name in case.tensors} == {n: t.dtype for n, t in case.tensors.items()}
    assert got["y"].dtype == dtype
    state = {name: tensor for name, tensor in got.items() if name in ("state", "dinitial_state")}
    assert_agrees(state, {name: truth(case)[name] for name in state}, torch.float32)


@needs_compiler
@pytest.mark.usefixtures("on_cpu")
def test_every_tensor_may_have_its_own_precision() -> None:
    dtypes = {"h": torch.bfloat16, "i_logit": torch.float16, "B": torch.float16, "z": torch.bfloat16}
    case = draw_case(batch=2, length=35, d_inner=18, d_state=20)
    tensors = {name: tensor.to(dtypes.get(name, torch.float32)) for name, tensor in case.tensors.items()}
    case = replace(case, tensors=tensors, dy=case.dy.bfloat16())
    got = outcome(case, scan)
    assert_agrees(got, truth(case), torch.bfloat16)
    assert {name: got[f"d{name}"].dtype for name in tensors} == {name: tensors[name].dtype for name in tensors}
    exact = {name: got[name] for name in ("state", "df_logit", "dC", "dD", "dinitial_state")}
    assert_agrees(exact, {name: truth(case)[name] for name in exact}, torch.float32, kind="gradient")


@needs_compiler
@pytest.mark.usefixtures("on_cpu")
def test_inputs_that_are_not_contiguous() -> None:
    """Halves of a wider projection are read where they are; other layouts are copied first."""
    case = draw_case(batch=2, length=35, d_inner=18, d_state=20)
    case = replace(case, dy=case.dy[:, :1, :1].expand_as(case.dy))

    def spread_out(**arguments: Tensor) -> tuple[Tensor, Tensor]:
        views = {name: torch.cat([tensor, tensor], dim=-1).chunk(2, dim=-1)[1] for name, tensor in arguments.items()}
        views["h"] = arguments["h"].transpose(1, 2).contiguous().transpose(1, 2)
        views["f_logit"] = arguments["f_logit"].transpose(0, 1).contiguous().transpose(0, 1)
        assert not any(view.is_contiguous() for name, view in views.items() if name != "D")
        return scan(**views)

    assert_agrees(outcome(case, spread_out), truth(case), torch.float32)


@needs_compiler
@pytest.mark.usefixtures("on_cpu")
def test_without_a_backward_nothing_is_kept() -> None:
    case = draw_case(batch=2, length=70, d_inner=18, d_state=20)
    inputs = _inputs(**case.tensors)
    *with_backward, kept = cuda_sequential._forward(inputs, keep=True)
    *without, nothing = cuda_sequential._forward(inputs, keep=False)
    assert all(map(torch.equal, with_backward, without))
    assert kept[0].shape == (2 * 3, 18, 20)
    assert nothing == []


@needs_nvcc
@needs_compiler
def test_nvcc_compiles_it_for_every_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAJU_CACHE", str(tmp_path))
    architectures = [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]
    library = load.compiled_library(load.shape_for(64), architectures)
    assert ctypes.CDLL(str(library)).naju_forward
    assert library.parent == tmp_path


@needs_nvcc
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("d_state", [d_state for d_state in load.SHAPES if d_state != 64])
def test_nvcc_compiles_every_shape(d_state: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAJU_CACHE", str(tmp_path))
    assert load.compiled_library(load.shape_for(d_state), [(9, 0)]).exists()


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order in which a user would mend it; nothing is compiled to find out."""
    monkeypatch.setattr(load, "compiled", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert CUDA_SEQUENTIAL.missing_here() == "no NVIDIA GPU is available to torch"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    for name in ("CUDA_PATH", "CXX", "NVCC_CCBIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(load, "USUAL_NVCC", str(tmp_path / "nowhere"))
    assert "nvcc" in (CUDA_SEQUENTIAL.missing_here() or "")
    for tool in (tmp_path / "cuda" / "bin" / "nvcc", tmp_path / "g++"):
        tool.parent.mkdir(parents=True, exist_ok=True)
        tool.touch(mode=0o755)
        reason = CUDA_SEQUENTIAL.missing_here()
        assert reason is None if tool.name == "g++" else "no C++ compiler" in str(reason)


@pytest.fixture
def failing_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine without Triton whose nvcc does not know its GPU; the file has a line for every call of nvcc."""
    calls, nvcc = tmp_path / "calls", tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\necho called >> {calls}\necho 'nvcc fatal: Unsupported gpu' >&2\nexit 1\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("NAJU_CACHE", str(tmp_path / "cache"))
    here = {"is_available": lambda: True, "device_count": lambda: 1, "get_device_capability": lambda index: (12, 0)}
    monkeypatch.setattr(load, "torch", SimpleNamespace(version=torch.version, cuda=SimpleNamespace(**here)))
    monkeypatch.setattr(load, "_reasons", {})
    monkeypatch.setattr("naju.scan.on_gpu._triton_installed", lambda: False)
    load.library.cache_clear()
    yield calls
    load.library.cache_clear()
    torch.compiler.reset()


def _on_a_gpu() -> dict[str, Tensor]:
    case = draw_case(length=2, d_inner=3, d_state=4)
    with FakeTensorMode():
        return {name: torch.empty(tensor.shape, device="cuda") for name, tensor in case.tensors.items()}


@needs_compiler
def test_a_build_that_fails_leaves_the_scan_to_the_next_backend(failing_nvcc: Path) -> None:
    reason = f"{failing_nvcc.parent}/bin/nvcc could not compile it: nvcc fatal: Unsupported gpu"
    tensors = _on_a_gpu()
    assert backends()["cuda_sequential"] is None
    assert not failing_nvcc.exists()  # to ask what there is compiles nothing
    told = f"the CUDA scan cannot be built, and the next of naju.backends() takes its place: {reason}"
    with pytest.warns(RuntimeWarning, match=re.escape(told)):
        assert choose(BACKENDS, "auto", _inputs(**tensors)).name == "chunked"
    assert backends()["cuda_sequential"] == reason
    assert choose(BACKENDS, "auto", _inputs(**tensors)).name == "chunked"
    with pytest.raises(ValueError) as caught:
        naju_scan(**tensors, backend="cuda_sequential")
    assert str(caught.value) == f"scan backend 'cuda_sequential' cannot run this: {reason}; use backend='chunked'"
    assert failing_nvcc.read_text() == "called\n"


@needs_compiler
def test_one_failed_build_stops_no_shape_that_was_built(monkeypatch: pytest.MonkeyPatch, failing_nvcc: Path) -> None:
    built, lost = load.shape_for(64), load.shape_for(16)
    monkeypatch.setattr(load, "_reasons", {built: None, lost: "no room"})
    assert load.missing_here() is None
    monkeypatch.setattr(load, "_reasons", {lost: "no room"})
    assert load.missing_here() == "no room"


@needs_compiler
@pytest.mark.usefixtures("failing_nvcc")
def test_a_build_that_fails_for_a_scan_which_asked_for_it() -> None:
    with (
        pytest.warns(RuntimeWarning, match="the CUDA scan cannot be built"),
        pytest.raises(ValueError, match=r"'cuda_sequential' cannot run this: .* could not compile it: .*; use "),
    ):
        naju_scan(**_on_a_gpu(), backend="cuda_sequential")


@needs_compiler
@pytest.mark.usefixtures("failing_nvcc")
@pytest.mark.parametrize("built", [True, False])
def test_a_build_while_a_graph_is_traced(built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are symbols then, and what is chosen is still one backend, in one graph."""
    if built:
        monkeypatch.setattr(load, "compiled_library", lambda shape, capabilities: ctypes.util.find_library("c"))
    chosen = torch.compile(
        lambda h, **tensors: (h + 1, choose(BACKENDS, "auto", _inputs(h=h, **tensors)).name),
        backend="eager",
        fullgraph=True,
        dynamic=True,
    )
    with contextlib.nullcontext() if built else pytest.warns(RuntimeWarning, match="the CUDA scan cannot be built"):
        assert chosen(**_on_a_gpu())[1] == ("cuda_sequential" if built else "chunked")


def test_it_refuses_what_is_not_on_a_gpu() -> None:
    reason = CUDA_SEQUENTIAL.refuses(_inputs(**draw_case(length=2, d_inner=3, d_state=4).tensors))
    assert reason == "h is on cpu and it runs on NVIDIA GPUs only"


@pytest.mark.parametrize(
    ("dtype", "d_state", "reason"),
    [
        (torch.float32, 256, None),
        (torch.float32, 257, "d_state is 257 and it goes up to 256"),
        (torch.float64, 4, "h is float64 and it computes in float32"),
    ],
)
def test_what_it_refuses_on_a_gpu(
    dtype: torch.dtype, d_state: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "library", lambda shape: None)  # nothing is to be compiled
    with FakeTensorMode():
        wide, narrow = (torch.empty(1, 2, size, dtype=dtype, device="cuda") for size in (3, d_state))
        assert CUDA_SEQUENTIAL.refuses(_inputs(wide, wide, wide, narrow, narrow)) == reason


@pytest.mark.parametrize("packed", [True, False])
def test_the_operators_know_their_shapes_without_running(packed: bool) -> None:
    packing = {"cu_seqlens": [0, 1, 1, 2, 70]} if packed else {"batch": 2}
    case = draw_case(length=70, d_inner=18, d_state=20, **packing)
    with FakeTensorMode(), torch.no_grad():
        tensors = {name: torch.empty(tensor.shape, device="cuda") for name, tensor in case.tensors.items()}
        boundaries = torch.empty(5, dtype=torch.int32, device="cuda") if packed else None
        inputs = _inputs(**tensors, cu_seqlens=boundaries)
        arguments = [getattr(inputs, name) for name in ARGUMENTS]
        y, state, kept = torch.ops.naju.cuda_sequential(*arguments, True)
        assert (y.shape, state.shape) == (tensors["h"].shape, tensors["initial_state"].shape)
        assert kept[0].shape == (2 + 4 if packed else 2 * 3, 18, 20)
        grads = torch.ops.naju.cuda_sequential_backward(y, state, kept, *arguments)
        assert [grad.shape for grad in grads] == [argument.shape for argument in arguments[:8]]
        assert [output.shape for output in CUDA_SEQUENTIAL.run(inputs)] == [y.shape, state.shape]
