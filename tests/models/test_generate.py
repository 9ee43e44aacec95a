"""Generation: greedy and sampled, alone and in a batch of different prompts."""

from __future__ import annotations

import pytest
import torch
from model_cases import HYBRID, STACKS, VOCABULARY, sentences, small_model

from naju.models import backbone
from naju.models.sampling import next_token

everywhere = pytest.mark.parametrize("layers", STACKS.values(), ids=STACKS)


def greedy_by_hand(model, tokens, count):
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens)[0][:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens


@everywhere
def test_greedy_is_the_most_likely_token_again_and_again(layers):
    model = small_model(layers)
    tokens = sentences(3, 5)
    out = model.generate(tokens, 12)
    assert torch.equal(out, greedy_by_hand(model, tokens, 12))
    assert len(out[:, 5:].unique()) > 1


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 1}], ids=["greedy", "top_k=1"])
@everywhere
def test_prompts_of_different_lengths_go_on_as_each_alone(layers, settings, side):
    model = small_model(layers)
    prompts = [sentences(1, length, seed=length) for length in (2, 7, 4, 1)]
    tokens, mask = sentences(4, 7, seed=9), torch.zeros(4, 7, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        place = slice(7 - prompt.shape[1], 7) if side == "left" else slice(0, prompt.shape[1])
        tokens[row, place], mask[row, place] = prompt[0], 1
    out = model.generate(tokens, 8, attention_mask=mask, **settings)
    assert torch.equal(out[:, :7], tokens)
    for row, prompt in enumerate(prompts):
        assert torch.equal(out[row, 7:], model.generate(prompt, 8)[0, prompt.shape[1] :])


def test_a_long_prompt_is_read_in_chunks(monkeypatch):
    model = small_model(HYBRID)
    tokens = sentences(2, 11)
    want = model.generate(tokens, 6)
    monkeypatch.setattr("naju.models.language_model.PREFILL_CHUNK", 3)
    assert torch.equal(model.generate(tokens, 6), want)


@everywhere
def test_a_seed_fixes_the_draw(layers):
    model = small_model(layers)
    tokens = sentences(4, 5)
    draws = [model.generate(tokens, 20, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_a_seed_leaves_the_global_generator_alone():
    model = small_model(["naju"])
    before = torch.get_rng_state()
    model.generate(sentences(2, 3), 5, temperature=1.0, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    model.generate(sentences(2, 3), 5, temperature=1.0)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"top_k": 5, "top_p": 1e-6}], ids=str)
def test_the_narrowest_draw_is_greedy(narrow):
    model = small_model(HYBRID)
    tokens = sentences(3, 5)
    assert torch.equal(model.generate(tokens, 10, temperature=2.0, seed=1, **narrow), model.generate(tokens, 10))


def test_a_low_temperature_is_greedy():
    model = small_model(HYBRID)
    tokens = sentences(3, 5)
    for temperature in (1e-4, 1e-40, 1e-50):
        assert torch.equal(model.generate(tokens, 10, temperature=temperature, seed=1), model.generate(tokens, 10))


def draws(logits, temperature=1.0, top_k=None, top_p=None):
    generator = torch.Generator().manual_seed(0)
    return next_token(logits.expand(4000, -1), temperature, top_k, top_p, generator)


def test_top_k_draws_among_the_k_most_likely():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    drawn = set(draws(logits, top_k=5).tolist())
    assert drawn == set(logits.topk(5).indices[0].tolist())


def test_top_p_draws_among_the_fewest_tokens_that_reach_p():
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    for top_p, allowed in ((0.35, {1}), (0.45, {1, 3}), (0.75, {1, 2, 3}), (0.95, {0, 1, 2, 3}), (1.0, {0, 1, 2, 3})):
        assert set(draws(logits, top_p=top_p).tolist()) == allowed


def test_top_k_comes_before_top_p():
    """Of 0.4, 0.3, 0.2, 0.1 the first two make 4/7 and 3/7, so that 0.5 of these needs the first alone."""
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    assert set(draws(logits, top_k=2, top_p=0.5).tolist()) == {1}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_temperature_says(temperature):
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    counts = torch.bincount(draws(logits, temperature), minlength=4) / 4000
    assert torch.allclose(counts, (logits[0] / temperature).softmax(-1), atol=0.03)


def test_sampled_tokens_stay_inside_the_top_k_of_the_model():
    model = small_model(["naju"])
    tokens = sentences(4, 5)
    out = model.generate(tokens, 15, temperature=3.0, top_k=3, seed=0)
    logits, _ = model(out[:, :-1])
    allowed = logits[:, 4:].topk(3).indices
    assert (allowed == out[:, 5:].unsqueeze(-1)).any(-1).all()
    assert not torch.equal(out, model.generate(tokens, 15))


def test_a_wide_top_k_and_a_full_top_p_narrow_nothing():
    model = small_model(["naju"])
    tokens = sentences(2, 4)
    want = model.generate(tokens, 10, temperature=1.0, seed=4)
    assert torch.equal(model.generate(tokens, 10, temperature=1.0, seed=4, top_k=VOCABULARY + 5), want)
    assert torch.equal(model.generate(tokens, 10, temperature=1.0, seed=4, top_p=1.0), want)


def first_places(rows, token):
    return [row.index(token) if token in row else None for row in rows.tolist()]


def test_a_row_ends_at_eos_and_is_padded_from_there():
    model = small_model(HYBRID)
    tokens = sentences(4, 5)
    free = model.generate(tokens, 20)[:, 5:]
    eos = int(free[0, 3])
    ends = first_places(free, eos)
    assert len(set(ends)) > 1
    for pad in (None, 0 if eos != 0 else 1):
        out = model.generate(tokens, 20, eos_token=eos, pad_token=pad)[:, 5:]
        for row, end in enumerate(ends):
            kept = out.shape[1] if end is None else end + 1
            assert torch.equal(out[row, :kept], free[row, :kept])
            assert out[row, kept:].eq(eos if pad is None else pad).all()


def test_generation_stops_when_every_row_has_ended():
    model = small_model(["naju"])
    tokens = sentences(1, 5)
    free = model.generate(tokens, 20)[0, 5:].tolist()
    eos = free[4]
    assert model.generate(tokens, 20, eos_token=eos).shape[1] == 5 + free.index(eos) + 1


def test_nothing_more_is_the_prompt():
    tokens = sentences(2, 5)
    assert torch.equal(small_model(["naju"]).generate(tokens, 0), tokens)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_the_integers_of_the_prompt_are_kept(dtype):
    model = small_model(["naju"])
    out = model.generate(sentences(2, 5).to(dtype), 4, eos_token=0)
    assert out.dtype == dtype
    assert torch.equal(out.long(), model.generate(sentences(2, 5), 4, eos_token=0))


def test_no_gradient_is_recorded():
    model = small_model(HYBRID)
    recorded = []
    model.backbone.norm.register_forward_hook(lambda module, args, output: recorded.append(output.requires_grad))
    model.generate(sentences(2, 5), 4)
    assert len(recorded) == 4
    assert not any(recorded)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1.0}, "temperature must be 0 .greedy. or positive, but is -1.0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be at least 1, but is 0"),
        ({"temperature": 1.0, "top_p": 0.0}, r"top_p must lie in \(0, 1\], but is 0.0"),
        ({"temperature": 1.0, "top_p": 1.1}, "top_p must lie in"),
        ({"temperature": 1.0, "top_p": float("nan")}, "top_p must lie in"),
    ],
    ids=str,
)
def test_sampling_options_out_of_range_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        small_model(["naju"]).generate(sentences(1, 3), 2, **wrong)


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="max_new_tokens must not be negative, but is -1"):
        small_model(["naju"]).generate(sentences(1, 3), -1)


