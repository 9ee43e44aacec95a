"""Public functions given the wrong thing: the error names the argument, and nothing is computed from it."""

import math
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from naju import Classifier, LanguageModel, ModelConfig, NajuMixer, naju_scan
from naju.lm.loss import IGNORED, chunked_cross_entropy
from naju.mixers import MIXERS, build_mixer
from naju.models import ModelState, TwoTower
from naju.models.device import usable_device
from naju.training import TrainConfig

WIDTH = 16
SMALL = {"naju": {"d_state": 4}, "coupled": {"d_state": 4}, "mamba": {"d_state": 4}, "mamba2": {"d_state": 4}}


def small_mixer(name, width=WIDTH):
    return build_mixer(name, width, **SMALL.get(name, {}))


def small_model(**changes):
    return LanguageModel(ModelConfig(7, 8, 1, mixer_options={"d_state": 4}, **changes))


@pytest.mark.parametrize("other", MIXERS)
@pytest.mark.parametrize("name", MIXERS)
def test_another_mixers_state_is_refused_or_is_the_same_kind(name, other):
    mixer, state = small_mixer(name), small_mixer(other).init_state(2)
    u = torch.zeros(2, 3, WIDTH)
    if type(state) is type(mixer.init_state(1)):
        mixer(u, state)
        return
    with pytest.raises(
        TypeError, match=f"state must be a {mixer.state_kind.__name__}, but is a {type(state).__name__}"
    ):
        mixer(u, state)
    with pytest.raises(TypeError, match="state must be a"):
        mixer.step(u[:, 0], state)


@pytest.mark.parametrize("name", MIXERS)
def test_a_state_of_another_size_or_batch_is_refused(name):
    mixer, u = small_mixer(name), torch.zeros(2, 3, WIDTH)
    with pytest.raises(ValueError, match="state holds 3 sequences, but the input has 2"):
        mixer(u, mixer.init_state(3))
    wider = small_mixer(name, 2 * WIDTH)
    _, state = wider(torch.zeros(2, 3, 2 * WIDTH))
    with pytest.raises(ValueError, match="does not fit this mixer"):
        mixer(u, state)


@pytest.mark.parametrize("name", MIXERS)
def test_an_input_without_sequences_or_tokens_is_refused(name):
    mixer = small_mixer(name)
    for shape in ((2, 0, WIDTH), (0, 3, WIDTH)):
        with pytest.raises(
            ValueError,
            match=re.escape(
                f"u must have shape (batch, length, d_model) with d_model {WIDTH} and not be empty, but has {shape}"
            ),
        ):
            mixer(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"u must have shape .* and not be empty"):
        mixer.step(torch.zeros(0, WIDTH), mixer.init_state(0))


def test_a_state_that_counts_more_tokens_than_there_are_positions_is_refused():
    mixer = build_mixer("transformer", WIDTH, max_length=32)
    state = replace(mixer.init_state(1), seen=torch.tensor([10**6]))
    with pytest.raises(ValueError, match="more tokens than the 32 learned positions"):
        mixer(torch.zeros(1, 2, WIDTH), state)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("state", ["x", 3, (torch.zeros(2, 3),)])
def test_what_is_no_state_is_refused(name, state):
    with pytest.raises(TypeError, match="state must be a"):
        small_mixer(name)(torch.zeros(2, 3, WIDTH), state)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"d_state": "abc"}, "d_state must be an int, but is str in the options of mixer 'naju'"),
        ({"d_state": 2.5}, "d_state must be an int, but is float"),
        ({"d_state": True}, "d_state must be an int, but is bool"),
        ({"expand": math.nan}, "expand must be finite, but is nan"),
        ({"alpha": "1"}, "alpha must be a float or None, but is str"),
        ({"gate_reparam": "yes"}, "gate_reparam must be a bool, but is str"),
        ({"backend": 3}, "backend must be a str, but is int"),
    ],
)
def test_options_of_a_mixer_have_their_types(options, told):
    with pytest.raises((TypeError, ValueError), match=told):
        build_mixer("naju", 8, **options)


@pytest.mark.parametrize("width", [math.nan, math.inf])
def test_a_width_of_no_size_is_refused(width):
    with pytest.raises(ValueError, match="feed_forward must be finite"):
        build_mixer("transformer", 8, n_heads=2, feed_forward=width)


