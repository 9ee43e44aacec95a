"""The Triton kernels of Mamba's recurrence against float64: in the interpreter without a GPU, on it with one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from interpreter import passes_under_the_interpreter
from naju.layers.diagonal_scan import KERNEL_CHUNK, diagonal_scan
from naju.mixers import build_mixer
from naju.scan.on_gpu import interpreted
from numerics import TOLERANCE, relative_rms

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() and not interpreted() else "cpu"
runs_kernel = pytest.mark.skipif(DEVICE == "cpu" and not interpreted(), reason="test_under_the_interpreter runs it")
# length, channels, states; on a GPU also sizes that are too slow for the interpreter
SIZES = [
    (1, 3, 4),
    (KERNEL_CHUNK, 70, 16),
    (KERNEL_CHUNK + 1, 9, 64),
    (2 * KERNEL_CHUNK + 5, 5, 7),
    (3, 2, 256),
    (6, 32, 64),
]
SIZES += [(1000, 520, 64), (4097, 96, 16), (70, 33, 200)] if DEVICE == "cuda" else []


@pytest.mark.skipif(interpreted() or DEVICE == "cuda", reason="the kernels run here as they are")
def test_under_the_interpreter() -> None:
    passes_under_the_interpreter(__file__, "-k", "kernels_")


def draw(length, channels, states, batch=2):
    """h, dt, A, B, C and the initial state; steps from none at all to strong forgetting."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    dt = torch.relu(normal(batch, length, channels)) ** 3
    h, B, C = normal(batch, length, channels), normal(batch, length, states), normal(batch, length, states)
    tensors = (h, dt, -torch.exp(normal(channels, states)), B, C, normal(batch, channels, states))
    return [tensor.to(DEVICE).requires_grad_() for tensor in tensors]


def outcome(arguments, backend, cotangents):
    """y, the final state and the gradient of every argument."""
    *drive, x = arguments
    y, x = diagonal_scan(*drive, initial_state=x, backend=backend)
    return y, x, *torch.autograd.grad([y, x], arguments, [c.to(y) for c in cotangents])


@runs_kernel
@pytest.mark.parametrize(("length", "channels", "states"), SIZES)
def test_kernels_give_outputs_and_gradients_of_float64(length, channels, states):
    arguments = draw(length, channels, states)
    exact = [tensor.detach().double().requires_grad_() for tensor in arguments]
    cotangents = [torch.randn(2, length, channels), torch.randn(2, channels, states)]
    got, want = outcome(arguments, "triton", cotangents), outcome(exact, "torch", cotangents)
    for place, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert mine.dtype == torch.float32
        error = relative_rms(mine.detach(), theirs.detach())
        assert error <= TOLERANCE[torch.float32, "forward" if place < 2 else "gradient"], place


@runs_kernel
def test_kernels_take_blocks_of_channels_a_few_at_a_time(monkeypatch):
    from naju.layers import diagonal_kernels as kernels

    arguments = draw(5, 70, 64)
    cotangents = [torch.randn(2, 5, 70), torch.randn(2, 70, 64)]
    at_once = outcome(arguments, "triton", cotangents)
    monkeypatch.setattr(kernels, "MOST_PARTS", 4 * 2 * 5 * 64)  # nine blocks, four at a time
    for mine, theirs in zip(outcome(arguments, "triton", cotangents), at_once, strict=True):
        assert relative_rms(mine.detach(), theirs.detach()) <= 1e-6


@runs_kernel
def test_kernels_sum_small_terms_of_a_long_sequence_too():
    h, dt, A, B, C, _ = draw(20 * KERNEL_CHUNK, 2, 2)
    drive = [torch.ones_like(tensor).requires_grad_() for tensor in (h, dt, A, B, C)]
    drive[1] = (0.01 * torch.ones_like(dt)).requires_grad_()
    drive[2] = (-torch.ones_like(A)).requires_grad_()
    dy = torch.full_like(h, 2.0**-25).index_fill(1, torch.tensor([h.shape[1] - 1], device=DEVICE), 1.0)
    exact = [tensor.detach().double().requires_grad_() for tensor in drive]
    (mine,) = torch.autograd.grad(diagonal_scan(*drive, backend="triton")[0], [drive[2]], dy)
    (theirs,) = torch.autograd.grad(diagonal_scan(*exact, backend="torch")[0], [exact[2]], dy.double())
    assert relative_rms(mine, theirs) <= TOLERANCE[torch.float32, "gradient"]


@runs_kernel
def test_kernels_keep_the_state_in_the_precision_of_the_scan():
    *drive, x = draw(5, 3, 4)
    assert diagonal_scan(*drive, initial_state=x.bfloat16(), backend="triton")[1].dtype == torch.float32


