"""The sizes that the paper prints, rebuilt without memory."""

from __future__ import annotations

import pytest
import torch

from naju import LanguageModel, ModelConfig, NajuMixer
from naju.models import Backbone

GPT2_VOCABULARY = 50257


def papers_model(d_model, **mixer_options):
    with torch.device("meta"):
        return LanguageModel(
            ModelConfig(vocab_size=GPT2_VOCABULARY, d_model=d_model, n_layers=6, mixer_options=mixer_options)
        )


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("d_model", "options", "exact", "printed"),
    [
        (256, {}, 18_814_976, 18.8),
        (512, {}, 48_640_000, 48.6),
        (1024, {}, 141_320_192, 141.3),
        (256, {"gate_rank": 64}, 16_455_680, 16.5),
        (256, {"gate_rank": 32}, 16_062_464, 16.1),
    ],
)
def test_totals_with_a_tied_embedding(d_model, options, exact, printed):
    total = count(papers_model(d_model, **options))
    assert total == exact
    assert round(total / 1e6, 1) == printed


@pytest.mark.parametrize(("d_model", "printed"), [(512, 22.9), (1024, 89.9)])
def test_the_blocks_alone(d_model, printed):
    assert round(count(papers_model(d_model).backbone.blocks) / 1e6, 1) == printed


@pytest.mark.parametrize("d_model", [256, 512])
def test_one_layer_is_the_sum_of_its_parts(d_model):
    m, d, n = d_model, 2 * d_model, 64
    parts = {
        "project_in": m * 2 * d,
        "conv": 4 * d + d,
        "forget": d * d + 4 * d + d,
        "write": d * d + 4 * d + d,
        "project_BC": d * 2 * n,
        "D": d,
        "project_out": d * m,
    }
    with torch.device("meta"):
        mixer = NajuMixer(m)
    found: dict[str, int] = {}
    for name, parameter in mixer.named_parameters():
        part = name.partition(".")[0]
        found[part] = found.get(part, 0) + parameter.numel()
    assert found == parts
    block = papers_model(d_model).backbone.blocks[0]
    assert count(block) == sum(parts.values()) + m


def test_the_gate_reparameterisation_costs_nothing():
    assert count(papers_model(256, gate_reparam=True)) == 18_814_976


def test_an_untied_head_counts_once_more():
    with torch.device("meta"):
        tied, untied = (
            LanguageModel(ModelConfig(vocab_size=1000, d_model=64, n_layers=1, tie_embeddings=tie))
            for tie in (True, False)
        )
    assert count(untied) - count(tied) == 1000 * 64


def test_both_directions_count_twice():
    with torch.device("meta"):
        one, both = (
            Backbone(ModelConfig(vocab_size=10, d_model=64, n_layers=2, bidirectional=bidirectional), 1.0)
            for bidirectional in (False, True)
        )
        mixer = NajuMixer(64)
    assert count(both) - count(one) == 2 * count(mixer)
