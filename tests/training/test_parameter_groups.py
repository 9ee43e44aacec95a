"""Under AdamW with these groups the gate reparameterisation is an identity, in float64 and step by step."""

import copy

import pytest
import torch
from torch.nn import functional as F

from naju import LanguageModel, ModelConfig
from naju.layers.gate import GateLogit
from naju.training import parameter_groups
from naju.training.optimizer import is_matrix

SETTINGS = {"lr": 1e-2, "weight_decay": 0.3, "eps": 1e-3}  # large enough for decay and eps to be felt
STEPS = 120


def build(mixer="naju", *, reparam, rank=None):
    # 20 channels: sqrt(20) is irrational, so nothing agrees merely because powers of two round exactly.
    options = {"d_state": 4, "gate_rank": rank, "gate_reparam": reparam}
    config = ModelConfig(vocab_size=7, d_model=10, n_layers=1, mixer=mixer, mixer_options=options, embedding_std=0.5)
    return LanguageModel(config).double()


def twins(mixer="naju", rank=None):
    """A reparameterised model and a plain one with the same function."""
    reparameterised, plain = build(mixer, reparam=True, rank=rank), build(mixer, reparam=False, rank=rank)
    copy_unscaled(reparameterised, plain)
    return reparameterised, plain


@torch.no_grad()
def copy_unscaled(source, target):
    target.load_state_dict(source.state_dict())
    for module, own in zip(gates(source), gates(target), strict=True):
        for parameter in own.scaled_parameters():
            parameter.div_(module.scale)


def gates(model):
    return [module for module in model.modules() if isinstance(module, GateLogit)]


def losses(model, groups):
    """Next-token training on sequences that repeat four random tokens, one fixed stream of batches."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(groups)
    history = []
    for _ in range(STEPS):
        tokens = torch.randint(7, (4, 4), generator=generator).repeat(1, 3)
        loss = F.cross_entropy(model(tokens[:, :-1])[0].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.detach())
    return torch.stack(history)


def largest_difference(model, other):
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize(("mixer", "rank"), [("naju", None), ("naju", 8), ("coupled", None)])
def test_reparameterised_and_plain_gates_learn_the_same(mixer, rank):
    reparameterised, plain = twins(mixer, rank)
    history = losses(reparameterised, parameter_groups(reparameterised, **SETTINGS))
    expected = losses(plain, parameter_groups(plain, **SETTINGS))
    assert expected[-10:].mean() < expected[:10].mean() - 0.3  # something was learned
    assert (history - expected).abs().max() < 1e-12
    unscaled = build(mixer, reparam=False, rank=rank)
    copy_unscaled(reparameterised, unscaled)
    assert largest_difference(unscaled, plain) < 1e-11


@pytest.mark.parametrize("unmatched", ["lr", "weight_decay", "eps"])
def test_each_of_the_three_scalings_is_needed(unmatched):
    reparameterised, plain = twins()
    groups = parameter_groups(reparameterised, **SETTINGS)
    for group in groups:
        group[unmatched] = SETTINGS[unmatched]
    history = losses(reparameterised, groups)
    assert (history - losses(plain, parameter_groups(plain, **SETTINGS))).abs().max() > 1e-3


def test_ordinary_optimizer_settings_train_another_model():
    reparameterised, plain = twins()
    history = losses(reparameterised, [{"params": list(reparameterised.parameters()), **SETTINGS}])
    assert (history - losses(plain, parameter_groups(plain, **SETTINGS))).abs().max() > 1e-3


def test_groups_hold_every_trainable_parameter_once():
    model = build(reparam=True, rank=8)
    model.backbone.embedding.weight.requires_grad_(False)
    groups = parameter_groups(model, lr=1e-3, weight_decay=0.1)
    grouped = [parameter for group in groups for parameter in group["params"]]
    assert sorted(map(id, grouped)) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    scale = 20**0.5
    settings = [(group["lr"], group["weight_decay"], group["eps"]) for group in groups]
    assert settings == [(1e-3, 0.1, 1e-8), (1e-3 * scale, 0.1 / scale, 1e-8 / scale)]
    scaled = {id(parameter) for gate in gates(model) for parameter in gate.scaled_parameters()}
    assert {id(parameter) for parameter in groups[1]["params"]} == scaled


def test_a_plain_model_gets_one_group():
    model = build(reparam=False)
    (group,) = parameter_groups(copy.deepcopy(model), lr=1e-3, weight_decay=0.1)
    assert (group["lr"], group["weight_decay"], group["eps"]) == (1e-3, 0.1, 1e-8)


def test_only_matrices_decay_where_that_is_asked_for():
    model = build(reparam=True, rank=8)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, lr=1e-3, weight_decay=0.1, decays=is_matrix)
    free = {names[id(p)] for group in groups if group["weight_decay"] == 0 for p in group["params"]}
    mixer = "backbone.blocks.0.mixer."
    parts = ("D", "forget.bias", "write.bias", "conv.bias")
    assert free == {*(mixer + part for part in parts), "backbone.blocks.0.norm.weight", "backbone.norm.weight"}
    assert {group["weight_decay"] for group in groups} == {0.0, 0.1, 0.1 / 20**0.5}
