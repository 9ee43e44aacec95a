"""The HGRN mixer against fla's naive recurrence and the gates as HGRN's authors print them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from naju.mixers import build_mixer
from numerics import TOLERANCE, relative_rms

D_MODEL = 16


@pytest.fixture(scope="module")
def naive_recurrent_hgrn():
    """fla's reference, read from its file: importing fla itself needs triton."""
    found = importlib.util.find_spec("fla")
    if found is None:
        pytest.skip("flash-linear-attention is not installed")
    file = Path(found.submodule_search_locations[0]) / "ops" / "hgrn" / "naive.py"
    spec = importlib.util.spec_from_file_location("fla_naive_hgrn", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.naive_recurrent_hgrn


def by_fla(mixer, u, x, recurrence):
    """The whole layer around fla's recurrence, whose gate is a logarithm."""
    i, f, z = mixer.project_in(u).chunk(3, dim=-1)
    f = mixer.lower_bound + (1 - mixer.lower_bound) * torch.sigmoid(f)
    y, x = recurrence(F.silu(i) * (1 - f), f.log(), initial_state=x, output_final_state=True)
    return mixer.project_out(F.rms_norm(y, y.shape[-1:], mixer.norm.weight, eps=1e-5) * F.silu(z)), x


@pytest.mark.parametrize("lower_bound", [0.0, 0.3, 0.9])
def test_outputs_states_and_gradients_agree(naive_recurrent_hgrn, lower_bound):
    mixer = build_mixer("hgrn", D_MODEL, lower_bound=lower_bound)
    state = mixer(torch.randn(2, 7, D_MODEL))[1].detach()
    u = torch.randn(2, 60, D_MODEL, requires_grad=True)
    got, after = mixer(u, state)
    want, x = by_fla(mixer, u, state.x, naive_recurrent_hgrn)
    assert relative_rms(got.detach(), want.detach()) <= TOLERANCE[torch.float32, "law"]
    assert relative_rms(after.x.detach(), x.detach()) <= TOLERANCE[torch.float32, "law"]
    arguments, cotangent = [u, *mixer.parameters()], torch.randn_like(want)
    gradients = [torch.autograd.grad(out, arguments, cotangent) for out in (got, want)]
    for mine, theirs in zip(*gradients, strict=True):
        assert relative_rms(mine, theirs) <= TOLERANCE[torch.float32, "law"]


@pytest.mark.parametrize("lower_bound", [-0.1, 1.0, float("nan")])
def test_a_bound_outside_the_unit_interval_is_refused(lower_bound):
    with pytest.raises(ValueError, match=r"lower_bound must lie in \[0, 1\), but is"):
        build_mixer("hgrn", D_MODEL, lower_bound=lower_bound)
