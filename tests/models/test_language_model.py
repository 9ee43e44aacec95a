"""The language model: its equations, streaming, padding, packing and causality, for every stack of mixers."""

from __future__ import annotations

import copy
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_cases import (
    HYBRID,
    STACKS,
    VOCABULARY,
    assert_same_memory,
    sentences,
    small_config,
    small_model,
)

from memories import EXACT, LAW_TOLERANCE, difference, few_examples
from naju import LanguageModel, ModelState

everywhere = pytest.mark.parametrize("layers", STACKS.values(), ids=STACKS)


def rms_norm(u, weight, eps):
    return weight * u / torch.sqrt((u * u).mean(dim=-1, keepdim=True) + eps)


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_the_model_is_embedding_blocks_norm_and_logits(tie_embeddings):
    model = small_model(HYBRID, tie_embeddings=tie_embeddings, norm_eps=1e-3)
    tokens = sentences(2, 9)
    u = model.backbone.embedding.weight[tokens]
    for block in model.backbone.blocks:
        u = u + block.mixer(rms_norm(u, block.norm.weight, 1e-3))[0]
    features = rms_norm(u, model.backbone.norm.weight, 1e-3)
    table = model.backbone.embedding.weight if tie_embeddings else model.head.weight
    logits, _ = model(tokens)
    assert difference(logits, features @ table.T) <= EXACT
    assert (model.head is None) == tie_embeddings


def test_an_adapter_on_an_untied_head_is_heard():
    model = small_model(["naju"], tie_embeddings=False)
    tokens = sentences(2, 5)
    want, state = model(tokens)
    model.head = torch.nn.Sequential(model.head, torch.nn.Softplus())
    assert difference(model(tokens)[0], torch.nn.functional.softplus(want)) <= EXACT
    assert difference(model.step(tokens[:, 0], state)[0], model(tokens[:, :1], state)[0][:, 0]) <= EXACT


@pytest.mark.parametrize("dtype", LAW_TOLERANCE, ids=str)
@everywhere
@few_examples
@given(length=st.integers(1, 16), cuts=st.lists(st.integers(1, 15), max_size=4), seed=st.integers(0, 999))
def test_any_cut_equals_the_whole(layers, dtype, length, cuts, seed):
    model = small_model(layers, dtype, seed=seed)
    tokens = sentences(2, length, seed=seed)
    want, memory = model(tokens)
    ends = sorted({cut for cut in cuts if cut < length} | {length})
    state, outputs = None, []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        logits, state = model(tokens[:, start:end], state)
        outputs.append(logits)
    assert difference(torch.cat(outputs, dim=1), want) <= LAW_TOLERANCE[dtype]
    assert_same_memory(model, state, memory, LAW_TOLERANCE[dtype])


@everywhere
def test_steps_equal_the_whole(layers):
    model = small_model(layers)
    tokens = sentences(3, 11)
    want, memory = model(tokens)
    state, outputs = model.init_state(3), []
    for token in tokens.unbind(1):
        logits, state = model.step(token, state)
        outputs.append(logits)
    assert difference(torch.stack(outputs, dim=1), want) <= EXACT
    assert_same_memory(model, state, memory, EXACT)


@st.composite
def masks(draw):
    length = draw(st.integers(1, 12))
    row = st.lists(st.integers(0, 1), min_size=length, max_size=length)
    return torch.tensor(draw(st.lists(row, min_size=3, max_size=3)))


@everywhere
@few_examples
@given(mask=masks(), seed=st.integers(0, 999))
def test_padding_changes_nothing(layers, mask, seed):
    model = small_model(layers, seed=seed)
    tokens = sentences(*mask.shape, seed=seed)
    _, start = model(sentences(3, 4, seed=seed + 1))
    logits, after = model(tokens, start, attention_mask=mask)
    for row, real in enumerate(mask.bool()):
        if real.any():
            want, memory = model(tokens[row : row + 1, real], start[row])
            assert difference(logits[row : row + 1, real], want) <= EXACT
        else:
            memory = start[row]
        assert_same_memory(model, after[row], memory, EXACT)


@everywhere
def test_a_padding_token_without_a_meaning_harms_no_other(layers):
    model = small_model(layers)
    tokens, mask = sentences(2, 8) % (VOCABULARY - 1), torch.ones(2, 8)
    mask[0, :3] = mask[1, 5:] = 0
    want, _ = model.backbone(tokens, attention_mask=mask)
    with torch.no_grad():
        model.backbone.embedding.weight[-1] = float("nan")
    got, _ = model.backbone(tokens.masked_fill(mask == 0, VOCABULARY - 1), attention_mask=mask)
    assert torch.equal(got[mask.bool()], want[mask.bool()])


@everywhere
@few_examples
@given(counts=st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any), seed=st.integers(0, 999))
def test_packed_equals_apart(layers, counts, seed):
    model = small_model(layers, seed=seed)
    tokens = sentences(1, sum(counts), seed=seed)
    _, start = model(sentences(len(counts), 4, seed=seed + 1))
    logits, after = model(tokens, start, cu_seqlens=torch.tensor([0, *accumulate(counts)]))
    for row, (piece, got) in enumerate(zip(tokens.split(counts, 1), logits.split(counts, 1), strict=True)):
        memory = start[row]
        if piece.shape[1] > 0:
            want, memory = model(piece, memory)
            assert difference(got, want) <= EXACT
        assert_same_memory(model, after[row], memory, EXACT)


@everywhere
def test_gradients_reach_the_past_only(layers):
    model = small_model(layers)
    caught = []
    model.backbone.embedding.register_forward_hook(lambda module, args, output: caught.append(output))
    logits, _ = model(sentences(1, 10))
    moved = [
        torch.autograd.grad(logits[:, t].sum(), caught[0], retain_graph=True)[0][0].ne(0).any(-1) for t in range(10)
    ]
    assert torch.equal(torch.stack(moved), torch.ones(10, 10).tril().bool())


