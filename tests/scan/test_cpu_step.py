"""The compiled step of a CPU against the mixer's own step in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from naju import NajuMixer
from naju.scan.cpu_compiled.native import missing_here
from naju.scan.cpu_compiled.step import cpu_step, cpu_step_refuses
from naju.scan.on_gpu import interpreted
from naju.scan.step import step_kernel
from naju.scan.step_operator import StepInputs
from numerics import TOLERANCE, relative_rms
from step_cases import SIZES, assert_poison_stays, assert_step_agrees, draw

pytestmark = [
    pytest.mark.skipif(missing_here() is not None, reason=f"no compiled kernels: {missing_here()}"),
    pytest.mark.skipif(interpreted(), reason="Triton's interpreter is on, and its kernel goes first"),
]


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN, so that an output which the kernel forgets to write is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def agrees(mixer: NajuMixer, u: Tensor, state: Any) -> None:
    assert_step_agrees(cpu_step_refuses, mixer, u, state, torch.float32)


def inputs_of(mixer: NajuMixer, u: Tensor, state: Any) -> StepInputs:
    with torch.no_grad():
        inputs = mixer._step_inputs(mixer.project_in(u), state)
    assert inputs is not None
    return inputs


@pytest.mark.parametrize("name", ["naju", "coupled"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_at_awkward_sizes(name: str, size: tuple[int, float, int, int]) -> None:
    batch, expand, d_state, d_conv = size
    agrees(*draw(name, batch, expand=expand, d_state=d_state, d_conv=d_conv, alpha=0.3))


@pytest.mark.parametrize("name", ["naju", "coupled"])
def test_with_scaled_gates(name: str) -> None:
    agrees(*draw(name, 3, d_state=5, gate_reparam=True))


@pytest.mark.parametrize("bias", [-30.0, -8.0, 8.0, 30.0])
def test_with_gates_that_forget_and_that_hold(bias: float) -> None:
    agrees(*draw("naju", 5, d_state=9, f_bias=bias, i_bias=-bias))


@pytest.mark.parametrize("batch", [1, 18])
def test_saturated_gates_hold_or_overwrite_the_memory_bit_for_bit(batch: int) -> None:
    mixer, u, state = draw("naju", batch, d_state=5, f_bias=math.inf, i_bias=-math.inf)
    forgetful, *_ = draw("naju", batch, d_state=5, f_bias=-math.inf, i_bias=-math.inf)
    with torch.no_grad():
        assert torch.equal(mixer.step(u, state)[1].x, state.x)
        assert not forgetful.step(u, state)[1].x.any()


def test_a_poisoned_neighbour_changes_nothing() -> None:
    assert_poison_stays(*draw("naju", 18, d_state=5))


def test_a_sequence_does_not_depend_on_its_company() -> None:
    """Nor on threads: a large batch is shared among them."""
    mixer, u, state = draw("naju", 67, expand=40, d_state=33)
    inputs = inputs_of(mixer, u, state)
    before, threads = inputs.tensors(), torch.get_num_threads()
    copies = [tensor.clone() for tensor in before]
    try:
        torch.set_num_threads(3)
        together = cpu_step(*inputs)
        torch.set_num_threads(1)
        for row in (0, 5, 66):
            own = {name: getattr(inputs, name)[row : row + 1] for name in ("uz", "x", "u_tail", "h_tail")}
            for alone, all_rows in zip(cpu_step(*inputs._replace(**own)), together, strict=True):
                assert torch.equal(alone[0], all_rows[row])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(before, copies, strict=True))


def test_strided_inputs() -> None:
    mixer, u, state = draw("naju", 6, d_state=5)
    every_other = state.map(lambda tensor: tensor.repeat_interleave(2, 0)[::2])
    transposed = state.map(lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2))
    with torch.no_grad():
        want = mixer.step(u, state)[0]
        for strided in (every_other, transposed):
            assert torch.equal(mixer.step(u, strided)[0], want)


@pytest.mark.parametrize("name", ["naju", "coupled"])
def test_as_a_torch_operator(name: str) -> None:
    inputs = inputs_of(*draw(name, 2, d_state=3))
    torch.use_deterministic_algorithms(False)  # the schema test compares empty tensors with themselves
    utilities = ("test_schema", "test_faketensor")
    with torch.no_grad():
        torch.library.opcheck(torch.ops.naju.cpu_step.default, tuple(inputs), test_utils=utilities)


def test_what_it_refuses() -> None:
    inputs = inputs_of(*draw("naju", 2))
    assert cpu_step_refuses(inputs) == "a gradient is asked for and it has no backward"
    with torch.no_grad():
        assert step_kernel(inputs) is cpu_step
        assert cpu_step_refuses(inputs._replace(W_BC=inputs.W_BC.bfloat16())) == "not all of it is float32 on the CPU"
        assert (
            cpu_step_refuses(inputs._replace(D=inputs.D[:1]))
            == "its parts do not have the sizes that go with the state"
        )
        sparse = inputs._replace(D=inputs.D.to_sparse())
        assert cpu_step_refuses(sparse) == "not all of it is plain tensors, and it reads them by their addresses"
        with torch.autocast("cpu", torch.bfloat16):
            assert cpu_step_refuses(inputs) == "autocast is active and it computes in float32"


def test_a_step_that_is_differentiated_has_its_gradient() -> None:
    mixer, u, state = draw("naju", 2)
    (gradient,) = torch.autograd.grad(mixer.step(u.requires_grad_(), state)[0].sum(), u)
    assert gradient.abs().min() > 0


def test_an_exported_step_is_made_of_torch_operations() -> None:
    mixer, u, state = draw("naju", 2)

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = mixer

        def forward(self, u: Tensor) -> Tensor:
            return self.mixer.step(u, state)[0]

    with torch.no_grad():
        exported = torch.export.export(Step(), (u,))
        assert not any("cpu_step" in str(node.target) for node in exported.graph.nodes)
        got, want = exported.module()(u), mixer.step(u, state)[0]
    assert relative_rms(got, want) <= TOLERANCE[torch.float32, "law"]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.trace.* is deprecated")
def test_a_traced_step_is_made_of_torch_operations() -> None:
    mixer, u, state = draw("naju", 2)
    mixer.requires_grad_(False)  # a traced function keeps it as constants
    with torch.no_grad():
        traced = torch.jit.trace(lambda u: mixer.step(u, state)[0], (u,))
        assert "cpu_step" not in str(traced.graph)
        assert relative_rms(traced(-u), mixer.step(-u, state)[0]) <= TOLERANCE[torch.float32, "law"]


@pytest.mark.filterwarnings("ignore:.torch.jit.script.* is deprecated:DeprecationWarning")  # torch's forward mode
def test_vmap_and_forward_mode_see_through_a_step() -> None:
    mixer, u, state = draw("naju", 3)

    def out(u: Tensor) -> Tensor:
        return mixer.step(u, state)[0]

    with torch.no_grad():
        batched = torch.func.vmap(out)(torch.stack([u, -u]))
        assert relative_rms(batched[1], out(-u)) <= TOLERANCE[torch.float32, "law"]
        _, tangent = torch.func.jvp(out, (u,), (torch.ones_like(u),))
        moved = (out(u + 5e-3) - out(u - 5e-3)) / 1e-2
    assert relative_rms(tangent, moved) <= 1e-2
