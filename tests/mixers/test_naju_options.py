"""What each option of the Naju mixer does, and how wrong ones are refused."""

from __future__ import annotations

import math

import pytest
import torch
from mixer_cases import sequence, small_mixer

from memories import D_MODEL, EXACT, difference
from naju.mixers import MIXERS, NajuMixer, build_mixer
from naju.scan import BACKENDS, backends


def seeded(**options):
    torch.manual_seed(0)
    return NajuMixer(options.pop("d_model", D_MODEL), **({"d_state": 6} | options)).double()


@pytest.mark.parametrize("rank", [None, 64, 32])
def test_gate_rank_factors_both_gates(rank):
    mixer = NajuMixer(64, gate_rank=rank)
    for gate in (mixer.forget, mixer.write):
        shapes = {name: tuple(parameter.shape) for name, parameter in gate.named_parameters()}
        matrices = {"weight.weight": (128, 128)} if rank is None else {"reduce.weight": (rank, 128)}
        if rank is not None:
            matrices["weight.weight"] = (128, rank)
        assert shapes == matrices | {"conv.weight": (128, 4), "bias": (128,)}


@pytest.mark.parametrize("rank", [None, 4])
def test_reparameterised_logits_divide_weights_that_are_larger_by_as_much(rank):
    plain, scaled = (seeded(gate_rank=rank, gate_reparam=reparam) for reparam in (False, True))
    larger = {"weight.weight", "conv.weight", "bias"}
    s = math.sqrt(2 * D_MODEL)
    for (name, mine), theirs in zip(plain.named_parameters(), scaled.parameters(), strict=True):
        module, _, rest = name.partition(".")
        expected = s if module in ("forget", "write") and rest in larger else 1.0
        assert torch.allclose(theirs, expected * mine, rtol=1e-6, atol=0), name


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("name", ["naju", "coupled"])
def test_reparameterisation_leaves_the_initial_function(name, rank):
    def output(reparam):
        torch.manual_seed(0)
        return build_mixer(name, 12, gate_rank=rank, gate_reparam=reparam)(sequence(2, 30)[..., :12].float())[0]

    assert difference(output(True), output(False)) <= 1e-6


