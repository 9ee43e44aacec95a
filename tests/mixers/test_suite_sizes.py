"""Parameters and states of the suite's elementwise baselines and of its Transformer, beside the paper's."""

from __future__ import annotations

import pytest
import torch

from naju import Classifier, ModelConfig
from naju.mixers import build_mixer

CLASSES = 16


def parameters(mixer, d_model, tokens, **options):
    config = ModelConfig(vocab_size=tokens, d_model=d_model, n_layers=4, mixer=mixer, mixer_options=options)
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Classifier(config, CLASSES).parameters())


@pytest.mark.parametrize(
    ("mixer", "d_model", "tokens", "exact", "hidden_head", "printed"),
    [
        ("hgrn", 128, 91, 277_008, True, 0.29),
        ("mamba", 128, 544, 538_256, True, 0.55),
        ("mamba", 256, 64, 1_772_816, True, 1.84),
        ("transformer", 256, 91, 4_294_672, False, 4.29),
    ],
)
def test_four_layers_and_what_the_paper_counts(mixer, d_model, tokens, exact, hidden_head, printed):
    """Ours with a linear head; the paper's counts of the first three fit a head with a hidden layer, d_model wide."""
    total = parameters(mixer, d_model, tokens)
    assert total == exact
    assert round((total + hidden_head * (d_model * d_model + d_model)) / 1e6, 2) == printed


def test_rotary_positions_cost_nothing():
    learned = 4 * (4096 * 64 + 64 * 256)
    assert parameters("transformer", 256, 91) - parameters("transformer", 256, 91, positions="rotary") == learned


@pytest.mark.parametrize(
    ("mixer", "d_model", "options", "size"),
    [
        ("hgrn", 128, {}, 128),
        ("mamba", 256, {}, 8192),
        ("mamba", 128, {"d_state": 64}, 16384),
        ("transformer", 256, {}, None),
    ],
)
def test_states_are_as_large_as_in_the_paper(mixer, d_model, options, size):
    assert build_mixer(mixer, d_model, **options).state_size == size


def test_the_transformers_cache_holds_two_vectors_a_token():
    _, state = build_mixer("transformer", 32)(torch.randn(1, 7, 32))
    assert state.keys.numel() + state.values.numel() == 2 * 7 * 32