def test_prompts_that_do_not_fit_are_refused():
    model = small_model(["naju"])
    with pytest.raises(ValueError, match="every prompt needs at least one"):
        model.generate(sentences(2, 3), 2, attention_mask=torch.tensor([[1, 1, 0], [0, 0, 0]]))
    with pytest.raises(ValueError, match=r"tokens must have shape \(batch, length\) and not be empty"):
        model.generate(torch.zeros(1, 0, dtype=torch.long), 2)
    with pytest.raises(ValueError, match=r"tokens must have shape \(batch, length\)"):
        model.generate(torch.zeros(3, dtype=torch.long), 2)


@pytest.mark.parametrize("given", [3, 7])
def test_a_mask_of_another_length_is_refused_however_long_the_prompt(given, monkeypatch):
    monkeypatch.setattr("naju.models.language_model.PREFILL_CHUNK", 5)
    with pytest.raises(ValueError, match=rf"attention_mask must have shape \(1, 5\), but has \(1, {given}\)"):
        small_model(["naju"]).generate(sentences(1, 5), 2, attention_mask=torch.ones(1, given))


@pytest.mark.parametrize("pad", [-100, VOCABULARY])
def test_a_pad_token_that_is_none_is_refused_before_anything_is_read(pad):
    model = small_model(["naju"])
    with pytest.raises(ValueError, match=rf"pad_token must lie in \[0, {VOCABULARY}\), but is {pad}"):
        model.generate(sentences(1, 4), 3, eos_token=1, pad_token=pad)


def test_a_prompt_that_is_empty_or_masked_otherwise_is_refused():
    model = small_model(["naju"])
    with pytest.raises(ValueError, match="not be empty"):
        model.prefill(torch.zeros(1, 0, dtype=torch.long))
    for mask, error in ((torch.ones(1, 7), ValueError), ([[1, 1, 1, 1]], TypeError)):
        with pytest.raises(error, match="attention_mask must"):
            model.prefill(sentences(1, 4), mask)


def test_a_mask_of_a_long_text_must_be_as_long(monkeypatch):
    monkeypatch.setattr(backbone, "PIECE", 4)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"attention_mask must have shape \(1, 9\), but has \(1, 12\)"),
    ):
        small_model(["naju"])(sentences(1, 9), attention_mask=torch.ones(1, 12))
