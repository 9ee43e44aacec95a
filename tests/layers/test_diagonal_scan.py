"""Mamba's recurrence against a loop in float64, with every gradient, over several chunks; and what it holds on to."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from naju.layers import diagonal_scan as diagonal
from naju.layers.diagonal_scan import CHUNK, diagonal_scan, diagonal_step
from numerics import TOLERANCE, relative_rms

LENGTHS = [1, CHUNK, CHUNK + 1, 2 * CHUNK + 37]


def error(got, want):
    return relative_rms(got.detach(), want.detach())


def draw(length, dtype=torch.float64, batch=2, channels=3, states=4, rows=None, seed=0):
    """h, dt, A, B, C and the initial state; steps from none at all to strong forgetting."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    dt = torch.relu(normal(batch, length, channels)) ** 3
    h, B, C = normal(batch, length, channels), normal(batch, length, states), normal(batch, length, states)
    tensors = (h, dt, -torch.exp(normal(channels, states)), B, C, normal(rows or batch, channels, states))
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def loop(h, dt, A, B, C, x):
    readings = []
    for t in range(h.shape[1]):
        decay = torch.exp(dt[:, t, :, None] * A)
        x = decay * x + torch.einsum("bd,bd,bn->bdn", dt[:, t], h[:, t], B[:, t])
        readings.append(torch.einsum("bdn,bn->bd", x, C[:, t]))
    return torch.stack(readings, dim=1), x


def scan(*arguments):
    *drive, x = arguments
    return diagonal_scan(*drive, initial_state=x)


def outcome(run, arguments, cotangents):
    """y, the final state and the gradient of every argument."""
    y, x = run(*arguments)
    return y, x, *torch.autograd.grad([y, x], arguments, [c.to(y.dtype) for c in cotangents])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_outputs_and_gradients_equal_the_loop(length, dtype):
    arguments = draw(length, dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in arguments]
    cotangents = [torch.randn(2, length, 3, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)]
    got, want = outcome(scan, arguments, cotangents), outcome(loop, exact, cotangents)
    for place, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert mine.dtype == dtype
        assert error(mine, theirs) <= TOLERANCE[dtype, "forward" if place < 2 else "gradient"]


def test_no_initial_state_is_a_zero_one():
    *drive, x = draw(CHUNK + 3)
    for got, want in zip(diagonal_scan(*drive), scan(*drive, torch.zeros_like(x)), strict=True):
        assert torch.equal(got, want)


def test_steps_equal_the_scan():
    h, dt, A, B, C, x = draw(9)
    want, final = scan(h, dt, A, B, C, x)
    for t in range(9):
        y, x = diagonal_step(x, h[:, t], dt[:, t], A, B[:, t], C[:, t])
        assert error(y, want[:, t]) <= TOLERANCE[torch.float64, "law"]
    assert error(x, final) <= TOLERANCE[torch.float64, "law"]


def test_packed_sequences_are_scanned_apart():
    bounds = [0, CHUNK + 5, CHUNK + 5, 2 * CHUNK]
    h, dt, A, B, C, starts = draw(2 * CHUNK, batch=1, rows=3)
    y, x = diagonal_scan(h, dt, A, B, C, initial_state=starts, cu_seqlens=torch.tensor(bounds))
    for row in (0, 2):
        part = slice(bounds[row], bounds[row + 1])
        want, final = loop(h[:, part], dt[:, part], A, B[:, part], C[:, part], starts[row : row + 1])
        assert error(y[:, part], want) <= TOLERANCE[torch.float64, "law"]
        assert error(x[row : row + 1], final) <= TOLERANCE[torch.float64, "law"]
    assert torch.equal(x[1], starts[1])


def test_a_step_of_size_zero_leaves_the_state_bit_for_bit():
    h, dt, A, B, C, x = draw(CHUNK + 2, torch.float32)
    assert torch.equal(scan(h, torch.zeros_like(dt), A, B, C, x)[1], x)


def test_half_precision_inputs_are_scanned_in_float32():
    *drive, _ = draw(CHUNK + 2, torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = diagonal_scan(*drive)
    for mine, theirs in zip(got, diagonal_scan(*(tensor.double() for tensor in drive)), strict=True):
        assert mine.dtype == torch.float32
        assert error(mine, theirs) <= TOLERANCE[torch.float32, "forward"]


def test_several_chunks_are_one_graph():
    arguments = draw(2 * CHUNK + 9, torch.float32)
    compiled = torch.compile(scan, fullgraph=True, backend="aot_eager")
    cotangents = [torch.randn(2, 2 * CHUNK + 9, 3), torch.randn(2, 3, 4)]
    try:
        got = outcome(compiled, arguments, cotangents)
    finally:
        torch.compiler.reset()
    for mine, theirs in zip(got, outcome(scan, arguments, cotangents), strict=True):
        assert error(mine, theirs) <= TOLERANCE[torch.float32, "law"]


class Largest(TorchDispatchMode):
    """The largest number of elements of any tensor that is computed inside."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        result = operator(*arguments, **(options or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_states_of_more_than_a_chunk_never_exist():
    length = 8 * CHUNK
    *drive, x = (tensor.detach() for tensor in draw(length, torch.float32, batch=1, channels=16, states=16))
    with Largest() as largest:
        y, x, entering = diagonal._forward(*drive, x, False)
        diagonal._backward(y, x, entering, *drive, False)
    assert largest.elements == CHUNK * 16 * 16


def test_what_waits_for_the_backward_is_a_fraction_of_the_states():
    def kept(length):
        arguments = draw(length, torch.float32, batch=1, channels=16, states=16)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            results = scan(*arguments)
        assert results[0].requires_grad
        return sum(event.self_cpu_memory_usage for event in seen.key_averages()) / 4

    kept(CHUNK)  # what the first call sets up once does not count
    short, long = kept(8 * CHUNK), kept(16 * CHUNK)
    assert long < 0.2 * 16 * CHUNK * 16 * 16
    assert long / short == pytest.approx(2, rel=0.1)


def test_a_backend_that_cannot_run_says_why():
    *drive, _ = draw(3)
    for backend in ("mamba_ssm", "triton"):
        with pytest.raises(ValueError, match=rf"'{backend}' cannot run this: h is on cpu.*use backend='torch'"):
            diagonal_scan(*drive, backend=backend)
    with pytest.raises(ValueError, match="unknown diagonal scan backend 'fast'"):
        diagonal_scan(*drive, backend="fast")