@runs_kernel
def test_kernels_take_tensors_as_they_lie():
    h, dt, A, B, C, x = draw(20, 6, 8)
    turned = [tensor.detach().transpose(0, 1).contiguous().transpose(0, 1) for tensor in (h, dt, B, C)]
    want = diagonal_scan(h, dt, A, B, C, initial_state=x, backend="triton")
    h, dt, B, C = turned
    for got, same in zip(diagonal_scan(h, dt, A, B, C, initial_state=x, backend="triton"), want, strict=True):
        assert torch.equal(got, same)


@runs_kernel
def test_kernels_hold_a_state_through_steps_of_size_zero_bit_for_bit():
    h, dt, A, B, C, x = draw(KERNEL_CHUNK + 3, 6, 8)
    assert torch.equal(diagonal_scan(h, torch.zeros_like(dt), A, B, C, initial_state=x, backend="triton")[1], x)


@runs_kernel
def test_kernels_start_on_the_gpu_of_their_tensors(monkeypatch):
    """Which need not be the current one: Triton starts a kernel on that, whatever it is given."""
    from naju.layers import diagonal_kernels as kernels

    entered = []

    @contextlib.contextmanager
    def on_device(device):
        entered.append(device)
        yield
        entered.append(None)

    def watched(kernel):
        class Watched:
            def __getitem__(self, grid):
                assert entered[-1] == torch.device(h.device)
                return kernel[grid]

        return Watched()

    h, *rest, x = draw(5, 3, 4)
    monkeypatch.setattr(kernels, "on_device", on_device)
    for name in ("forward_kernel", "backward_kernel"):
        monkeypatch.setattr(kernels, name, watched(getattr(kernels, name)))
    outcome([h, *rest, x], "triton", [torch.randn(2, 5, 3), torch.randn(2, 3, 4)])
    assert len(entered) == 4


@runs_kernel
def test_kernels_and_packed_sequences():
    bounds = [0, 7, 7, 30]
    *drive, _ = draw(30, 5, 4, batch=1)
    x = torch.randn(3, 5, 4, device=DEVICE)
    packed = {"initial_state": x, "cu_seqlens": torch.tensor(bounds, device=DEVICE)}
    got, want = (diagonal_scan(*drive, **packed, backend=backend) for backend in ("triton", "torch"))
    for mine, theirs in zip(got, want, strict=True):
        assert relative_rms(mine.detach(), theirs.detach()) <= TOLERANCE[torch.float32, "forward"]


@runs_kernel
def test_kernels_are_one_graph_with_the_mixer_around_them():
    mixer = build_mixer("mamba", 8, d_state=4, backend="triton").to(DEVICE)
    u = torch.randn(2, 20, 8, device=DEVICE)
    compiled = torch.compile(lambda u: mixer(u)[0], fullgraph=True, backend="aot_eager")
    try:
        got = compiled(u)
        got.square().sum().backward()
    finally:
        torch.compiler.reset()
    gradients = [parameter.grad.clone() for parameter in mixer.parameters()]
    mixer.zero_grad()
    want = mixer(u)[0]
    want.square().sum().backward()
    for mine, theirs in zip([got, *gradients], [want, *(p.grad for p in mixer.parameters())], strict=True):
        assert relative_rms(mine.detach(), theirs.detach()) <= TOLERANCE[torch.float32, "gradient"]


def compile_all(architecture, d_state):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from naju.layers import diagonal_kernels as kernels

    integers = {"length", "rows", "first", "blocks", "d_inner", "d_state"}
    for kernel, way in (
        (kernels.forward_kernel, kernels.FORWARD),
        (kernels.backward_kernel, kernels.backward_way(d_state)),
    ):
        constants = kernels._constants(way, 96, d_state, KERNEL_CHUNK)
        types = {name: "i32" if name in integers else "*fp32" for name in kernel.arg_names} | dict.fromkeys(
            constants, "constexpr"
        )
        source = ASTSource(fn=kernel, signature=types, constexprs=constants)
        target = GPUTarget("cuda", architecture, 32)
        compiled = triton.compile(source, target=target, options=kernels._options(way))
        assert "cubin" in compiled.asm


@pytest.mark.parametrize(
    ("architecture", "d_state"), [(80, 16), (89, 16), (90, 4), (90, 64), (90, 256), (100, 16), (120, 16)]
)
def test_they_compile_without_a_gpu(architecture, d_state):
    """In a process of its own: once the interpreter is on, nothing can be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-W", "error", __file__, str(architecture), str(d_state)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    compile_all(int(sys.argv[1]), int(sys.argv[2]))