def test_options_may_be_whole_numbers_where_floats_are_meant():
    assert build_mixer("coupled", 8, d_state=4, expand=1, g_bias=-3).d_inner == 8
    with pytest.raises(ValueError, match="n_heads"):
        build_mixer("attention", 8, n_heads=0)


@pytest.mark.parametrize("token", [-1, 7, 2**31 - 1, -(2**31)])
def test_tokens_outside_the_vocabulary_are_named(token):
    model, tokens = small_model(), torch.tensor([[1, token, 2]])
    with pytest.raises(ValueError, match=rf"tokens must lie in \[0, 7\), but lie in \[.*{min(token, 1)}"):
        model(tokens)
    with pytest.raises(ValueError, match="tokens must lie in"):
        model.step(tokens[:, 1], model.init_state(1))
    with pytest.raises(ValueError, match="tokens must lie in"):
        model.generate(tokens, 2)
    with pytest.raises(ValueError, match="tokens must lie in"):
        Classifier(ModelConfig(7, 8, 1), 2)(tokens)
    with pytest.raises(ValueError, match="tokens must lie in"):
        TwoTower(ModelConfig(7, 8, 1), 2)(torch.stack([tokens, tokens], dim=1))


@pytest.mark.parametrize("tokens", [[[1]], None, "ab", torch.tensor([[1.0]]), torch.tensor([[True]])])
def test_what_are_no_tokens_is_refused(tokens):
    with pytest.raises(TypeError, match="tokens must be"):
        small_model()(tokens)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (3,), (1, 2, 3), ()])
def test_tokens_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="tokens must have shape"):
        small_model()(torch.zeros(shape, dtype=torch.long))


def test_masks_and_states_of_another_kind_are_refused():
    model, tokens = small_model(), torch.ones(1, 3, dtype=torch.long)
    with pytest.raises(TypeError, match="attention_mask must be a tensor, but is a list"):
        model(tokens, attention_mask=[[1, 1, 1]])
    with pytest.raises(ValueError, match="attention_mask must have shape"):
        model(tokens, attention_mask=torch.ones(1, 4))
    with pytest.raises(TypeError, match="state must be a ModelState, but is a NajuState"):
        model(tokens, model.init_state(1).layers[0])
    with pytest.raises(ValueError, match="state has 2 layers, but the model has 1"):
        model(tokens, ModelState(model.init_state(1).layers * 2))


def test_a_mask_that_would_be_added_to_scores_is_refused_by_every_model():
    config, tokens = ModelConfig(7, 8, 1, mixer_options={"d_state": 4}), torch.ones(2, 3, dtype=torch.long)
    model, mask = LanguageModel(config), torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, -math.inf]])
    pairs, two_masks = tokens.unsqueeze(0), mask.unsqueeze(0)
    for read in (
        lambda: model(tokens, attention_mask=mask),
        lambda: model.prefill(tokens, mask),
        lambda: model.generate(tokens, 1, attention_mask=mask),
        lambda: Classifier(config, 2)(tokens, mask),
        lambda: Classifier(replace(config, bidirectional=True), 2)(tokens, mask),
        lambda: TwoTower(config, 2)(pairs, two_masks),
    ):
        with pytest.raises(ValueError, match="attention_mask must be 1 at tokens and 0 at padding"):
            read()


def test_a_mask_of_floats_may_have_pieces_without_tokens():
    """Long inputs are read in pieces, of which one may be padding alone."""
    model, tokens = small_model(), torch.ones(1, 4200, dtype=torch.long)
    mask = (torch.arange(4200) > 4150).long().unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(model(tokens, attention_mask=mask.float())[0], model(tokens, attention_mask=mask)[0])
    assert torch.equal(model.prefill(tokens, mask.float())[0], model.prefill(tokens, mask)[0])


def test_nan_stays_in_its_row():
    """One damaged sequence of a batch harms no other."""
    mixer, u = NajuMixer(8, d_state=4), torch.randn(2, 5, 8)
    clean, _ = mixer(u)
    u[1, 2] = math.nan
    y, _ = mixer(u)
    assert torch.equal(y[0], clean[0])
    assert torch.equal(y[1, :2], clean[1, :2])
    assert y[1, 2:].isnan().all()


