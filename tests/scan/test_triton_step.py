"""The step kernel against the mixer's own step in float64: in the interpreter, and compiled for every architecture."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interpreter import passes_under_the_interpreter
from naju import LanguageModel, ModelConfig
from naju.models.graphs import next_buffer, step_between
from naju.scan.on_gpu import interpreted as interpreting
from naju.scan.triton_step import MOST_ALONE, compiled_for, products_compiled_for, step_refuses
from numerics import TOLERANCE, relative_rms
from step_cases import SIZES, assert_poison_stays, assert_step_agrees, draw

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
interpreted = pytest.mark.skipif(not interpreting(), reason="test_under_the_interpreter runs it")
not_interpreted = pytest.mark.skipif(interpreting(), reason="Triton's interpreter is on")


@needs_triton
@not_interpreted
def test_under_the_interpreter() -> None:
    passes_under_the_interpreter(__file__, "-k", "interpreted")


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN, so that an output which the kernel forgets to write is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@interpreted
@pytest.mark.parametrize("name", ["naju", "coupled"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_interpreted_at_awkward_sizes(name: str, size: tuple[int, float, int, int]) -> None:
    batch, expand, d_state, d_conv = size
    mixer, u, state = draw(name, batch, expand=expand, d_state=d_state, d_conv=d_conv, alpha=0.3)
    assert_step_agrees(step_refuses, mixer, u, state, torch.float32)


@interpreted
@pytest.mark.parametrize("batch", [1, 4])
def test_interpreted_in_several_tiles_of_channels(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow(compiled: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        return lambda *arguments, **options: compiled(*arguments, **options) | {"BLOCK_K": 16}

    monkeypatch.setattr("naju.scan.triton_step.compiled_for", narrow(compiled_for))
    monkeypatch.setattr("naju.scan.triton_step.products_compiled_for", narrow(products_compiled_for))
    assert_step_agrees(step_refuses, *draw("naju", batch, expand=5, d_state=70), torch.float32)


@interpreted
@pytest.mark.parametrize("name", ["naju", "coupled"])
def test_interpreted_with_scaled_gates(name: str) -> None:
    assert_step_agrees(step_refuses, *draw(name, 3, d_state=5, gate_reparam=True), torch.float32)


@interpreted
@pytest.mark.parametrize("batch", [1, 3])
def test_interpreted_in_float16(batch: int) -> None:
    assert_step_agrees(step_refuses, *draw("naju", batch, torch.float16, d_state=5), torch.float16)


@interpreted
@pytest.mark.parametrize("batch", [1, 3])
def test_interpreted_under_autocast(batch: int) -> None:
    """Weights stay float32 in memory; products see them in half precision, and the memory is not rounded."""
    mixer, u, state = draw("naju", batch, d_state=5)
    with torch.autocast("cpu", torch.float16):
        assert_step_agrees(step_refuses, mixer, u, state, torch.float16)


@interpreted
@pytest.mark.parametrize("batch", [1, 18])
def test_interpreted_saturated_gates_hold_the_memory_bit_for_bit(batch: int) -> None:
    mixer, u, state = draw("naju", batch, d_state=5, f_bias=math.inf, i_bias=-math.inf)
    with torch.no_grad():
        assert torch.equal(mixer.step(u, state)[1].x, state.x)


@interpreted
def test_interpreted_a_poisoned_neighbour_changes_nothing() -> None:
    assert_poison_stays(*draw("naju", 18, d_state=5))


@interpreted
def test_interpreted_streaming_is_one_forward() -> None:
    """Tails that a forward hands over, views of longer tensors, are read as they are meant."""
    mixer, _, state = draw("naju", 3, d_state=5, backend="chunked")
    u = torch.randn(3, 9, 12)
    with torch.no_grad():
        want, want_after = mixer(u, state)
        _, state = mixer(u[:, :4], state)
        for t in range(4, 9):
            out, state = mixer.step(u[:, t], state)
            assert relative_rms(out, want[:, t]) <= TOLERANCE[torch.float32, "law"]
    for name, tensor in want_after.tensors().items():
        assert relative_rms(state.tensors()[name], tensor) <= TOLERANCE[torch.float32, "law"]


@interpreted
def test_interpreted_a_graph_spares_the_copy_of_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {name: {"d_state": d_state, "backend": "chunked"} for name, d_state in (("naju", 5), ("coupled", 3))}
    model = LanguageModel(ModelConfig(vocab_size=7, d_model=8, n_layers=2, mixer=list(options), mixer_options=options))
    token = torch.tensor([1, 4])
    with torch.no_grad():
        before = model(torch.tensor([[1, 2], [3, 4]]))[1]
        want, want_after = model.step(token, before)
        after = want_after.map(torch.zeros_like)
        monkeypatch.setattr(torch, "_foreach_copy_", None)
        assert torch.equal(step_between(model.step, token, before, after), want)
        assert all(torch.equal(after.tensors()[name], tensor) for name, tensor in want_after.tensors().items())
        after = next_buffer(before)
        assert torch.equal(step_between(model.step, token, before, after), want)
    assert all(torch.equal(after.tensors()[name], tensor) for name, tensor in want_after.tensors().items())
    assert all(old.x is new.x for old, new in zip(before.layers, after.layers, strict=True))  # type: ignore[attr-defined]


@interpreted
@pytest.mark.parametrize("name", ["naju", "coupled"])
def test_interpreted_as_a_torch_operator(name: str) -> None:
    mixer, u, state = draw(name, 2, d_state=3)
    torch.use_deterministic_algorithms(False)  # the schema test compares empty tensors with themselves
    with torch.no_grad():
        inputs = mixer._step_inputs(mixer.project_in(u), state)
        assert inputs is not None
        utilities = ("test_schema", "test_faketensor")
        torch.library.opcheck(torch.ops.naju.triton_step.default, tuple(inputs), test_utils=utilities)


@interpreted
def test_interpreted_a_compiled_step_is_one_graph() -> None:
    mixer, u, state = draw("naju", 2, d_state=3)
    with torch.no_grad():
        want, want_after = mixer.step(u, state)
        got, after = torch.compile(mixer.step, fullgraph=True, backend="aot_eager")(u, state)
    torch.compiler.reset()
    assert torch.equal(got, want)
    assert all(torch.equal(after.tensors()[name], tensor) for name, tensor in want_after.tensors().items())


@interpreted
@pytest.mark.parametrize(
    ("d_state", "dtype", "reason"),
    [
        (256, torch.float32, None),
        (257, torch.float32, "d_state is 257 and it goes up to 256"),
        (4, torch.float64, "h is float64 and it computes in float32"),
    ],
)
def test_interpreted_what_it_refuses(d_state: int, dtype: torch.dtype, reason: str | None) -> None:
    mixer, u, state = draw("naju", 1, dtype, d_state=d_state)
    inputs = mixer._step_inputs(mixer.project_in(u), state)
    assert inputs is not None
    assert step_refuses(inputs) == (reason or "a gradient is asked for and it has no backward")
    with torch.no_grad():
        assert step_refuses(inputs) == reason
        mixer.step(u, state)


@interpreted
def test_interpreted_weights_of_several_precisions_take_the_torch_step() -> None:
    mixer, u, state = draw("naju", 2)
    with torch.no_grad():
        inputs = mixer._step_inputs(mixer.project_in(u), state)
    assert inputs is not None
    assert step_refuses(inputs._replace(W_BC=inputs.W_BC.half())) == "its weights are of several precisions"


@interpreted
def test_interpreted_weights_beyond_32_bits_take_the_torch_step() -> None:
    mixer, u, state = draw("naju", 2)
    with torch.no_grad():
        inputs = mixer._step_inputs(mixer.project_in(u), state)
        assert inputs is not None
        huge = [torch.zeros(1).expand(46341, 46341)] * 2
        assert step_refuses(inputs._replace(gate_weights=huge)) == "a weight has more numbers than it can count"


class Doubled(nn.Linear):
    def forward(self, h: Tensor) -> Tensor:
        return 2 * super().forward(h)


@interpreted
def test_interpreted_only_plain_projections_are_bypassed() -> None:
    for mixer, u, state in (draw("naju", 1, gate_rank=3), draw("coupled", 1, gate_rank=24)):
        assert mixer._step_inputs(mixer.project_in(u), state) is None
    mixer, u, state = draw("naju", 1)
    mixer.project_BC.__class__ = Doubled
    assert mixer._step_inputs(mixer.project_in(u), state) is None


@interpreted
def test_interpreted_a_step_that_is_differentiated_has_its_gradient() -> None:
    mixer, u, state = draw("naju", 2)
    (gradient,) = torch.autograd.grad(mixer.step(u.requires_grad_(), state)[0].sum(), u)
    assert gradient.abs().min() > 0


ARCHITECTURES = (80, 89, 90, 100, 120)
# d_inner, d_state, d_conv, precision of the activations and of the weights, whether there is one gate
PLAIN = (520, 64, 4, "*bf16", "*bf16", False)
OTHERS = [
    (96, 128, 2, "*fp32", "*fp32", True),
    (16, 1, 1, "*fp16", "*fp16", False),
    (1024, 64, 4, "*bf16", "*fp32", False),
]
ACTIVATIONS = ("uz", "y", "u_tail", "h_tail", "u_tail_out", "h_tail_out")


def shared_memory_of(architecture: int) -> int:
    return {80: 163, 90: 227, 100: 227}.get(architecture, 99) * 1024


def compile_kernel(kernel: Any, settings: dict[str, Any], types: dict[str, str], weight: str, architecture: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")
    options = {name: settings.pop(name) for name in names if name in settings}
    types |= dict.fromkeys(settings, "constexpr")
    signature = {p.name: types.get(p.name) or p.annotation_type or weight for p in kernel.params}
    aligned = {(place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values()) if kind[0] == "*"}
    known = {name: value for name, value in settings.items() if name in signature}
    source = ASTSource(fn=kernel, signature=signature, constexprs=known, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def compile_step(architecture: int, batch: int, case: tuple[int, int, int, str, str, bool]) -> list[Any]:
    from naju.scan.triton_step.kernels import products_kernel, step_kernel

    d_inner, d_state, d_conv, activation, weight, coupled = case
    types = dict.fromkeys(ACTIVATIONS, activation) | dict.fromkeys(("x", "x_out", "products"), "*fp32")
    absent: dict[str, Any] = dict.fromkeys(("W_f", "f_taps", "f_bias")) if coupled else {}
    together, overlaps = batch > MOST_ALONE, architecture >= 90
    sizes = (d_inner, d_state, d_conv, 4 if weight == "*fp32" else 2)
    settings = compiled_for(batch, *sizes, overlaps=overlaps) | absent | ({} if together else {"products": None})
    made = [compile_kernel(step_kernel, settings, types.copy(), weight, architecture)]
    if together:
        settings = products_compiled_for(*sizes, overlaps=overlaps) | absent
        made.append(compile_kernel(products_kernel, settings, types.copy(), weight, architecture))
    return made


@needs_triton
@not_interpreted
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("batch", [MOST_ALONE, MOST_ALONE + 1])
def test_every_block_compiles_for_every_architecture(batch: int, architecture: int) -> None:
    for case in [PLAIN, *(OTHERS if architecture == 90 else [])]:
        for made in compile_step(architecture, batch, case):
            assert made.asm["cubin"]
            assert ("griddepcontrol" in made.asm["ptx"]) == (batch > MOST_ALONE and architecture >= 90)
            assert made.metadata.shared <= shared_memory_of(architecture), case


@needs_triton
@not_interpreted
def test_the_batch_is_not_compiled_in() -> None:
    from naju.scan.triton_step.kernels import products_kernel, step_kernel

    for kernel in (step_kernel, products_kernel):
        numbers = [parameter for parameter in kernel.params if parameter.annotation_type == "i64"]
        assert [parameter.name for parameter in numbers] == ["batch", "uz_batch"]
        assert all(parameter.do_not_specialize for parameter in numbers)
    compiled = [compiled_for(batch, 64, 16, 4, 2, overlaps=True) for batch in range(1, 2000)]
    assert [settings for place, settings in enumerate(compiled) if settings not in compiled[:place]] == [
        compiled_for(1, 64, 16, 4, 2, overlaps=True),
        compiled_for(MOST_ALONE + 1, 64, 16, 4, 2, overlaps=True),
    ]


@not_interpreted
def test_a_cpu_does_without_it() -> None:
    mixer, u, state = draw("naju", 2)
    with torch.no_grad():
        inputs = mixer._step_inputs(mixer.project_in(u), state)
        assert inputs is not None
        assert step_refuses(inputs) == "h is on cpu and it runs on NVIDIA GPUs only"
