"""The GLA mixer against fla's naive recurrence."""

from __future__ import annotations

import torch
from outside import assert_same_function, fla_reference
from torch.nn import functional as F

from memories import unsettle
from naju.mixers import build_mixer

D_MODEL = 16


def by_fla(mixer, u, x):
    """The whole layer around fla's recurrence, which scales the queries itself."""
    naive = fla_reference("gla/naive.py", "naive_recurrent_gla")
    *parts, z = mixer.project_in(u).split(mixer.widths, dim=-1)
    q, k, v, gate = (part.unflatten(-1, (mixer.n_heads, -1)) for part in (*parts, F.logsigmoid(mixer.forget(u)) / 16))
    o, x = naive(q, k, v, gate, initial_state=x, output_final_state=True)
    o = F.rms_norm(o, o.shape[-1:], mixer.norm.weight, eps=1e-5).flatten(-2)
    return mixer.project_out(o * F.silu(z)), x


def test_outputs_states_and_gradients_agree():
    mixer = build_mixer("gla", D_MODEL)
    unsettle(mixer)
    state = mixer(torch.randn(2, 7, D_MODEL))[1].detach()
    u = torch.randn(2, 60, D_MODEL, requires_grad=True)
    out, after = mixer(u, state)
    assert_same_function([out, after.x], by_fla(mixer, u, state.x), [u, *mixer.parameters()])