@pytest.mark.parametrize("target", [-1, -99, 7, 10**9])
def test_a_target_that_is_no_class_is_refused(target):
    features, weight = torch.randn(3, 4), torch.randn(7, 4)
    with pytest.raises(ValueError, match=rf"targets must lie in \[0, 7\) or be {IGNORED}, but one is {target}"):
        chunked_cross_entropy(features, weight, torch.tensor([1, target, IGNORED]))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"vocab_size": True}, "vocab_size"),
        ({"n_layers": 2.0}, "n_layers"),
        ({"mixer": None}, "mixer must be a name or a list of names"),
        ({"mixer": [1]}, "mixer must be a name or a list of names"),
        ({"mixer_options": [1]}, "mixer_options must be a mapping"),
        ({"norm_eps": math.nan}, "norm_eps"),
        ({"norm_eps": "1"}, "norm_eps"),
        ({"embedding_std": -1.0}, "embedding_std"),
        ({"embedding_std": []}, "embedding_std"),
    ],
)
def test_a_config_with_a_wrong_value_names_it(changes, told):
    with pytest.raises((TypeError, ValueError), match=told):
        ModelConfig(**{"vocab_size": 7, "d_model": 8, "n_layers": 1, **changes})


def test_a_config_may_claim_any_number_of_layers_without_costing_memory():
    assert ModelConfig(7, 8, 10**15).n_layers == 10**15


@pytest.mark.parametrize(
    "changes", [{"lr": math.inf}, {"lr": math.nan}, {"weight_decay": math.nan}, {"clip": math.nan}]
)
def test_a_protocol_with_a_number_that_is_none_is_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        TrainConfig(steps=1, **changes)


@pytest.mark.parametrize("name", ["nonsense", "meta", "cuda:99", "", "cpu:x"])
def test_a_device_that_is_none_is_refused(name):
    with pytest.raises(ValueError, match="device"):
        usable_device(name)


def test_a_seed_beyond_64_bits_is_refused():
    with pytest.raises(ValueError, match="seed must fit into 64 bits"):
        small_model().generate(torch.ones(1, 1, dtype=torch.long), 1, temperature=1.0, seed=2**64)


@pytest.mark.parametrize("harm", ["h", "f_logit", "i_logit", "B", "C"])
@pytest.mark.parametrize(
    "wrong", [None, [1.0], torch.zeros(2, 3, 5, dtype=torch.int64), torch.zeros(0), torch.zeros(1, 1, 1)]
)
def test_a_scan_names_the_argument_that_is_wrong(harm, wrong):
    good = {name: torch.zeros(2, 3, 4) for name in ("h", "f_logit", "i_logit", "B", "C")}
    with pytest.raises((TypeError, ValueError), match=rf"\b({'|'.join(good)}) must"):
        naju_scan(**{**good, harm: wrong})


@pytest.mark.parametrize("name", ["alpha", "f_bias", "i_bias", "D_init"])
def test_a_layer_names_the_option_that_is_no_number(name):
    with pytest.raises(ValueError, match=f"{name} must be .*, but is nan"):
        NajuMixer(8, **{name: math.nan})


STRANGER = """
import torch
from naju import LanguageModel, ModelConfig
model = LanguageModel(ModelConfig(7, 8, 1, mixer_options={"d_state": 16})).cuda()
tokens = torch.tensor([[1, %d, 2]], device="cuda")
out = model(tokens)[0]
print("no wait so far", flush=True)
torch.cuda.synchronize()
print("computed", out.sum().item())
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("token", [-1, 7, 2**31, 2**40, -(2**40)])
def test_a_stranger_on_a_gpu_stops_the_lookup_and_is_not_read(token):
    """In a process of its own: an assertion on the device is the end of its context."""
    done = subprocess.run([sys.executable, "-c", STRANGER % token], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "computed" not in done.stdout
    assert "device-side assert" in done.stderr


def test_every_lookup_in_a_model_is_torchs_own():
    """It checks its index on every device. A kernel of ours that looked up tokens would have to do so itself."""
    for name in MIXERS:
        model = LanguageModel(ModelConfig(7, WIDTH, 1, name, SMALL.get(name, {})))
        assert type(model.backbone.embedding) is nn.Embedding