@everywhere
@pytest.mark.parametrize("masked", [False, True])
def test_a_prompt_is_read_in_chunks(layers, masked, monkeypatch):
    model = small_model(layers)
    tokens = sentences(4, 13)
    mask = torch.ones(4, 13, dtype=torch.long)
    if masked:
        mask[0, :9] = mask[1, 5:] = mask[2, 3:11] = 0
    want, memory = model(tokens, attention_mask=mask)
    last = torch.arange(13).mul(mask).argmax(1)
    monkeypatch.setattr("naju.models.language_model.PREFILL_CHUNK", 4)
    logits, state = model.prefill(tokens, attention_mask=mask if masked else None)
    assert difference(logits, want[torch.arange(4), last]) <= EXACT
    assert_same_memory(model, state, memory, EXACT)
    again, _ = model.prefill(tokens[:, :5], state=state)
    assert difference(again, model(tokens[:, :5], memory)[0][:, -1]) <= EXACT


@everywhere
def test_reading_a_prompt_records_no_gradient(layers):
    logits, state = small_model(layers).prefill(sentences(2, 5))
    assert not logits.requires_grad
    assert not any(tensor.requires_grad for tensor in state.tensors().values())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_tokens_may_be_either_integer(dtype):
    model = small_model(HYBRID)
    tokens = sentences(2, 5)
    assert torch.equal(model(tokens.to(dtype))[0], model(tokens)[0])
    assert torch.equal(model.step(tokens[:, 0].to(dtype), model.init_state(2))[0], model(tokens[:, :1])[0][:, 0])


def test_tokens_that_do_not_fit_are_refused():
    model = small_model(["naju"])
    with pytest.raises(TypeError, match="tokens must be int32 or int64, but are float32"):
        model(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"tokens must have shape \(batch, length\) and not be empty.*\(3,\)"):
        model(torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"not be empty, but have shape \(2, 0\)"):
        model(torch.zeros(2, 0, dtype=torch.long))
    with pytest.raises(ValueError, match=r"tokens must have shape \(batch,\)"):
        model.step(sentences(2, 3), model.init_state(2))


def test_a_state_of_another_model_is_refused():
    model, deeper = small_model(["naju"]), small_model(["naju", "naju"])
    with pytest.raises(ValueError, match="state has 2 layers, but the model has 1"):
        model(sentences(2, 3), deeper.init_state(2))
    with pytest.raises(ValueError, match="state has 1 layers, but the model has 2"):
        deeper.step(sentences(2, 1)[:, 0], model.init_state(2))


@everywhere
def test_half_and_double_precision_run(layers):
    tokens = sentences(2, 20)
    want, _ = small_model(layers, torch.float64)(tokens)
    half = small_model(layers, torch.float32).bfloat16()
    logits, state = half(tokens)
    assert logits.dtype == torch.bfloat16
    assert half.step(tokens[:, 0], state)[0].dtype == torch.bfloat16
    truth = copy.deepcopy(half).double()(tokens)[0]
    assert difference(logits.double(), truth) <= 3e-2
    assert want.dtype == torch.float64


# mlstm divides by a sum that may cancel, where rounding grows
AUTOCAST_ERROR = {"mlstm": 5e-2}


@everywhere
def test_autocast_is_close_to_float32(layers):
    model = small_model(layers, torch.float32)
    tokens = sentences(2, 20)
    want, _ = model(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, state = model(tokens)
        stepped, _ = model.step(tokens[:, 0], state)
    assert difference(got.float(), want) <= max(AUTOCAST_ERROR.get(layer, 3e-2) for layer in layers)
    assert stepped.isfinite().all()
    for layer, block in zip(state.layers, model.backbone.blocks, strict=True):
        if block.mixer.state_size is not None:
            assert next(iter(layer.tensors().values())).dtype == torch.float32  # the memory comes first


@everywhere
def test_copies_compute_the_same(layers):
    model = small_model(layers)
    tokens = sentences(2, 9)
    want = model(tokens)[0]
    assert torch.equal(copy.deepcopy(model)(tokens)[0], want)
    other = LanguageModel(small_config(layers)).double()
    assert not torch.equal(other(tokens)[0], want)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens)[0], want)


def test_a_tied_table_is_stored_once():
    assert not any("head" in name for name in small_model(["naju"]).state_dict())
    assert "head.weight" in small_model(["naju"], tie_embeddings=False).state_dict()


def test_a_model_state_has_a_part_for_each_layer():
    model = small_model(HYBRID)
    state = model.init_state(2)
    assert isinstance(state, ModelState)
    assert [type(layer) for layer in state.layers] == [type(b.mixer.init_state(1)) for b in model.backbone.blocks]
    assert state.batch == 2


def test_reading_in_pieces_equals_reading_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients a long input is read piece by piece; outputs, final state and a mask's effect stay the same."""
    from naju.models import LanguageModel, ModelConfig, backbone

    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(30, 16, 2, mixer=["naju", "attention"])).double()
    tokens, mask = torch.randint(30, (2, 50)), torch.rand(2, 50) > 0.2
    for attention_mask in (None, mask):
        want, want_state = model(tokens, attention_mask=attention_mask)
        monkeypatch.setattr(backbone, "PIECE", 7)
        with torch.no_grad():
            got, got_state = model(tokens, attention_mask=attention_mask)
        monkeypatch.undo()
        torch.testing.assert_close(got, want.detach(), rtol=1e-10, atol=1e-12)
        for mine, theirs in zip(got_state.tensors().values(), want_state.tensors().values(), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-10, atol=1e-12)
