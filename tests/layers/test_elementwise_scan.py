"""The elementwise recurrence against a loop in float64, with every gradient."""

from __future__ import annotations

import pytest
import torch

from naju.layers.elementwise_scan import elementwise_scan, elementwise_step
from numerics import TOLERANCE, relative_rms

LENGTHS = [1, 5, 70]


def error(got, want):
    return relative_rms(got.detach(), want.detach())


def draw(length, dtype=torch.float64, batch=2, channels=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    drive = [torch.randn(batch, length, channels, generator=generator, dtype=torch.float64) for _ in range(3)]
    x = torch.randn(batch, channels, generator=generator, dtype=torch.float64)
    return [tensor.to(dtype).requires_grad_() for tensor in (*drive, x)]


def loop(h, f_logit, i_logit, x):
    states = []
    for t in range(h.shape[1]):
        x = torch.sigmoid(f_logit[:, t]) * x + torch.sigmoid(i_logit[:, t]) * h[:, t]
        states.append(x)
    return torch.stack(states, dim=1), x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_states_and_gradients_equal_the_loop(length, dtype):
    *drive, x = arguments = draw(length, dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in arguments]
    results = [elementwise_scan(*drive, initial_state=x), loop(*exact)]
    cotangents = [torch.randn(2, length, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)]
    for got, want in zip(*results, strict=True):
        assert got.dtype == dtype
        assert error(got, want) <= TOLERANCE[dtype, "forward"]
    gradients = [
        torch.autograd.grad(outputs, inputs, [c.to(outputs[0].dtype) for c in cotangents])
        for outputs, inputs in zip(results, (arguments, exact), strict=True)
    ]
    for got, want in zip(*gradients, strict=True):
        assert error(got, want) <= TOLERANCE[dtype, "gradient"]


def test_steps_equal_the_scan():
    h, f_logit, i_logit, x = draw(9)
    want, final = elementwise_scan(h, f_logit, i_logit, initial_state=x)
    for t in range(9):
        y, x = elementwise_step(x, h[:, t], f_logit[:, t], i_logit[:, t])
        assert error(y, want[:, t]) <= TOLERANCE[torch.float64, "law"]
    assert error(x, final) <= TOLERANCE[torch.float64, "law"]


def test_packed_sequences_are_scanned_apart():
    *drive, _ = draw(12, batch=1)
    starts = draw(1, batch=3, seed=1)[-1]
    y, x = elementwise_scan(*drive, initial_state=starts, cu_seqlens=torch.tensor([0, 5, 5, 12]))
    for row, (left, right) in enumerate([(0, 5), (5, 5), (5, 12)]):
        want, final = starts[row : row + 1][:, None], starts[row : row + 1]
        if left < right:
            want, final = loop(*(tensor[:, left:right] for tensor in drive), final)
            assert error(y[:, left:right], want) <= TOLERANCE[torch.float64, "law"]
        assert error(x[row : row + 1], final) <= TOLERANCE[torch.float64, "law"]
