"""`generate` and the cache against the plain model."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hf_cases import PAD, STACKS, VOCABULARY, left_padded, plain_model, sentences, wrapped_model
from torch import Tensor

from memories import EXACT, assert_states_agree, difference
from naju.hf import NajuCache, NajuForCausalLM

everywhere = pytest.mark.parametrize("stack", STACKS)
both = pytest.mark.parametrize("stack", ["naju", "hybrid"])


def greedy(model: NajuForCausalLM, tokens: Tensor, count: int, **options: object) -> Tensor:
    return model.generate(tokens, max_new_tokens=count, do_sample=False, **options)


@everywhere
def test_greedy_with_a_cache_is_greedy_without_and_the_plain_models(stack):
    plain, tokens = plain_model(stack), sentences(3, 5)
    model = NajuForCausalLM.from_plain(plain)
    want = plain.generate(tokens, 10)
    assert len(want[:, 5:].unique()) > 1
    assert torch.equal(greedy(model, tokens, 10), want)
    assert torch.equal(greedy(model, tokens, 10, use_cache=False), want)


@everywhere
def test_left_padded_prompts_continue_as_if_alone(stack):
    plain = plain_model(stack)
    tokens, mask = left_padded([4, 7, 1])
    out = greedy(NajuForCausalLM.from_plain(plain, pad_token_id=PAD), tokens, 8, attention_mask=mask)
    for row, length in enumerate([4, 7, 1]):
        alone = plain.generate(tokens[row : row + 1, 7 - length :], 8)
        assert torch.equal(out[row : row + 1, 7 - length :], alone)


def test_sampling_draws_what_the_plain_model_draws():
    plain, tokens = plain_model(), sentences(4, 5)
    want = plain.generate(tokens, 12, temperature=0.7, top_k=6, top_p=0.9, seed=3)
    torch.manual_seed(3)
    drawn = NajuForCausalLM.from_plain(plain).generate(
        tokens, max_new_tokens=12, do_sample=True, temperature=0.7, top_k=6, top_p=0.9
    )
    assert torch.equal(drawn, want)
    assert not torch.equal(drawn, plain.generate(tokens, 12))


@both
def test_beams_as_wide_as_the_vocabulary_find_the_best_continuation_of_all(stack):
    plain = plain_model(stack)
    tokens, mask = left_padded([3, 5])
    out = NajuForCausalLM.from_plain(plain, pad_token_id=PAD).generate(
        tokens, attention_mask=mask, max_new_tokens=2, do_sample=False, num_beams=VOCABULARY, length_penalty=0.0
    )
    pairs = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=2)))
    for row, length in enumerate([3, 5]):
        prompt = tokens[row, 5 - length :].expand(len(pairs), -1)
        chances = plain(torch.cat([prompt, pairs], dim=1))[0].log_softmax(-1)[:, length - 1 : length + 1]
        score = chances.gather(2, pairs.unsqueeze(2)).sum((1, 2))
        assert torch.equal(out[row, 5:], pairs[score.argmax()])


def test_several_beams_for_long_are_the_same_with_and_without_a_cache():
    model, tokens = wrapped_model("hybrid"), sentences(2, 4)
    options = {"num_beams": 3, "num_return_sequences": 3, "eos_token_id": 2}
    assert torch.equal(greedy(model, tokens, 9, **options), greedy(model, tokens, 9, use_cache=False, **options))


@both
def test_going_on_from_a_returned_cache_is_going_on(stack):
    model = wrapped_model(stack)
    tokens, mask = left_padded([5, 3])
    whole = greedy(model, tokens, 9, attention_mask=mask)
    first = greedy(model, tokens, 4, attention_mask=mask, return_dict_in_generate=True)
    longer = torch.cat([mask, mask.new_ones(2, 4)], dim=1)
    kept = first.past_key_values.clone()
    assert isinstance(kept, NajuCache)
    assert kept.get_seq_length() == 8
    for cache in (first.past_key_values, copy.deepcopy(kept)):
        assert torch.equal(greedy(model, first.sequences, 5, attention_mask=longer, past_key_values=cache), whole)
    unseen = first.sequences[:, 8:]  # or with the new tokens only, under a mask of all
    assert torch.equal(greedy(model, unseen, 5, attention_mask=longer, past_key_values=kept)[:, 1:], whole[:, 9:])


@both
def test_a_prompt_in_chunks(stack):
    model = wrapped_model(stack)
    tokens, mask = left_padded([9, 3])
    options = {"attention_mask": mask, "prefill_chunk_size": 4, "past_key_values": NajuCache()}
    assert torch.equal(greedy(model, tokens, 6, **options), greedy(model, tokens, 6, attention_mask=mask))


@everywhere
def test_pieces_with_a_cache_are_the_whole(stack):
    plain = plain_model(stack)
    model = NajuForCausalLM.from_plain(plain)
    tokens, mask = left_padded([9, 4])
    want, state = plain(tokens, attention_mask=mask)
    cache, logits = NajuCache(), []
    for start, stop in [(0, 3), (3, 4), (4, 8), (8, 9)]:
        read = model(tokens[:, start:stop], mask[:, :stop], past_key_values=cache, use_cache=True)
        logits.append(read.logits)
        assert read.past_key_values is cache
    real = mask.bool()
    assert difference(torch.cat(logits, dim=1)[real], want[real]) <= EXACT
    assert cache.get_seq_length() == 9
    if "attention" not in STACKS[stack]:
        assert_states_agree(cache.state, state, EXACT)


def test_a_cache_that_is_not_asked_for_is_neither_made_nor_changed():
    model, cache = wrapped_model(), NajuCache()
    assert model(sentences(1, 3), use_cache=False).past_key_values is None
    model(sentences(1, 3), past_key_values=cache, use_cache=False)
    assert cache.state is None
    assert model.train()(sentences(1, 3)).past_key_values is None


def test_a_cache_can_be_reordered_repeated_selected_and_emptied():
    model, tokens = wrapped_model("hybrid"), sentences(3, 4)
    state = model(tokens).past_key_values.state

    def cache() -> NajuCache:
        return NajuCache(state, 4)

    moved, repeated, chosen, empty = cache(), cache(), cache(), cache()
    moved.reorder_cache(torch.tensor([2, 0, 2]))
    repeated.batch_repeat_interleave(2)
    chosen.batch_select_indices(torch.tensor([1]))
    empty.reset()
    assert_states_agree(moved.state, state[torch.tensor([2, 0, 2])], 0)
    assert_states_agree(repeated.state, state[torch.tensor([0, 0, 1, 1, 2, 2])], 0)
    assert_states_agree(chosen.state, state[1], 0)
    assert (empty.state, empty.get_seq_length(), len(empty), empty.batch_size) == (None, 0, 0, -1)
    assert (len(moved), moved.batch_size, moved.get_mask_sizes(2, 0)) == (3, 3, (6, 0))


def test_an_empty_cache_stays_empty():
    cache = NajuCache()
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0]))
    assert cache.clone().state is None


def test_a_state_gives_no_token_back():
    with pytest.raises(NotImplementedError, match="does not give tokens back"):
        NajuCache().crop(-1)


def test_only_the_logits_that_are_wanted():
    model, tokens = wrapped_model(), sentences(2, 6)
    every = model(tokens).logits
    assert torch.equal(model(tokens, logits_to_keep=2).logits, every[:, -2:])
    places = torch.tensor([0, 3])
    assert torch.equal(model(tokens, logits_to_keep=places).logits, every[:, places])


def test_foreign_caches_and_embeddings_are_refused():
    from transformers import DynamicCache

    model, tokens = wrapped_model(), sentences(1, 3)
    with pytest.raises(TypeError, match="must be a NajuCache, but is a DynamicCache"):
        model(tokens, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="read tokens only"):
        model(inputs_embeds=torch.zeros(1, 3, 16))
    with pytest.raises(ValueError, match="attention_mask must have shape"):
        model(tokens, torch.ones(1, 1, 3, 3))


@pytest.mark.parametrize("of_the_mixer", [False, True])
def test_hooks_see_every_token_that_is_decoded(of_the_mixer):
    model, calls = wrapped_model(), []
    block = model.model.backbone.blocks[0]
    (block.mixer if of_the_mixer else block).register_forward_hook(lambda *_: calls.append(1))
    model.generate(sentences(1, 4), max_new_tokens=5, do_sample=False)
    assert len(calls) == 5


@pytest.mark.parametrize("of_the_mixer", [False, True])
def test_a_forward_in_place_of_another_sees_every_token_that_is_decoded(of_the_mixer):
    """accelerate's hooks, by which a model lies on several devices, are such."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Counting(ModelHook):
        def pre_forward(self, module, *inputs, **options):
            calls.append(1)
            return inputs, options

    model, calls = wrapped_model(), []
    block = model.model.backbone.blocks[0]
    add_hook_to_module(block.mixer if of_the_mixer else block, Counting())
    model.generate(sentences(1, 4), max_new_tokens=5, do_sample=False)
    assert len(calls) == 5


def test_a_prompt_is_read_in_pieces_where_that_is_asked_for():
    model, prompt = wrapped_model(), sentences(1, 8)
    options = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(prompt, prefill_chunk_size=3, **options), model.generate(prompt, **options))
