"""The GLA mixer against fla's naive recurrence."""

from __future__ import annotations

import pytest
import torch
from mixer_cases import run_in_pieces, run_in_steps
from outside import assert_same_function, fla_reference
from torch.nn import functional as F

from memories import unsettle
from naju.mixers import build_mixer
from numerics import relative_rms

D_MODEL = 16


def by_fla(mixer, u, x, temperature):
    """The whole layer around fla's recurrence, which scales the queries itself."""
    naive = fla_reference("gla/naive.py", "naive_recurrent_gla")
    *parts, z = mixer.project_in(u).split(mixer.widths, dim=-1)
    q, k, v, gate = (
        part.unflatten(-1, (mixer.n_heads, -1)) for part in (*parts, F.logsigmoid(mixer.forget(u)) / temperature)
    )
    o, x = naive(q, k, v, gate, initial_state=x, output_final_state=True)
    o = F.rms_norm(o, o.shape[-1:], mixer.norm.weight, eps=1e-5).flatten(-2)
    return mixer.project_out(o * F.silu(z)), x


@pytest.mark.parametrize(("options", "temperature"), [({}, 16), ({"gate_temperature": 4.0}, 4)])
def test_outputs_states_and_gradients_agree(options, temperature):
    mixer = build_mixer("gla", D_MODEL, **options)
    unsettle(mixer)
    state = mixer(torch.randn(2, 7, D_MODEL))[1].detach()
    u = torch.randn(2, 60, D_MODEL, requires_grad=True)
    out, after = mixer(u, state)
    assert_same_function([out, after.x], by_fla(mixer, u, state.x, temperature), [u, *mixer.parameters()])


def test_the_plain_layer_streams_without_a_tail():
    mixer = build_mixer("gla", D_MODEL).double()
    unsettle(mixer)
    u = torch.randn(2, 9, D_MODEL, dtype=torch.float64)
    with torch.no_grad():
        want, want_after = mixer(u)
        streamed = run_in_pieces(mixer, u, [4]), run_in_steps(mixer, u, mixer.init_state(2))
    for out, after in streamed:
        assert relative_rms(out, want) <= 1e-12
        assert relative_rms(after.x, want_after.x) <= 1e-12
        assert after.tail.shape == (2, 0, 2 * D_MODEL)


def test_a_short_convolution_is_one_of_queries_keys_and_values():
    plain, mixer = build_mixer("gla", D_MODEL), build_mixer("gla", D_MODEL, d_conv=2)
    with torch.no_grad():
        mixer.load_state_dict(
            plain.state_dict() | {name: v for name, v in mixer.state_dict().items() if "conv" in name}
        )
        mixer.conv.weight.copy_(torch.tensor([1.0, 0.0]))  # the token before
        mixer.conv.bias.zero_()
    seen = []
    mixer.project_in.register_forward_hook(lambda module, given, out: seen.append(out))
    u = torch.randn(1, 6, D_MODEL)
    mixer(u)
    (projected,) = seen
    *qkv, gate = projected.split(plain.widths, dim=-1)
    moved = [F.silu(F.pad(part, (0, 0, 1, 0))[:, :-1]) for part in qkv]
    plain.project_in.register_forward_hook(lambda module, given, out: torch.cat([*moved, gate], dim=-1))
    assert torch.allclose(mixer(u)[0], plain(u)[0], atol=1e-6)


@pytest.mark.parametrize("options", [{"gate_rank": 0}, {"gate_temperature": 0.0}, {"gate_temperature": -1.0}])
def test_gates_that_would_be_infinite_are_refused(options):
    with pytest.raises(ValueError, match="must be positive"):
        build_mixer("gla", 16, **options)


def test_a_share_of_the_width_is_whole_if_it_is_nearly():
    assert build_mixer("gla", 100, n_heads=1, expand_k=0.57).d_key == 57
    with pytest.raises(ValueError, match="must be a positive multiple of n_heads"):
        build_mixer("gla", 100, n_heads=1, expand_k=0.575)
