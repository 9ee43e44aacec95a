"""The RWKV mixer against RWKV-6's equations in a plain loop, and its recurrence against fla's naive one."""

from __future__ import annotations

import torch
from outside import assert_same_function, fla_reference
from torch.nn import functional as F

from memories import unsettle
from naju.layers.matrix_scan import matrix_scan
from naju.mixers import build_mixer

D_MODEL, HEADS = 16, 4


def token(mixer, u, before, S):
    """One token (m,) of RWKV-6's time mixing, head by head, from the token before it and the memory S."""
    shift, change = mixer.shift, before - u
    low = torch.tanh(shift.reduce.weight @ (u + change * shift.first_mix)).chunk(5)
    inputs = [u + change * (shift.mix[j] + low[j] @ shift.expand[j]) for j in range(5)]
    r, k = mixer.project_q.weight @ inputs[0], mixer.project_k.weight @ inputs[2]
    v, g = mixer.project_v.weight @ inputs[3], mixer.project_gate.weight @ inputs[4]
    d = mixer.decay_bias + mixer.decay[2].weight @ torch.tanh(mixer.decay[0].weight @ inputs[1])
    outputs, memory = [], []
    for j, (r_j, k_j, v_j, d_j) in enumerate(zip(*(t.chunk(HEADS) for t in (r, k, v, d)), strict=True)):
        write = torch.outer(k_j, v_j)
        o = r_j @ (S[j] + torch.diag(mixer.bonus[j]) @ write)
        outputs.append(F.layer_norm(o, o.shape, mixer.norm.weight[j], mixer.norm.bias[j], eps=64e-5))
        memory.append(torch.diag(torch.exp(-torch.exp(d_j))) @ S[j] + write)
    return mixer.project_out.weight @ (torch.cat(outputs) * F.silu(g)), torch.stack(memory)


def by_loop(mixer, u, state):
    outputs, memories = [], []
    for sequence, before, S in zip(u, state.tail[:, 0], state.x, strict=True):
        for u_t in sequence:
            out, S = token(mixer, u_t, before, S)
            outputs.append(out)
            before = u_t
        memories.append(S)
    return torch.stack(outputs).view(u.shape), torch.stack(memories)


def test_the_layer_is_its_equations():
    mixer = build_mixer("rwkv", D_MODEL, n_heads=HEADS).double()
    unsettle(mixer)
    state = mixer(torch.randn(2, 7, D_MODEL, dtype=torch.float64))[1].detach()
    u = torch.randn(2, 40, D_MODEL, dtype=torch.float64, requires_grad=True)
    out, after = mixer(u, state)
    assert_same_function([out, after.x], by_loop(mixer, u, state), [u, mixer.bonus, mixer.decay_bias])


def test_the_recurrence_is_flas():
    naive = fla_reference("rwkv6/recurrent_naive.py", "naive_recurrent_rwkv6")
    q, k, w = (torch.randn(2, 50, HEADS, 5) for _ in range(3))
    v, bonus, state = torch.randn(2, 50, HEADS, 7), torch.randn(HEADS, 5), torch.randn(2, HEADS, 5, 7)
    arguments = [tensor.requires_grad_() for tensor in (q, k, v, -w.exp(), bonus, state)]
    q, k, v, log_decay, bonus, state = arguments
    results = matrix_scan(q, k, v, log_decay, state, bonus=bonus)
    heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v, log_decay)]
    o, last = naive(*heads_first, bonus, scale=1.0, initial_state=state, output_final_state=True)
    assert_same_function(results, [o.transpose(1, 2), last], arguments)


def test_a_layer_starts_as_rwkvs_first():
    """Before training, queries and gates take the square root of the ramp, and no decay depends on the token."""
    mixer = build_mixer("rwkv", 128)
    ramp = torch.arange(128) / 128
    for row, power in enumerate((0.5, 1.0, 1.0, 1.0, 0.5)):
        assert torch.equal(mixer.shift.mix[row], 1 - ramp**power)
    assert not mixer.shift.reduce.weight.any()
    assert not mixer.decay(torch.randn(3, 7, 128)).any()
    assert 0 < mixer.decay[2].weight.abs().max() <= 0.01
    assert torch.allclose(mixer.decay_bias[[0, 21, 63]], torch.tensor([-6.0, -6 + 5 * (1 / 3) ** 0.7, -1.0]))
    assert torch.allclose(mixer.bonus.flatten()[:4], torch.tensor([0.0, 0.1, -0.1, 0.0]))
