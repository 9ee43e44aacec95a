"""The norm of each head against torch's own norms, and its precision."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from memories import unsettle
from naju.layers.head_norm import HeadNorm
from numerics import relative_rms

HEADS, WIDTH = 3, 5


def test_a_shared_weight_is_torchs_rms_norm():
    norm = HeadNorm(WIDTH).double()
    unsettle(norm)
    o = torch.randn(2, 7, HEADS, WIDTH, dtype=torch.float64)
    assert relative_rms(norm(o).detach(), F.rms_norm(o, (WIDTH,), norm.weight.detach(), 1e-5)) <= 1e-15


@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_a_weight_a_head_with_center_is_torchs_group_norm(eps):
    norm = HeadNorm(HEADS, WIDTH, center=True, bias=True, eps=eps).double()
    unsettle(norm)
    o = torch.randn(7, HEADS, WIDTH, dtype=torch.float64)
    want = F.group_norm(o.flatten(1), HEADS, norm.weight.flatten(), norm.bias.flatten(), eps)
    assert relative_rms(norm(o).flatten(1).detach(), want.detach()) <= 1e-15


def test_half_precision_is_normalised_in_float32():
    norm = HeadNorm(WIDTH)
    o = torch.randn(2, HEADS, WIDTH).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = norm(o)
    assert out.dtype == torch.float32
    assert relative_rms(out.detach(), F.rms_norm(o.double(), (WIDTH,), eps=1e-5)) <= 1e-6
