"""Pairs through one backbone; pooling and checkpointing, which it shares with the classifier."""

from __future__ import annotations

import pytest
import torch
from model_cases import HYBRID, sentences, small_classifier, small_config

from memories import EXACT, difference, unsettle
from naju.models import TwoTower
from naju.models.pooling import pooled


def two_tower(layers=HYBRID, **options):
    torch.manual_seed(0)
    model = TwoTower(small_config(layers, bidirectional=True, pooling="mean", **options), 3)
    unsettle(model)
    return model.double()


def pairs(batch=3, length=7):
    return sentences(2 * batch, length).unflatten(0, (batch, 2))


def test_both_towers_are_the_same_backbone_and_the_head_compares():
    model, tokens = two_tower(), pairs()
    one, other = (model.backbone(tokens[:, place])[0].mean(1) for place in (0, 1))
    want = model.head(torch.cat([one, other, one * other, one - other], dim=-1))
    assert difference(model(tokens), want) <= EXACT
    assert difference(model(tokens.flip(1)), want) > 0.01  # who cites whom matters


def test_padding_of_either_tower_changes_no_answer():
    model, tokens = two_tower(), pairs(3, 7)
    mask = torch.ones(3, 2, 7, dtype=torch.int64)
    mask[0, 0, 4:], mask[1, 1, :2], mask[2, 0, 1:], mask[2, 1, 3] = 0, 0, 0, 0
    logits = model(tokens, mask)
    for row in range(3):
        vectors = [
            model.backbone(tokens[row, place][mask[row, place].bool()].unsqueeze(0))[0].mean(1) for place in (0, 1)
        ]
        one, other = vectors
        want = model.head(torch.cat([one, other, one * other, one - other], dim=-1))
        assert difference(logits[row : row + 1], want) <= EXACT


def test_shapes_that_are_no_pairs_are_refused():
    model = two_tower(["naju"])
    with pytest.raises(ValueError, match=r"tokens must have shape \(batch, 2, length\), but has \(2, 5\)"):
        model(sentences(2, 5))
    with pytest.raises(ValueError, match="attention_mask must have shape"):
        model(pairs(), torch.ones(3, 7))
    with pytest.raises(ValueError, match="n_classes must be a positive integer, but is 0"):
        TwoTower(small_config(["naju"]), 0)


def test_the_mean_is_over_real_positions_and_the_last_is_the_last_real_one():
    features = torch.randn(2, 5, 4, dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 1]])
    dirty = features.masked_fill(mask.unsqueeze(-1) == 0, float("nan"))
    mean = torch.stack([features[0, [0, 2, 3]].mean(0), features[1, 4]])
    assert difference(pooled(dirty, mask, "mean"), mean) <= EXACT
    assert torch.equal(pooled(dirty, mask, "last"), torch.stack([features[0, 3], features[1, 4]]))
    assert difference(pooled(features, None, "mean"), features.mean(1)) <= EXACT


def test_a_long_mean_of_bfloat16_loses_nothing():
    """Rounded once, at the end: a sum in bfloat16 would be rounded before it is divided, too."""
    features = torch.randn(1, 4001, 256, generator=torch.Generator().manual_seed(0)).add(1).bfloat16()
    mean = features.double().mean(1).bfloat16()
    assert torch.equal(pooled(features, torch.ones(1, 4001), "mean"), mean)
    assert torch.equal(pooled(features, None, "mean"), mean)


def test_a_mirrored_classifier_gives_the_same_answer():
    """The mean does not know the direction, so reversing the input and exchanging the directions changes nothing."""
    model, tokens = small_classifier(HYBRID, bidirectional=True, pooling="mean"), sentences(2, 9)
    mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    want = model(tokens, mask)
    for block in model.backbone.blocks:
        block.mixer.ahead, block.mixer.back = block.mixer.back, block.mixer.ahead
    assert difference(model(tokens.flip(1), mask.flip(1)), want) <= EXACT
    assert difference(model(tokens, mask), want) > 1e-3


@pytest.mark.parametrize("layers", [HYBRID, ["mamba2"], ["mlstm"]], ids="-".join)
def test_checkpointing_changes_neither_answers_nor_gradients(layers):
    plain, saving = (two_tower(layers, checkpoint_blocks=flag) for flag in (False, True))
    logits = [model(pairs()) for model in (plain, saving)]
    assert torch.equal(*logits)
    for answer in logits:
        answer.square().sum().backward()
    for (name, one), other in zip(plain.named_parameters(), saving.parameters(), strict=True):
        assert one.grad is not None, name
        assert torch.equal(one.grad, other.grad), name


def test_checkpointing_keeps_fewer_tensors():
    kept = []
    for flag in (False, True):
        model, sizes = two_tower(["naju"] * 3, checkpoint_blocks=flag), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: (s.append(t.numel()), t)[1], lambda t: t):
            model(pairs(4, 32))
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 2


def test_an_unknown_pooling_is_refused():
    with pytest.raises(ValueError, match="pooling must be 'last' or 'mean', but is 'max'"):
        small_config(["naju"], pooling="max")
