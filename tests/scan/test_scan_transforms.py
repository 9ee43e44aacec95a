"""The scan under everything that torch does to functions: the result is right, or there is an error; never a zero."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from naju import backends, naju_scan, naju_step
from numerics import (
    TENSORS,
    Scan,
    ScanCase,
    assert_agrees,
    draw_case,
    each_backend,
    each_backend_and_auto,
    or_skip,
    outcome,
    truth,
)

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script.* is deprecated:DeprecationWarning")
needs_compiler = pytest.mark.skipif(backends()["cpu_compiled"] is not None, reason=str(backends()["cpu_compiled"]))
compiled_or_auto = pytest.mark.parametrize("backend", [or_skip("cpu_compiled"), "auto"])

# What a refusal says, so that a mistake in a test is not taken for one.
REFUSALS = (
    "has a plain backward only",
    "backward cannot be differentiated",
    "Batching rule not implemented",
    "forward AD",
    "forward mode",
    "double backward",
)
Results = dict[str, Tensor]


def case(**options: Any) -> ScanCase:
    return draw_case(**{"batch": 2, "length": 20, "d_inner": 5, "d_state": 3} | options)


def positional(backend: str, **options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """The scan as a function of tensors in the order of TENSORS, which is what transforms want."""
    return lambda *tensors: naju_scan(**dict(zip(TENSORS, tensors, strict=True)), **options, backend=backend)


def named(results: Sequence[Tensor | None], prefix: str = "") -> Results:
    """Missing derivatives come as None and stand for zeros."""
    given = [torch.zeros(()) if tensor is None else tensor.detach() for tensor in results]
    names = ("y", "state") if len(given) == 2 else TENSORS
    return {prefix + name: tensor for name, tensor in zip(names, given, strict=True)}


def right_or_refused(compute: Callable[[], Results], want: Results) -> bool:
    """Whether it was right; False means that it refused, and anything else is a failure."""
    try:
        got = compute()
    except Exception as error:
        if not re.search("|".join(REFUSALS), str(error)):
            raise
        return False
    assert_agrees(got, want, torch.float32, "gradient")
    return True


def directional(function: Callable[..., Any], tensors: Sequence[Tensor], tangents: Sequence[Tensor]) -> Results:
    return named(torch.func.jvp(function, tuple(tensors), tuple(tangents))[1])


def dual(function: Callable[..., Any], tensors: Sequence[Tensor], tangents: Sequence[Tensor]) -> Results:
    with forward_ad.dual_level():
        results = function(*map(forward_ad.make_dual, tensors, tangents))
        return named([forward_ad.unpack_dual(result).tangent for result in results])


FORWARD_MODES = {"torch.func.jvp": directional, "dual numbers": dual}


def tensors_and_tangents() -> tuple[list[Tensor], list[Tensor], Results]:
    """Inputs, a direction, and the float64 derivative along it, whose own check is `test_gradcheck`."""
    tensors, tangents = (list(case(seed=seed).tensors.values()) for seed in (0, 1))
    want = directional(positional("reference"), [t.double() for t in tensors], [t.double() for t in tangents])
    return tensors, tangents, want


@each_backend_and_auto
@pytest.mark.parametrize("mode", FORWARD_MODES)
def test_forward_mode(backend: str, mode: str) -> None:
    tensors, tangents, want = tensors_and_tangents()
    right = right_or_refused(lambda: FORWARD_MODES[mode](positional(backend), tensors, tangents), want)
    assert right == (backend != "cpu_compiled")


@compiled_or_auto
@pytest.mark.parametrize(("mode", "compiler"), [("torch.func.jvp", "aot_eager"), ("dual numbers", "eager")])
def test_forward_mode_inside_compile(backend: str, mode: str, compiler: str) -> None:
    tensors, tangents, want = tensors_and_tangents()
    function = _compiled(lambda: FORWARD_MODES[mode](positional(backend), tensors, tangents), compiler)
    right_or_refused(function, want)


@compiled_or_auto
def test_dual_numbers_into_a_function_compiled_before(backend: str) -> None:
    tensors, tangents, want = tensors_and_tangents()
    function = _compiled(positional(backend))
    function(*tensors)
    right_or_refused(lambda: dual(function, tensors, tangents), want)


@each_backend_and_auto
@pytest.mark.parametrize("absent", [(), ("z",)], ids=["with z", "without z"])
def test_forward_mode_through_the_backward(backend: str, absent: tuple[str, ...]) -> None:
    """A cotangent with a tangent: the backward is linear in it, so a gradient's tangent is the tangent's gradient."""
    one = case().without(*absent)
    want = {name: grad for name, grad in truth(one).items() if name.startswith("d")}

    def compute() -> Results:
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in one.tensors.items()}
        results = naju_scan(**leaves, backend=backend)
        with forward_ad.dual_level():
            cotangents = [forward_ad.make_dual(torch.randn_like(d), d) for d in (one.dy, one.dstate)]
            grads = torch.autograd.grad(results, list(leaves.values()), cotangents)
            tangents = [forward_ad.unpack_dual(grad).tangent for grad in grads]
            return {f"d{name}": torch.zeros(()) if t is None else t for name, t in zip(leaves, tangents, strict=True)}

    right_or_refused(compute, want)


def _second_derivatives(one: ScanCase, backend: str) -> Results:
    """Gradients of the squared norm of all gradients."""
    leaves = [tensor.clone().requires_grad_() for tensor in one.tensors.values()]
    grads = torch.autograd.grad(positional(backend)(*leaves), leaves, [one.dy, one.dstate], create_graph=True)
    return named(torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves, materialize_grads=True), "dd")


@each_backend_and_auto
def test_double_backward(backend: str) -> None:
    right = right_or_refused(
        partial(_second_derivatives, case(), backend), _second_derivatives(case().double(), "reference")
    )
    assert right or backend in ("cpu_compiled", "auto")


@each_backend_and_auto
def test_batched_gradients(backend: str) -> None:
    many = [case(seed=seed) for seed in range(3)]
    tensors = many[0].tensors
    wants = [truth(ScanCase(tensors=tensors, dy=each.dy, dstate=each.dstate)) for each in many]
    want = {f"d{name}": torch.stack([each[f"d{name}"] for each in wants]) for name in TENSORS}

    def compute() -> Results:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors.values()]
        cotangents = [torch.stack([each.dy for each in many]), torch.stack([each.dstate for each in many])]
        results = positional(backend)(*leaves)
        return named(torch.autograd.grad(results, leaves, cotangents, is_grads_batched=True), "d")

    right = right_or_refused(compute, want)
    assert right or backend in ("cpu_compiled", "auto")


@each_backend_and_auto
@pytest.mark.parametrize("cu_seqlens", [None, [0, 3, 3, 20]], ids=["batch", "packed"])
def test_vmap(backend: str, cu_seqlens: list[int] | None) -> None:
    """Over a new leading axis of everything but D."""
    many = [case(batch=1 if cu_seqlens else 2, cu_seqlens=cu_seqlens, seed=seed) for seed in range(3)]
    shared = many[0].tensors["D"]
    wants = [
        naju_scan(**each.double().tensors | {"D": shared.double()}, **each.options, backend="reference")
        for each in many
    ]
    want = named([torch.stack(column) for column in zip(*wants, strict=True)])
    stacked = [shared if n == "D" else torch.stack([each.tensors[n] for each in many]) for n in TENSORS]
    mapped = torch.func.vmap(
        positional(backend, **many[0].options), in_dims=tuple(None if n == "D" else 0 for n in TENSORS)
    )
    right = right_or_refused(lambda: named(mapped(*stacked)), want)
    assert right == (backend != "cpu_compiled")


def _functional_gradient(one: ScanCase, backend: str) -> Callable[..., tuple[Tensor, ...]]:
    def loss(*tensors: Tensor) -> Tensor:
        y, state = positional(backend)(*tensors)
        return (y * one.dy).sum() + (state * one.dstate).sum()

    return torch.func.grad(loss, argnums=tuple(range(len(TENSORS))))


@each_backend_and_auto
def test_functional_gradient(backend: str) -> None:
    one = case()
    want = {f"d{name}": truth(one)[f"d{name}"] for name in TENSORS}
    right = right_or_refused(lambda: named(_functional_gradient(one, backend)(*one.tensors.values()), "d"), want)
    assert right == (backend != "cpu_compiled")


@each_backend_and_auto
def test_gradients_per_sample(backend: str) -> None:
    """vmap over torch.func.grad, every sample a batch of one."""
    many = [case(batch=1, seed=seed) for seed in range(3)]
    wants = [truth(ScanCase(tensors=each.tensors, dy=many[0].dy, dstate=many[0].dstate)) for each in many]
    want = {f"d{name}": torch.stack([each[f"d{name}"] for each in wants]) for name in TENSORS}
    stacked = [torch.stack([each.tensors[name] for each in many]) for name in TENSORS]
    function = torch.func.vmap(_functional_gradient(many[0], backend))
    right = right_or_refused(lambda: named(function(*stacked), "d"), want)
    assert right == (backend != "cpu_compiled")


def _compiled(function: Callable[..., Any], compiler: str = "aot_eager") -> Callable[..., Any]:
    return torch.compile(function, backend=compiler, fullgraph=True)


@pytest.fixture(autouse=True)
def _forgotten_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


COMPILED = {
    "plain": {},
    "reverse": {"reverse": True},
    "packed": {"batch": 1, "cu_seqlens": [0, 3, 3, 20]},
    "packed and reverse": {"batch": 1, "cu_seqlens": [0, 0, 7, 20], "reverse": True},
    "bfloat16": {"dtype": torch.bfloat16},
    "alpha": {"alpha": 0.3},
}


@needs_compiler
@pytest.mark.parametrize("variant", COMPILED)
def test_compile_of_auto(variant: str) -> None:
    one = case(**COMPILED[variant])
    assert_agrees(outcome(one, _compiled(naju_scan)), truth(one), one.dtype)


@each_backend
def test_compile_of_each_backend(backend: str) -> None:
    """The torch backends in a single graph; their operations are torch's own, so it need not be lowered further."""
    one = case(length=5)
    compiler = "aot_eager" if backend == "cpu_compiled" else "eager"
    assert_agrees(outcome(one, _compiled(partial(naju_scan, backend=backend), compiler)), truth(one), torch.float32)


