"""The fused layer against the same mixer in float64 torch: in the interpreter without a GPU, on the device with one."""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from interpreter import passes_under_the_interpreter
from memories import unsettle
from naju import NajuState
from naju.layers.layout import Layout
from naju.mixers import build_mixer
from naju.scan.triton_chunked import launch
from naju.scan.triton_chunked.layer import layer_refuses
from numerics import TOLERANCE, relative_rms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FUSED = torch.ops.naju.triton_layer.default
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PACKED = torch.tensor([0, 0, 7, 40, 41, 41, 60], device=DEVICE)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
    # torch's own, where the first thing that its backward thread does is a product
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]
runs_kernels = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="test_under_the_interpreter runs it")


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the tests run in this process")
def test_under_the_interpreter() -> None:
    passes_under_the_interpreter(__file__)


@pytest.fixture(params=[1, 10_000], ids=["one segment", "many segments"])
def processors(request, monkeypatch):
    monkeypatch.setattr(launch, "_processors", lambda device: request.param)


def draw(name: str, dtype: torch.dtype, d_model: int, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    mixer = build_mixer(name, d_model, **options)
    unsettle(mixer)
    return mixer.to(DEVICE, dtype)


Run = Callable[..., tuple[Tensor, ...]]


def outcome(
    mixer: nn.Module,
    u: Tensor,
    state: NajuState | None,
    through: Callable[..., Any] | None = None,
    differentiated: slice = slice(None),
    **options: Any,
) -> dict[str, Tensor]:
    """Output, next state, and the gradient of every parameter, of u and of the state where there is one.

    `through` calls a function of tensors in another way than plainly; `differentiated` are the results that have
    cotangents.
    """

    def run(u: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        out, after = mixer(u, NajuState(*state) if state else None, **options)
        return out, *after.tensors().values()

    given = {"u": u, **(state.tensors() if state else {})}
    inputs = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    leaves = inputs | dict(mixer.named_parameters())
    mixer.zero_grad()
    results = run(*inputs.values()) if through is None else through(run, *inputs.values())
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(r.shape, generator=generator).to(r) for r in results]
    torch.autograd.backward(results[differentiated], cotangents[differentiated])
    named = zip(("out", "x", "u_tail", "h_tail"), results, strict=True)
    return {name: result.detach() for name, result in named} | {f"d{name}": leaf.grad for name, leaf in leaves.items()}


def given_to(mixer: nn.Module, batch: int, length: int, rows: int | None = None) -> tuple[Tensor, NajuState]:
    dtype = next(mixer.parameters()).dtype
    generator = torch.Generator().manual_seed(2)
    u = torch.randn(batch, length, mixer.d_model, generator=generator).to(DEVICE, dtype)
    state = mixer.init_state(rows or batch)
    return u, state.map(lambda tensor: torch.randn(tensor.shape, generator=generator).to(tensor))


def check(
    mixer: nn.Module, batch: int, length: int, rows: int | None = None, begins: bool = False, **options: Any
) -> None:
    u, state = given_to(mixer, batch, length, rows)
    uz = mixer.project_in(u)
    assert layer_refuses(uz, mixer.d_state, mixer.tail_length + 1) is None
    given = None if begins else state
    got = outcome(mixer, u, given, **options)
    want = outcome(copy.deepcopy(mixer).double(), u.double(), given and given.map(Tensor.double), **options)
    for name, truth in want.items():
        if not truth.any():  # the first token's forget gate meets no state
            assert not got[name].any(), name
            continue
        kind = "gradient" if name.startswith("d") else "forward"
        assert relative_rms(got[name], truth) <= TOLERANCE[u.dtype, kind], name


@runs_kernels
@pytest.mark.parametrize("name", ["naju", "coupled"])
def test_outputs_states_and_every_gradient(name, processors):
    check(draw(name, torch.float32, 6, d_state=5), 2, 37)


@runs_kernels
@pytest.mark.parametrize(
    "options", [{"d_conv": 1}, {"d_conv": 2}, {"gate_rank": 2}, {"gate_reparam": True}, {"expand": 1.5, "alpha": 0.7}]
)
def test_every_option(options):
    check(draw("naju", torch.float32, 6, d_state=3, **options), 2, 20)


@runs_kernels
@pytest.mark.parametrize("length", [1, 2, 16, 33])
def test_lengths_about_the_tail_and_the_chunk(length):
    check(draw("naju", torch.float32, 4, d_state=3), 3, length)


@runs_kernels
@pytest.mark.parametrize("length", [1, 2, 3, 16, 33])
def test_a_sequence_that_begins(length, processors):
    check(draw("naju", torch.float32, 4, d_state=3), 3, length, begins=True)


# The output alone: there is then no gradient of the final state, nor of h, to start from.
TRAINING = {"differentiated": slice(1)}


@pytest.fixture
def state_gradients(monkeypatch):
    """Those of the final state that reached the kernels."""
    backward, given = launch.backward, []
    monkeypatch.setattr(launch, "backward", lambda *arguments: given.append(arguments[4]) or backward(*arguments))
    return given


@runs_kernels
@pytest.mark.parametrize("begins", [True, False], ids=["begins", "carried"])
def test_training_differentiates_the_output_alone(begins, processors, state_gradients):
    check(draw("naju", torch.float32, 4, d_state=3), 2, 37, begins=begins, **TRAINING)
    assert state_gradients == [None]


@runs_kernels
def test_training_on_packed_sequences(state_gradients):
    check(draw("naju", torch.float32, 4, d_state=3), 1, 60, rows=6, cu_seqlens=PACKED, **TRAINING)
    assert state_gradients == [None]


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter cuts digits off where a GPU rounds them")
@pytest.mark.parametrize("differentiated", [slice(1), slice(None)], ids=["output", "everything"])
def test_training_in_the_default_precision_and_sizes(differentiated):
    for batch, length in ((3, 700), (8, 64)):
        mixer = draw("naju", torch.bfloat16, 48, d_state=64)
        check(mixer, batch, length, begins=True, differentiated=differentiated)


@runs_kernels
def test_packed_sequences(processors):
    check(draw("naju", torch.float32, 5, d_state=3), 1, 60, rows=6, cu_seqlens=PACKED)


@runs_kernels
def test_padding_anywhere():
    mask = torch.ones(4, 20, dtype=torch.bool, device=DEVICE)
    mask[0, 13:] = mask[1, :5] = mask[2, 4:9] = mask[3, :] = False
    check(draw("naju", torch.float32, 5, d_state=3), 4, 20, attention_mask=mask)


@runs_kernels
def test_half_precision():
    check(draw("naju", torch.float16, 8, d_state=8), 2, 40)
    if DEVICE == "cuda":  # the interpreter cuts digits off where a GPU rounds them
        check(draw("naju", torch.bfloat16, 48, d_state=64), 3, 700)


# the interpreter cuts digits off where a GPU rounds them
@runs_kernels
@pytest.mark.parametrize(
    "dtype", [torch.float32, *([torch.bfloat16, torch.float16] if DEVICE == "cuda" else [])], ids=str
)
def test_what_is_not_differentiated_keeps_nothing(dtype, monkeypatch):
    monkeypatch.setattr(launch, "kept_states", lambda *arguments: pytest.fail("states were kept"))
    mixer, u = draw("naju", dtype, 4, d_state=3), torch.randn(2, 40, 4, device=DEVICE).to(dtype)
    with torch.no_grad():
        got, after = mixer(u)
        want, want_after = copy.deepcopy(mixer).double()(u.double())
    assert relative_rms(got, want) <= TOLERANCE[dtype, "forward"]
    assert relative_rms(after.x, want_after.x) <= TOLERANCE[dtype, "forward"]


@runs_kernels
def test_the_operator_keeps_torchs_contract(monkeypatch):
    arguments: list[Any] = []
    monkeypatch.setattr("naju.mixers.naju.layer", lambda *given: arguments.extend(given))
    mixer = draw("naju", torch.float32, 4, d_state=3)
    mixer._fused(mixer.project_in(torch.randn(1, 9, 4, device=DEVICE)), mixer.init_state(1), Layout(1))
    leaves = (a.detach().requires_grad_() if isinstance(a, Tensor) else a for a in arguments)
    torch.library.opcheck(torch.ops.naju.triton_layer.default, (*leaves, True))


CARRIED = pytest.mark.parametrize("carried", [False, True], ids=["begins", "carried"])


@runs_kernels
@pytest.mark.parametrize("how", ["begins", "carried", "packed"])
def test_one_graph_under_compile(how):
    mixer = draw("naju", torch.float32, 4, d_state=3)
    u, state = given_to(mixer, *((1, 60, 6) if how == "packed" else (2, 9)))
    given, options = None if how == "begins" else state, {"cu_seqlens": PACKED} if how == "packed" else {}
    counter = CompileCounterWithBackend("aot_eager")
    want = outcome(mixer, u, given, **options)
    got = outcome(mixer, u, given, partial(call_compiled, counter), **options)
    assert_same(got, want, TOLERANCE[torch.float32, "law"])
    assert [[node.target for node in graph.graph.nodes].count(FUSED) for graph in counter.graphs] == [1]


@runs_kernels
@CARRIED
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_bits(reentrant, carried):
    """The outputs of the reentrant kind alone are those of a forward that keeps nothing, which rounds in another order
    on the way out."""
    mixer = draw("naju", torch.float32, 4, d_state=3)
    u, state = given_to(mixer, 2, 9)
    given = state if carried else None
    want = outcome(mixer, u, given)
    got = outcome(mixer, u, given, partial(checkpoint, use_reentrant=reentrant))
    assert_same(got, want, TOLERANCE[torch.float32, "law"] if reentrant else 0.0, gradients=0.0)


@runs_kernels
@CARRIED
def test_autocast_with_a_backward(carried):
    mixer = draw("naju", torch.float32, 8, d_state=8)
    u, state = given_to(mixer, 2, 40)
    given = state if carried else None
    got = outcome(mixer, u, given, call_under_autocast)
    want = outcome(copy.deepcopy(mixer).double(), u.double(), given and given.map(Tensor.double))
    assert got["out"].dtype == torch.bfloat16
    assert {got[name].dtype for name in ("x", *(name for name in got if name.startswith("d")))} == {torch.float32}
    assert_same(got, want, 2e-2)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_rounds_nothing_between_the_outer_projections(dtype):
    """Least of all the gates: a product that were lowered would show in some bit."""
    mixer = draw("naju", torch.float32, 4, d_state=3)
    uz = torch.randn(2, 20, 16, device=DEVICE).to(dtype)
    with torch.autocast(DEVICE, torch.bfloat16):
        lowered = drive_gradient(mixer, uz)
    assert torch.equal(lowered, drive_gradient(mixer, uz))


def call_compiled(backend: Any, run: Run, *tensors: Tensor) -> tuple[Tensor, ...]:
    try:
        return torch.compile(run, fullgraph=True, backend=backend)(*tensors)
    finally:
        torch.compiler.reset()


def call_under_autocast(run: Run, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The forward alone, as torch advises."""
    with torch.autocast(DEVICE, torch.bfloat16):
        return run(*tensors)


def assert_same(
    got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float, gradients: float | None = None
) -> None:
    """0 means bit for bit; gradients have the tolerance of outputs where none is given for them."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        allowed = gradients if gradients is not None and name.startswith("d") else tolerance
        assert torch.equal(got[name], tensor) or relative_rms(got[name], tensor) <= allowed, name


def drive_gradient(mixer: nn.Module, uz: Tensor) -> Tensor:
    """The gradient of what the first projection hands over, for half the squared norm of the results."""
    uz = uz.detach().requires_grad_()
    results = mixer._fused(uz, mixer.init_state(uz.shape[0]), Layout(uz.shape[0]))
    return torch.autograd.grad(results, uz, [result.detach() for result in results])[0]


@runs_kernels
def test_a_projection_that_lies_time_first_has_its_gradient():
    mixer = draw("naju", torch.float32, 4, d_state=3)
    uz = torch.randn(5, 3, 16, device=DEVICE).transpose(0, 1)
    # a GPU's kernels are compiled for each alignment of rows, and round in another order
    difference = relative_rms(drive_gradient(mixer, uz), drive_gradient(mixer, uz.contiguous()))
    assert difference <= TOLERANCE[torch.float32, "law"]


@runs_kernels
def test_a_second_derivative_is_refused_with_a_way_out():
    mixer, u = draw("naju", torch.float32, 4, d_state=3), torch.randn(1, 9, 4, device=DEVICE, requires_grad=True)
    (gradient,) = torch.autograd.grad(mixer(u)[0].sum(), u, create_graph=True)
    with pytest.raises(RuntimeError, match="backend='chunked' can be, twice"):
        gradient.sum().backward()


@runs_kernels
def test_an_adapter_in_place_of_a_projection_is_not_passed_over():
    mixer = draw("naju", torch.float32, 4, d_state=3)
    u = torch.randn(1, 9, 4, device=DEVICE)
    before, _ = mixer(u)
    mixer.project_BC = Doubled(mixer.project_BC)
    assert relative_rms(mixer(u)[0].detach(), before.detach()) > 0.01


@runs_kernels
def test_a_hook_on_a_projection_is_not_passed_over():
    mixer = draw("naju", torch.float32, 4, d_state=3)
    u = torch.randn(1, 9, 4, device=DEVICE)
    before, _ = mixer(u)
    mixer.project_BC.register_forward_hook(lambda module, given, out: 2 * out)
    assert relative_rms(mixer(u)[0].detach(), before.detach()) > 0.01


@runs_kernels
@pytest.mark.parametrize("name", ["D", "conv.weight", "write.bias", "forget.conv.weight"])
def test_a_parameter_of_another_size_is_refused_before_it_is_read_by_its_address(name):
    mixer = draw("naju", torch.float32, 4, d_state=3)
    owner, _, last = name.rpartition(".")
    setattr(mixer.get_submodule(owner), last, nn.Parameter(mixer.get_parameter(name)[:3].detach()))
    with pytest.raises(ValueError, match="a layer of 8 channels cannot have"):
        mixer(torch.randn(1, 9, 4, device=DEVICE))


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, u: Tensor) -> Tensor:
        return 2 * self.inner(u)
