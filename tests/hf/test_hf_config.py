"""The config holds a whole ModelConfig and survives its JSON file."""

from __future__ import annotations

from dataclasses import MISSING, fields

import pytest
import torch
from hf_cases import STACKS, small_config
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from naju import ModelConfig
from naju.hf import NajuConfig, NajuForCausalLM, NajuForSequenceClassification, NajuModel


def test_every_field_of_a_plain_config_is_here_with_its_default():
    ours = NajuConfig()
    for known in fields(ModelConfig):
        default = known.default if known.default_factory is MISSING else known.default_factory()
        if default is not MISSING:
            assert getattr(ours, known.name) == default, known.name
    assert {known.name for known in fields(ModelConfig)} - {"tie_embeddings"} <= set(ours.to_dict())


@pytest.mark.parametrize("stack", STACKS)
def test_there_and_back_through_a_file(stack, tmp_path):
    plain = small_config(stack, tie_embeddings=False, norm_eps=1e-4)
    NajuConfig.from_plain(plain, eos_token_id=3).save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is NajuConfig
    assert loaded.to_plain() == plain
    assert loaded.eos_token_id == 3


def test_the_names_that_others_use():
    config = NajuConfig(hidden_size=24, num_hidden_layers=3, tie_embeddings=False)
    assert (config.d_model, config.n_layers, config.tie_word_embeddings) == (24, 3, False)
    assert config.to_plain() == ModelConfig(50257, 24, 3, tie_embeddings=False)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"d_model": 0}, "d_model must be a positive integer"),
        ({"mixer": ["naju"], "n_layers": 2}, "mixer names 1 layers, but n_layers is 2"),
        ({"pooling": "first"}, "pooling must be"),
    ],
)
def test_what_makes_no_model_is_refused(wrong, told):
    with pytest.raises(ValueError, match=told):
        NajuConfig(**wrong)


def test_a_bidirectional_language_model_is_refused():
    with pytest.raises(ValueError, match="cannot be bidirectional"):
        NajuForCausalLM(NajuConfig(vocab_size=7, d_model=8, n_layers=1, bidirectional=True))


@pytest.mark.parametrize(
    ("auto", "kind"),
    [
        (AutoModel, NajuModel),
        (AutoModelForCausalLM, NajuForCausalLM),
        (AutoModelForSequenceClassification, NajuForSequenceClassification),
    ],
)
def test_the_auto_classes_know_the_models(auto, kind):
    config = NajuConfig(vocab_size=7, d_model=8, n_layers=1, mixer_options={"d_state": 3})
    model = auto.from_config(config)
    assert type(model) is kind
    assert model.get_input_embeddings().weight.shape == (7, 8)
    assert torch.isfinite(model(torch.tensor([[1, 2]]))[0]).all()