@pytest.mark.parametrize("absent", ["D", "z", "initial_state"])
def test_compile_without_optional_arguments(absent: str) -> None:
    one = case(length=9).without(absent)
    assert_agrees(outcome(one, _compiled(naju_scan)), truth(one), torch.float32)


@needs_compiler
def test_one_compiled_function_takes_every_length() -> None:
    graphs = []

    def counting(graph: torch.fx.GraphModule, example: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    function = torch.compile(naju_scan, backend=counting, fullgraph=True, dynamic=True)
    for length in (7, 17, 40):
        one = case(length=length)
        assert_agrees(outcome(one, function), truth(one), torch.float32)
    assert len(graphs) == 1


@pytest.mark.slow
@needs_compiler
def test_compile_by_inductor() -> None:
    one = case()
    around = _compiled(lambda h, **rest: naju_scan(torch.tanh(h) * 2, **rest), "inductor")
    eager = outcome(one.double(), lambda h, **rest: naju_scan(torch.tanh(h) * 2, **rest, backend="reference"))
    assert_agrees(outcome(one, around), eager, torch.float32)


@needs_compiler
def test_a_compiled_function_refuses_wrong_boundaries() -> None:
    one = case(batch=1, cu_seqlens=[0, 3, 20])
    function = _compiled(naju_scan)
    function(**one.tensors, **one.options)
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the length 20"):
        function(**one.tensors, cu_seqlens=torch.tensor([0, 30, 20]))


@needs_compiler
@pytest.mark.parametrize("variant", ["plain", "packed and reverse", "bare"])
def test_operator_registration(variant: str) -> None:
    """Schema, fake implementation and autograd of the compiled operator agree with what it does."""
    one = case(**COMPILED.get(variant, {}))
    tensors = {name: tensor.requires_grad_() for name, tensor in one.tensors.items()}
    D, z = (None if variant == "bare" else tensors[name] for name in ("D", "z"))
    drive = [tensors[name] for name in ("h", "f_logit", "i_logit", "B", "C")]
    options = (one.options.get("cu_seqlens"), 0.5, one.options.get("reverse", False))
    checks = torch.library.opcheck(
        torch.ops.naju.cpu_scan.default, (*drive, D, z, tensors["initial_state"], *options, True)
    )
    assert set(checks.values()) == {"SUCCESS"}


def under_autocast(scan: Scan) -> Scan:
    """The forward alone, as torch advises."""

    def lowered(**tensors: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return scan(**tensors)

    return lowered


@each_backend_and_auto
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_lowers_no_arithmetic_of_the_state(backend: str, dtype: torch.dtype) -> None:
    one = case(length=40, dtype=dtype)
    want, got = truth(one), outcome(one, under_autocast(partial(naju_scan, backend=backend)))
    assert_agrees(got, want, dtype)
    assert got["y"].dtype == dtype
    assert got["state"].dtype == torch.float32
    states = ("state", "dinitial_state")
    assert_agrees({name: got[name] for name in states}, {name: want[name] for name in states}, torch.float32)


def test_autocast_lowers_no_arithmetic_of_a_step() -> None:
    one = case(length=1)

    def step(initial_state: Tensor, D: Tensor, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        y, state = naju_step(initial_state, **{name: tensor[:, 0] for name, tensor in tensors.items()}, D=D)
        return y.unsqueeze(1), state

    assert_agrees(outcome(one, under_autocast(step)), truth(one), torch.float32)


@each_backend_and_auto
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(backend: str, reentrant: bool) -> None:
    one = case()
    leaves = [tensor.clone().requires_grad_() for tensor in one.tensors.values()]
    results = checkpoint(positional(backend), *leaves, use_reentrant=reentrant)
    torch.autograd.backward(results, [one.dy, one.dstate])
    again = named([result.detach() for result in results]) | named([leaf.grad for leaf in leaves], "d")
    for name, tensor in outcome(one, backend).items():
        assert torch.equal(again[name], tensor), name


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT


def _a_half_of_something_wider(tensor: Tensor) -> Tensor:
    return torch.cat([torch.full_like(tensor, torch.nan), tensor], dim=-1).chunk(2, dim=-1)[1]


def _every_second_of_something_longer(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=-1)[..., 0]


VIEWS = [_transposed, _a_half_of_something_wider, _every_second_of_something_longer]


@each_backend
@pytest.mark.parametrize("view", VIEWS, ids=[view.__name__.strip("_") for view in VIEWS])
def test_views_of_other_tensors(backend: str, view: Callable[[Tensor], Tensor]) -> None:
    one = case(length=37)

    def scan(**tensors: Tensor) -> tuple[Tensor, Tensor]:
        return naju_scan(
            **{n: t if view is _transposed and t.dim() == 1 else view(t) for n, t in tensors.items()}, backend=backend
        )

    assert_agrees(outcome(one, scan), truth(one), torch.float32)


@each_backend
def test_expanded_inputs_and_cotangents(backend: str) -> None:
    """Tensors whose elements share memory, along each axis in turn, also on the way back."""
    one = case(length=37)
    sizes = {
        "h": (2, 1, 5),
        "f_logit": (1, 37, 5),
        "i_logit": (2, 37, 1),
        "B": (1, 1, 3),
        "C": (2, 37, 1),
        "z": (1, 1, 1),
    }
    shared = {name: one.tensors[name][tuple(map(slice, size))].contiguous() for name, size in sizes.items()}

    def gradients(backend: str, dtype: torch.dtype) -> Results:
        leaves = {name: tensor.to(dtype).detach().requires_grad_() for name, tensor in shared.items()}
        shapes = {name: one.tensors[name].shape for name in shared}
        y, state = naju_scan(**{name: leaf.expand(shapes[name]) for name, leaf in leaves.items()}, backend=backend)
        (y.sum() + state.sum()).backward()
        return {"y": y.detach(), "state": state.detach()} | {f"d{name}": leaf.grad for name, leaf in leaves.items()}

    assert_agrees(gradients(backend, torch.float32), gradients("reference", torch.float64), torch.float32)


@each_backend
@pytest.mark.parametrize("name", TENSORS)
def test_gradients_only_for_what_asks_for_them(backend: str, name: str) -> None:
    one = case()
    want = outcome(one, backend)
    leaves = {key: tensor.requires_grad_(key == name) for key, tensor in one.tensors.items()}
    y, state = naju_scan(**leaves, backend=backend)
    ((y * one.dy).sum() + (state * one.dstate).sum()).backward()
    assert_agrees({name: leaves[name].grad}, {name: want[f"d{name}"]}, torch.float32, "law")
    assert all(leaf.grad is None for key, leaf in leaves.items() if key != name)


@each_backend
@pytest.mark.parametrize("used", ["y", "state"])
def test_a_loss_on_one_of_the_results(backend: str, used: str) -> None:
    one = case()
    (one.dstate if used == "y" else one.dy).zero_()
    leaves = [tensor.requires_grad_() for tensor in one.tensors.values()]
    y, state = positional(backend)(*leaves)
    result, cotangent = (y, one.dy) if used == "y" else (state, one.dstate)
    grads = torch.autograd.grad(result, leaves, cotangent, materialize_grads=True)
    want = {f"d{name}": truth(one)[f"d{name}"] for name in TENSORS}
    assert_agrees(named(grads, "d"), want, torch.float32)


@each_backend
def test_a_second_backward_through_a_retained_graph(backend: str) -> None:
    one = case()
    leaves = [tensor.requires_grad_() for tensor in one.tensors.values()]
    results = positional(backend)(*leaves)
    first = torch.autograd.grad(results, leaves, [one.dy, one.dstate], retain_graph=True)
    second = torch.autograd.grad(results, leaves, [one.dy, one.dstate])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@needs_compiler
def test_an_input_changed_before_the_backward_is_noticed() -> None:
    leaves = {name: tensor.requires_grad_() for name, tensor in case().tensors.items()}
    y, _ = naju_scan(**leaves, backend="cpu_compiled")
    with torch.no_grad():
        leaves["B"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@each_backend
@pytest.mark.parametrize("reverse", [False, True])
def test_no_input_is_changed(backend: str, reverse: bool) -> None:
    one = case(reverse=reverse)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in one.tensors.items()}
    cotangents = [one.dy.clone(), one.dstate.clone()]
    torch.autograd.backward(naju_scan(**leaves, **one.options, backend=backend), cotangents)
    assert all(torch.equal(leaves[name], tensor) for name, tensor in one.tensors.items())
    assert torch.equal(cotangents[0], one.dy)
    assert torch.equal(cotangents[1], one.dstate)


@each_backend_and_auto
def test_inference_mode(backend: str) -> None:
    one = case()
    with torch.inference_mode():
        y, state = naju_scan(**one.tensors, backend=backend)
    want = truth(one)
    assert_agrees({"y": y, "state": state}, {name: want[name] for name in ("y", "state")}, torch.float32)


@pytest.fixture
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads_restored")
@each_backend
@pytest.mark.parametrize("threads", [1, 2])
def test_two_runs_give_the_same_bits(backend: str, threads: int) -> None:
    torch.set_num_threads(threads)
    one = case(length=70, d_inner=70, d_state=17)
    first, second = outcome(one, backend), outcome(one, backend)
    for name, tensor in first.items():
        assert torch.equal(second[name], tensor), name


@pytest.mark.usefixtures("_threads_restored")
@pytest.mark.parametrize("shape", [{"batch": 1}, {"batch": 3}, {"batch": 1, "cu_seqlens": [0, 1, 1, 40, 70]}])
@needs_compiler
def test_the_number_of_threads_does_not_matter(shape: dict[str, Any]) -> None:
    one = case(length=70, d_inner=150, d_state=17, **shape)
    want = truth(one)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        assert_agrees(outcome(one, "cpu_compiled"), want, torch.float32)
