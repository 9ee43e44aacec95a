"""What a forward pass returns beside logits: losses, hidden states, tuples; packed sequences; classifiers."""

from __future__ import annotations

import pytest
import torch
from hf_cases import PAD, STACKS, left_padded, plain_model, sentences, small_config, wrapped_model
from torch.nn import functional as F

from memories import EXACT, difference, unsettle
from naju import Classifier
from naju.hf import NajuCache, NajuForCausalLM, NajuForSequenceClassification
from naju.models import backbone


def plain_classifier(**options):
    torch.manual_seed(0)
    model = Classifier(small_config(**options), 3)
    unsettle(model)
    return model.double()


def test_the_loss_is_the_cross_entropy_of_the_next_token_where_labels_are_real():
    plain, tokens = plain_model(), sentences(2, 7)
    labels = tokens.masked_fill(torch.arange(7) < 3, -100)
    want = F.cross_entropy(plain(tokens)[0][:, 2:-1].flatten(0, 1).float(), tokens[:, 3:].flatten())
    loss = NajuForCausalLM.from_plain(plain)(tokens, labels=labels).loss
    assert difference(loss, want) <= 1e-6  # transformers computes it in float32


@pytest.mark.parametrize("stack", STACKS)
def test_hidden_states_are_what_stands_before_and_after_every_block(stack):
    plain, tokens = plain_model(stack), sentences(2, 5)
    read = NajuForCausalLM.from_plain(plain)(tokens, output_hidden_states=True)
    u = plain.backbone.embedding(tokens)
    want = [u, *(u := block(u, None, None, None)[0] for block in plain.backbone.blocks)]
    want[-1] = plain.backbone.norm(u)
    assert len(read.hidden_states) == len(want)
    assert all(torch.equal(got, wanted) for got, wanted in zip(read.hidden_states, want, strict=True))
    assert wrapped_model(stack)(tokens).hidden_states is None


def test_hidden_states_of_a_long_input_and_of_one_token(monkeypatch):
    model, tokens = wrapped_model(), sentences(1, 10)
    want = model(tokens, output_hidden_states=True).hidden_states
    monkeypatch.setattr(backbone, "PIECE", 4)
    with torch.no_grad():
        pieces = model(tokens, output_hidden_states=True).hidden_states
    assert all(difference(got, wanted) <= EXACT for got, wanted in zip(pieces, want, strict=True))
    cache = NajuCache()
    model(tokens[:, :9], past_key_values=cache, use_cache=True)
    last = model(tokens[:, 9:], past_key_values=cache, output_hidden_states=True).hidden_states
    assert all(difference(got, wanted[:, 9:]) <= EXACT for got, wanted in zip(last, want, strict=True))


def test_generation_can_return_hidden_states():
    out = wrapped_model().generate(
        sentences(1, 4), max_new_tokens=3, do_sample=False, output_hidden_states=True, return_dict_in_generate=True
    )
    assert [step[-1].shape[1] for step in out.hidden_states] == [4, 1, 1]


def test_a_tuple_on_request():
    model, tokens = wrapped_model(), sentences(1, 4)
    logits, cache = model(tokens, return_dict=False)
    assert torch.equal(logits, model(tokens).logits)
    assert isinstance(cache, NajuCache)


@pytest.mark.parametrize("stack", ["naju", "hybrid"])
def test_packed_sequences_do_not_see_each_other(stack):
    plain, tokens = plain_model(stack), sentences(1, 9)
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    read = NajuForCausalLM.from_plain(plain)(tokens, cu_seq_lens_q=bounds, use_cache=True)
    assert difference(read.logits[:, 4:], plain(tokens[:, 4:])[0]) <= EXACT
    assert read.past_key_values is None


@pytest.mark.parametrize("options", [{}, {"pooling": "mean"}, {"bidirectional": True}], ids=["last", "mean", "both"])
def test_a_classifier_answers_as_the_plain_one(options):
    plain = plain_classifier(**options)
    model = NajuForSequenceClassification.from_plain(plain, pad_token_id=PAD)
    tokens, mask = left_padded([5, 2, 7])
    want = plain(tokens, mask)
    assert torch.equal(model(tokens, mask).logits, want)
    assert torch.equal(model(tokens).logits, want)  # padding found by its token
    flipped, mask = tokens.flip(1), mask.flip(1)
    assert torch.equal(model(flipped, mask).logits, plain(flipped, mask))


def test_a_classifiers_losses():
    model, tokens = NajuForSequenceClassification.from_plain(plain_classifier()), sentences(2, 5)
    logits = model(tokens).logits
    classes, values = torch.tensor([2, 0]), torch.randn(2, 3, dtype=torch.float64)
    assert torch.equal(model(tokens, labels=classes).loss, F.cross_entropy(logits, classes))
    model.config.problem_type = "regression"
    assert torch.equal(model(tokens, labels=values).loss, F.mse_loss(logits, values))


def test_positions_that_begin_anew_keep_packed_sequences_apart():
    model, first, second = wrapped_model(), sentences(1, 5), sentences(1, 4, seed=2)
    positions = torch.cat([torch.arange(5), torch.arange(4)]).unsqueeze(0)
    packed = model(torch.cat([first, second], dim=1), position_ids=positions)
    apart = torch.cat([model(tokens).logits for tokens in (first, second)], dim=1)
    assert difference(packed.logits, apart) <= EXACT
    assert packed.past_key_values is None
    usual = model(first, position_ids=torch.arange(5).unsqueeze(0))
    assert torch.equal(usual.logits, model(first).logits)
    assert usual.past_key_values is not None


@pytest.mark.parametrize("shape", [(2, 3), (5, 9), (2, 12), (9,)])
def test_a_mask_of_another_shape_is_refused_even_if_all_of_it_is_real(shape):
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(2, 9\), but has"):
        wrapped_model()(sentences(2, 9), attention_mask=torch.ones(shape, dtype=torch.long))


@pytest.mark.parametrize("additive", [[[0.0, 0.0, 0.0]], [[-1e9, 0.0, 0.0]], [[-1e9, -1e9, -1e9]]])
def test_a_mask_that_would_be_added_to_scores_is_refused(additive):
    with pytest.raises(ValueError, match="attention_mask must be 1 at tokens and 0 at padding"):
        wrapped_model()(sentences(1, 3), attention_mask=torch.tensor(additive))


def test_weights_that_are_elsewhere_are_missed_by_name():
    model = wrapped_model()
    model.model.backbone.blocks[1].to("meta")
    with pytest.raises(ValueError, match="some blocks have no weights here: a model that is offloaded"):
        model(sentences(1, 3))
