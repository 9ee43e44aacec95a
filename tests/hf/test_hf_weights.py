"""Weights: the plain model's, saved and loaded without a change, and started as the plain model starts them."""

from __future__ import annotations

import json

import pytest
import torch
from hf_cases import STACKS, VOCABULARY, plain_model, sentences, small_config, wrapped_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from memories import D_MODEL, EXACT, difference
from naju import Classifier, LanguageModel
from naju.hf import NajuConfig, NajuForCausalLM, NajuForSequenceClassification

everywhere = pytest.mark.parametrize("stack", STACKS)


def assert_same_weights(got, want):
    """Name by name, bit for bit."""
    mine, theirs = got.state_dict(), want.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype
        assert torch.equal(mine[name], tensor), name


@everywhere
def test_saved_and_loaded_it_is_the_plain_model(stack, tmp_path):
    plain, tokens = plain_model(stack), sentences(2, 9)
    NajuForCausalLM.from_plain(plain).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not loaded.training
    assert_same_weights(loaded.to_plain(), plain)
    assert difference(loaded(tokens).logits, plain(tokens)[0]) <= EXACT


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_embedding_is_one_tensor_in_memory_and_on_disk(tied, tmp_path):
    plain = plain_model(tie_embeddings=tied)
    NajuForCausalLM.from_plain(plain).save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied
    loaded = NajuForCausalLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) is tied
    assert_same_weights(loaded.to_plain(), plain)


def test_a_wrapped_copy_shares_nothing_with_its_model():
    plain = plain_model()
    before = plain(sentences(1, 5))[0]
    wrapped = NajuForCausalLM.from_plain(plain)
    with torch.no_grad():
        for parameter in [*wrapped.parameters(), *wrapped.to_plain().parameters()]:
            parameter.zero_()
    assert torch.equal(plain(sentences(1, 5))[0], before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_precision_is_kept_and_can_be_chosen(dtype, tmp_path):
    wrapped_model(dtype=dtype).save_pretrained(tmp_path)
    assert {p.dtype for p in NajuForCausalLM.from_pretrained(tmp_path).parameters()} == {dtype}
    chosen = NajuForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert {p.dtype for p in chosen.parameters()} == {torch.float64}


@everywhere
def test_a_new_model_starts_as_the_plain_one(stack):
    """The same constants where the plain start has constants, the same spread where it draws."""
    plain = small_config(stack)
    fresh, ours = LanguageModel(plain), NajuForCausalLM(NajuConfig.from_plain(plain)).to_plain()
    for name, want in fresh.state_dict().items():
        got = ours.state_dict()[name]
        if want.numel() < 2 or want.std() == 0:
            assert torch.equal(got, want), name
        elif want.numel() >= 64:
            assert 0.6 < got.std() / want.std() < 1.6, name


@everywhere
def test_what_a_file_lacks_starts_as_it_should_and_the_rest_is_loaded(stack, tmp_path):
    """A classifier from a language model: the head is new; and of a block that was left out, all is."""
    wrapped = wrapped_model(stack, torch.float32)
    lost = [name for name in wrapped.state_dict() if ".blocks.1." in name]
    kept = {name: t for name, t in wrapped.state_dict().items() if name not in lost and name != "lm_head.weight"}
    wrapped.save_pretrained(tmp_path, state_dict=kept)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    found = loaded.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in kept.items())
    assert found["score.weight"].shape == (3, D_MODEL)
    assert 0.05 < found["score.weight"].abs().max() <= D_MODEL**-0.5  # torch's own start of a linear layer
    fresh = LanguageModel(wrapped.config.to_plain()).state_dict()
    for name in lost:
        want = fresh[name.removeprefix("model.")]
        if want.numel() > 1 and want.std() == 0:
            assert torch.equal(found[name], want), name


def test_resized_embeddings_keep_old_rows_and_stay_tied():
    model, tokens = wrapped_model(), sentences(1, 6)
    before = model(tokens).logits
    model.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
    assert difference(model(tokens).logits[..., :VOCABULARY], before) <= EXACT
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.to_plain()(tokens)[0].shape == (1, 6, VOCABULARY + 5)


def test_a_classifier_there_and_back(tmp_path):
    plain = Classifier(small_config(), 4).double()
    NajuForSequenceClassification.from_plain(plain, problem_type="regression").save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert loaded.config.problem_type == "regression"
    assert_same_weights(loaded.to_plain(), plain)


def test_the_file_says_what_made_it(tmp_path):
    wrapped_model().save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    assert described["model_type"] == "naju"
    assert described["architectures"] == ["NajuForCausalLM"]
