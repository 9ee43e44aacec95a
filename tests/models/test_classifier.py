from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_cases import HYBRID, STACKS, sentences, small_classifier

from memories import EXACT, difference, few_examples

everywhere = pytest.mark.parametrize("layers", STACKS.values(), ids=STACKS)
directions = pytest.mark.parametrize("bidirectional", [False, True])


@st.composite
def masks_with_a_token(draw):
    length = draw(st.integers(1, 12))
    row = st.lists(st.integers(0, 1), min_size=length, max_size=length).filter(any)
    return torch.tensor(draw(st.lists(row, min_size=3, max_size=3)))


def test_the_answer_is_read_at_the_last_token():
    model = small_classifier(HYBRID)
    tokens = sentences(2, 9)
    features, _ = model.backbone(tokens)
    assert difference(model(tokens), features[:, -1] @ model.head.weight.T + model.head.bias) <= EXACT
    assert model(tokens).shape == (2, 3)


@directions
@everywhere
@few_examples
@given(mask=masks_with_a_token())
def test_padding_changes_no_answer(layers, bidirectional, mask):
    model = small_classifier(layers, bidirectional=bidirectional)
    tokens = sentences(*mask.shape)
    logits = model(tokens, attention_mask=mask)
    for row, real in enumerate(mask.bool()):
        assert difference(logits[row : row + 1], model(tokens[row : row + 1, real])) <= EXACT


@directions
def test_tokens_in_the_padding_change_no_answer(bidirectional):
    model = small_classifier(HYBRID, bidirectional=bidirectional)
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 0, 1, 0, 0]])
    tokens, others = sentences(2, 6), sentences(2, 6, seed=9)
    mixed = torch.where(mask.bool(), tokens, others)
    assert not torch.equal(mixed, tokens)
    assert torch.equal(model(mixed, mask), model(tokens, mask))


def test_every_token_counts_in_both_directions_and_the_past_in_one():
    for bidirectional in (False, True):
        model = small_classifier(["naju"], bidirectional=bidirectional)
        tokens = sentences(1, 6)
        base = model(tokens)
        for place in range(6):
            changed = tokens.clone()
            changed[0, place] = (changed[0, place] + 1) % 13
            assert not torch.equal(model(changed), base)


@directions
def test_a_prompt_without_a_token_is_refused(bidirectional):
    model = small_classifier(["naju"], bidirectional=bidirectional)
    with pytest.raises(ValueError, match="attention_mask"):
        model(sentences(2, 3), torch.tensor([[1, 1, 0], [0, 0, 0]]))


@directions
def test_gradients_reach_every_parameter(bidirectional):
    model = small_classifier(HYBRID, bidirectional=bidirectional)
    model(sentences(4, 9)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.ne(0).any(), name


def test_gradients_of_every_example_with_its_mask():
    model = small_classifier(["naju"])
    tokens, mask = sentences(3, 5), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 1, 1, 0, 1]])
    parameters = dict(model.named_parameters())

    def energy(parameters, tokens, mask):
        return torch.func.functional_call(model, parameters, (tokens[None], mask[None])).square().sum()

    each = torch.func.vmap(torch.func.grad(energy), in_dims=(None, 0, 0))(parameters, tokens, mask)
    for row in range(3):
        alone = torch.autograd.grad(energy(parameters, tokens[row], mask[row]), list(parameters.values()))
        for (name, got), want in zip(each.items(), alone, strict=True):
            assert difference(got[row], want) <= 1e-9, name
