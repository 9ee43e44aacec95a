from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch
from model_cases import HYBRID, small_config

from naju import Classifier, LanguageModel, ModelConfig
from naju.mixers import MIXERS
from naju.models import TwoTower

SIZES = {"vocab_size": 10, "d_model": 16, "n_layers": 2}


def test_one_name_serves_every_layer_and_a_list_one_each():
    assert ModelConfig(**SIZES).mixers == ("naju", "naju")
    assert small_config(HYBRID).mixers == tuple(HYBRID)
    model = LanguageModel(small_config(HYBRID))
    assert [type(block.mixer) for block in model.backbone.blocks] == [MIXERS[name] for name in HYBRID]


def test_options_reach_the_mixers_they_are_meant_for():
    alone = LanguageModel(ModelConfig(**SIZES, mixer_options={"d_state": 3, "gate_rank": 2}))
    assert [block.mixer.d_state for block in alone.backbone.blocks] == [3, 3]
    options = {"naju": {"d_state": 3}, "attention": {"n_heads": 2}}
    mixed = LanguageModel(ModelConfig(**SIZES, mixer=["naju", "attention"], mixer_options=options))
    assert mixed.backbone.blocks[0].mixer.d_state == 3
    assert mixed.backbone.blocks[1].mixer.n_heads == 2


def test_a_config_does_not_change():
    config = ModelConfig(**SIZES)
    with pytest.raises(FrozenInstanceError):
        config.d_model = 3


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, 2.0, "8", None])
def test_sizes_are_positive_integers(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a positive integer, but is {value!r}"):
        ModelConfig(**(SIZES | {name: value}))


def test_a_list_names_every_layer():
    with pytest.raises(ValueError, match="mixer names 3 layers, but n_layers is 2"):
        ModelConfig(**SIZES, mixer=HYBRID)


def test_unknown_mixers_and_options_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=f"unknown mixer 'lstm'; expected one of {', '.join(MIXERS)}"):
        LanguageModel(ModelConfig(**SIZES, mixer="lstm"))
    with pytest.raises(TypeError, match=r"mixer 'naju' has no option heads; it has .*d_state"):
        LanguageModel(ModelConfig(**SIZES, mixer_options={"heads": 2}))
    with pytest.raises(ValueError, match="keyed by mixer name; unknown: d_state"):
        LanguageModel(ModelConfig(**SIZES, mixer=["naju", "attention"], mixer_options={"d_state": 2}))


def test_the_embedding_starts_small_where_it_also_makes_the_logits():
    torch.manual_seed(0)
    wide = {"vocab_size": 500, "d_model": 64, "n_layers": 1}
    stds = [
        LanguageModel(ModelConfig(**wide)),
        LanguageModel(ModelConfig(**wide, tie_embeddings=False)),
        Classifier(ModelConfig(**wide), 2),
        TwoTower(ModelConfig(**wide), 2),
        LanguageModel(ModelConfig(**wide, embedding_std=0.3)),
    ]
    measured = [model.backbone.embedding.weight.std().item() for model in stds]
    assert measured == pytest.approx([0.02, 1.0, 1.0, 1.0, 0.3], rel=0.02)


def test_a_language_model_has_one_direction():
    with pytest.raises(ValueError, match="predicts the next token and cannot be bidirectional"):
        LanguageModel(ModelConfig(**SIZES, bidirectional=True))


@pytest.mark.parametrize("n_classes", [0, -2])
def test_a_classifier_needs_a_class(n_classes):
    with pytest.raises(ValueError, match=f"n_classes must be a positive integer, but is {n_classes}"):
        Classifier(ModelConfig(**SIZES), n_classes)
