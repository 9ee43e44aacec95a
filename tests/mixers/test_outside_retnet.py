"""The RetNet mixer against fla's naive retention."""

from __future__ import annotations

import torch
from outside import assert_same_function, fla_reference
from torch.nn import functional as F

from memories import unsettle
from naju.layers.rotary import rotate
from naju.mixers import build_mixer

D_MODEL = 16


def by_fla(mixer, u):
    """The whole layer around fla's retention, which knows the decays and scales the queries itself."""
    naive = fla_reference("retention/naive.py", "naive_retention")
    *parts, z = mixer.project_in(u).split(mixer.widths, dim=-1)
    q, k, v = (part.unflatten(-1, (mixer.n_heads, -1)).transpose(1, 2) for part in parts)
    position = torch.arange(u.shape[1]).expand(u.shape[:2])
    o = naive(rotate(q, position), rotate(k, position), v).transpose(1, 2)
    o = F.rms_norm(o, o.shape[-1:], mixer.norm.weight, eps=1e-5).flatten(-2)
    return mixer.project_out(o * F.silu(z))


def test_outputs_and_gradients_agree():
    mixer = build_mixer("retnet", D_MODEL)
    unsettle(mixer)
    u = torch.randn(2, 100, D_MODEL, requires_grad=True)
    assert_same_function([mixer(u)[0]], [by_fla(mixer, u)], [u, *mixer.parameters()])