def test_reparameterisation_is_exact_where_the_scale_is_a_power_of_two():
    u = sequence(2, 30)
    plain, scaled = (seeded(expand=1, gate_reparam=reparam) for reparam in (False, True))
    assert plain.forget.scale == 1
    assert scaled.forget.scale == 4
    for mine, theirs in zip(plain.scan_arguments(u), scaled.scan_arguments(u), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(plain(u)[0], scaled(u)[0])


@pytest.mark.parametrize("reparam", [False, True])
@pytest.mark.parametrize("pair", [(-1.0, 6.0), [6, -1]])
def test_a_pair_is_spread_over_the_channels(pair, reparam):
    forget = build_mixer("naju", 8, f_bias=pair, gate_reparam=reparam).forget
    want = torch.linspace(*map(float, pair), 16)
    torch.testing.assert_close(forget.scaled(forget.bias), want)


@pytest.mark.parametrize("pair", [[1], (1, 2, 3), [0, math.inf], [0, "a"]])
def test_what_is_no_pair_is_refused(pair):
    with pytest.raises(ValueError, match="f_bias must be a number or a pair of finite ones, but is "):
        build_mixer("naju", 8, f_bias=pair)


@pytest.mark.parametrize("reparam", [False, True])
@pytest.mark.parametrize(("f_bias", "i_bias"), [(5.0, -2.0), (1.5, 0.25)])
def test_the_biases_are_the_initial_gates(f_bias, i_bias, reparam):
    mixer = seeded(f_bias=f_bias, i_bias=i_bias, gate_reparam=reparam)
    with torch.no_grad():
        for gate in (mixer.forget, mixer.write):
            gate.weight.weight.zero_()
            gate.conv.weight.zero_()
    arguments = mixer.scan_arguments(sequence(2, 5))
    for logit, bias in ((arguments.f_logit, f_bias), (arguments.i_logit, i_bias)):
        gate = torch.sigmoid(logit)
        assert torch.allclose(gate, torch.full_like(gate, 1 / (1 + math.exp(-bias))), rtol=1e-7)


def test_the_default_biases_start_a_layer_that_holds():
    mixer = NajuMixer(D_MODEL)
    assert mixer.forget.bias.eq(5.0).all()
    assert mixer.write.bias.eq(-2.0).all()
    assert build_mixer("coupled", D_MODEL).write.bias.eq(-3.0).all()
    assert build_mixer("coupled", D_MODEL, g_bias=-1.0).write.bias.eq(-1.0).all()


@pytest.mark.parametrize("D_init", [0.01, 0.0, 1.0])
def test_the_feedthrough_reads_the_drive(D_init):
    mixer = seeded(D_init=D_init, alpha=0.0)
    assert mixer.D.eq(torch.tensor(D_init)).all()
    u = sequence(2, 9)
    arguments = mixer.scan_arguments(u)
    through = mixer.project_out(mixer.D * arguments.h * torch.nn.functional.silu(arguments.z))
    assert difference(mixer(u)[0], through) <= EXACT


def test_alpha_scales_the_reading_and_nothing_else():
    u = sequence(2, 9)
    outputs, states = {}, {}
    for alpha in (None, 0.0, 1.0, 3.0):
        outputs[alpha], states[alpha] = seeded(alpha=alpha, d_state=9)(u)
        assert torch.equal(states[alpha].x, states[None].x)
    reading = outputs[1.0] - outputs[0.0]
    assert difference(outputs[3.0] - outputs[0.0], 3 * reading) <= EXACT
    assert difference(outputs[None] - outputs[0.0], reading / 3) <= EXACT


@pytest.mark.parametrize(("expand", "d_inner"), [(1, 10), (2, 20), (1.5, 15), (0.5, 5), (3, 30)])
def test_expand_sets_the_inner_width(expand, d_inner):
    mixer = NajuMixer(10, expand=expand, d_state=3)
    assert mixer.d_inner == d_inner
    assert mixer.state_size == 3 * d_inner
    out, state = mixer(torch.randn(1, 4, 10))
    assert out.shape == (1, 4, 10)
    assert state.x.shape == (1, d_inner, 3)


def test_an_inner_width_is_rounded_not_cut():
    """1.15 * 100 is 114.99999999999999 in floating point."""
    assert NajuMixer(100, expand=1.15, d_state=1).d_inner == 115


@pytest.mark.parametrize("width", range(1, 6))
def test_d_conv_is_how_far_the_convolutions_see(width):
    """With gates that forget everything, an output sees the tokens that h and the gates' own h can reach."""
    mixer = small_mixer("naju", d_conv=width)
    with torch.no_grad():
        mixer.forget.bias.fill_(-1e4)
    u = sequence(1, 14).requires_grad_()
    (gradient,) = torch.autograd.grad(mixer(u)[0][:, -1].sum(), u)
    reach = 2 * (width - 1) + 1
    assert gradient[0].ne(0).any(-1).tolist() == [False] * (14 - reach) + [True] * reach
    state = mixer.init_state(2)
    assert state.u_tail.shape == state.h_tail.shape == (2, width - 1, 2 * D_MODEL)


def test_the_papers_state_size():
    assert NajuMixer(128).state_size == 16384


def test_the_state_before_the_first_token_is_zero():
    state = NajuMixer(8).init_state(3)
    assert all(tensor.eq(0).all() for tensor in state.tensors().values())
    assert state.batch == 3


@pytest.mark.parametrize("backend", ["cpu_compiled", "chunked", "associative", "reference"])
def test_every_backend_gives_the_same_layer(backend):
    if (reason := backends()[backend]) is not None:
        pytest.skip(reason)
    u = sequence(2, 40, torch.float32)
    want, memory = small_mixer("naju")(u.double())
    got, state = small_mixer("naju", backend=backend).float()(u)
    assert difference(got.double(), want) <= 1e-5
    assert difference(state.x.double(), memory.x) <= 1e-5


def test_a_backend_by_name_does_not_fall_back():
    mixer = small_mixer("naju", torch.float64, backend="cpu_compiled")
    with pytest.raises(ValueError, match="scan backend 'cpu_compiled' cannot run this"):
        mixer(sequence(1, 3))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"d_state": 0}, ValueError, "d_state"),
        ({"d_conv": 0}, ValueError, "d_conv"),
        ({"expand": 0}, ValueError, "expand"),
        ({"expand": -1.0}, ValueError, "expand"),
        ({"gate_rank": 0}, ValueError, "gate_rank must be a positive integer or None, but is 0"),
        ({"alpha": "big"}, TypeError, "alpha must be a float or None, but is str"),
        (
            {"backend": "fast"},
            ValueError,
            f"unknown scan backend 'fast'; expected 'auto' or one of .*{next(iter(BACKENDS))}",
        ),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        build_mixer("naju", D_MODEL, **options)


def test_no_width_at_all_is_refused():
    with pytest.raises(ValueError, match="d_model"):
        NajuMixer(0)


def test_an_unknown_mixer_lists_the_known_ones():
    with pytest.raises(ValueError, match=f"unknown mixer 'lstm'; expected one of {', '.join(MIXERS)}"):
        build_mixer("lstm", D_MODEL)


@pytest.mark.parametrize("name", MIXERS)
def test_an_unknown_option_lists_the_known_ones(name):
    with pytest.raises(TypeError, match=f"mixer '{name}' has no option colour; it has ") as caught:
        build_mixer(name, D_MODEL, colour="red")
    listed = str(caught.value).partition("it has ")[2].split(", ")
    defaults = {"n_heads": 4, "backend": "auto", "g_bias": 0.0, "f_bias": 0.0, "i_bias": 0.0, "d_state": 4}
    defaults |= {"lower_bound": 0.5, "positions": "rotary"}
    for option in listed:
        build_mixer(name, D_MODEL, **{option: defaults.get(option, 1)})


@pytest.mark.parametrize("option", ["f_bias", "i_bias"])
def test_the_coupled_mixer_has_one_bias(option):
    with pytest.raises(TypeError, match=f"give g_bias instead of {option}"):
        build_mixer("coupled", D_MODEL, **{option: 1.0})


def test_attention_needs_even_heads():
    with pytest.raises(ValueError, match=r"d_model must be a multiple of 2 \* n_heads = 10, but is 16"):
        build_mixer("attention", D_MODEL, n_heads=5)
