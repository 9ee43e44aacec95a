from __future__ import annotations

import pytest
import torch

from naju.layers.rotary import rotate


def turned(x, position):
    return rotate(x.reshape(1, 1, 1, -1), torch.tensor([[position]])).flatten()


def test_position_zero_is_untouched_and_lengths_are_kept():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 8)
    assert torch.equal(rotate(x, torch.zeros(2, 5)), x)
    assert torch.allclose(rotate(x, torch.arange(10).reshape(2, 5)).norm(dim=-1), x.norm(dim=-1), rtol=1e-5)


def test_a_product_depends_on_the_distance_only():
    torch.manual_seed(0)
    query, key = torch.randn(8), torch.randn(8)
    near, far = (turned(query, 3 + shift) @ turned(key, 1 + shift) for shift in (0, 500))
    other = turned(query, 4) @ turned(key, 1)
    assert torch.allclose(near, far, rtol=1e-3)
    assert not torch.allclose(near, other, rtol=1e-2)


def test_the_first_pair_turns_by_one_radian_a_token():
    x = torch.tensor([1.0, 0.0, 0.0, 0.0])
    got = turned(x, 2)
    angle = torch.tensor(2.0)
    assert torch.allclose(got, torch.stack([angle.cos(), torch.tensor(0.0), angle.sin(), torch.tensor(0.0)]))


def test_the_precision_of_the_input_is_kept():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert rotate(torch.ones(1, 1, 3, 4, dtype=dtype), torch.arange(3).unsqueeze(0)).dtype == dtype


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
def test_scores_depend_on_the_distance_alone_however_far_along(dtype, tolerance):
    q, k = (torch.randn(1, 1, 5, 16, dtype=dtype, generator=torch.Generator().manual_seed(n)) for n in (0, 1))

    def scores(start):
        position = torch.arange(start, start + 5).unsqueeze(0)
        return rotate(q, position) @ rotate(k, position).transpose(-1, -2)

    for start in (1000, 1_000_000):
        assert (scores(start) - scores(0)).abs().max() <= 10 * tolerance
