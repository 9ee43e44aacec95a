"""Decoding through graphs, with a stand-in that replays on a CPU what a CUDA graph would."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from model_cases import HYBRID, sentences, small_model

from naju.models import graphs
from naju.models.graphs import GraphedDecoder, PlainDecoder, decoder_for, graphs_refuse, step_between

STACK = ["naju", "coupled", "naju"]


def rerun(function):
    """Like a graph: runs once when captured, and every replay works in the same memory."""
    result = function()
    return lambda: result.copy_(function())


@pytest.fixture
def with_graphs(monkeypatch):
    """Generation takes graphs from the first token on; the list counts them."""
    captured = []

    def capture(function):
        captured.append(function)
        return rerun(function)

    monkeypatch.setattr(graphs, "graphs_refuse", lambda model, token: None)
    monkeypatch.setattr(graphs, "capture_on_gpu", capture)
    monkeypatch.setattr(graphs, "WORTHWHILE", 1)
    return captured


@pytest.mark.parametrize("new", [2, 3, 9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_generation_is_the_same(dtype, new, with_graphs, monkeypatch):
    model, tokens = small_model(STACK, dtype), sentences(3, 5)
    settings = [{}, {"temperature": 1.3, "seed": 4}, {"eos_token": 2, "pad_token": 0}]
    graphed = [model.generate(tokens, new, **setting) for setting in settings]
    assert len(with_graphs) == 2 * len(settings)
    monkeypatch.setattr(graphs, "WORTHWHILE", 100)
    for setting, got in zip(settings, graphed, strict=True):
        assert torch.equal(got, model.generate(tokens, new, **setting))


def test_logits_and_state_go_on_from_a_used_state():
    model, tokens = small_model(STACK), sentences(2, 8)
    with torch.no_grad():
        state = model(tokens[:, :3])[1]
        kept = state.snapshot()
        decode, plain = GraphedDecoder(model.step, tokens[:, 0], state, rerun), PlainDecoder(model.step, state)
        for token in tokens[:, 3:].unbind(1):
            assert torch.equal(decode(token), plain(token))
    assert all(torch.equal(tensor, kept.tensors()[name]) for name, tensor in state.tensors().items())


def test_two_buffers_take_turns():
    model, token = small_model(STACK), sentences(2, 1)[:, 0]
    pairs = []

    def watched(token, state):
        pairs.append([tensor.data_ptr() for tensor in state.tensors().values()])
        return model.step(token, state)

    decode = GraphedDecoder(watched, token, model.init_state(2), rerun)
    del pairs[:]
    for _ in range(4):
        decode(token)
    assert pairs == pairs[:2] * 2
    names = model.init_state(2).tensors()
    shared = [name for name, first, second in zip(names, *pairs[:2], strict=True) if first == second]
    assert shared == [f"layers.{index}.x" for index, name in enumerate(STACK) if name in ("naju", "coupled")]


def test_a_step_between_buffers_writes_one_and_reads_the_other():
    model, token = small_model(STACK), sentences(2, 1)[:, 0]
    with torch.no_grad():
        before = model(sentences(2, 4))[1].clone()
        kept, after = before.snapshot(), before.map(torch.zeros_like)
        logits = step_between(model.step, token, before, after)
        want_logits, want = model.step(token, kept)
    assert torch.equal(logits, want_logits)
    for name, tensor in want.tensors().items():
        assert torch.equal(after.tensors()[name], tensor)
        assert torch.equal(before.tensors()[name], kept.tensors()[name])


def test_a_decoder_keeps_the_model_alive_and_no_longer_than_itself():
    """A graph would go on to read where the weights of a model that is gone had been."""
    model, token = small_model(["naju"]), sentences(1, 1)[:, 0]
    decode = GraphedDecoder(model.step, token, model.init_state(1), lambda function: rerun(function().clone))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is not None
    assert decode(token).isfinite().all()
    del decode
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(("new", "kind"), [(graphs.WORTHWHILE - 1, PlainDecoder), (graphs.WORTHWHILE, GraphedDecoder)])
def test_a_short_generation_is_not_captured(new, kind, monkeypatch):
    monkeypatch.setattr(graphs, "graphs_refuse", lambda model, token: None)
    monkeypatch.setattr(graphs, "capture_on_gpu", rerun)
    model = small_model(["naju"])
    assert type(decoder_for(model, model.step, sentences(1, 1)[:, 0], model.init_state(1), new)) is kind


def test_refusals_name_their_reason():
    on_a_gpu = SimpleNamespace(device=torch.device("cuda", 0))
    alone, hybrid = small_model(["naju"]), small_model(HYBRID)
    assert graphs_refuse(alone, sentences(1, 1)[:, 0]) == "tokens are on cpu and graphs are for GPUs"
    assert graphs_refuse(hybrid, on_a_gpu) == "the state of a layer grows with its context"
    assert graphs_refuse(alone, on_a_gpu) == "the tokens are on cuda:0 and not all of the model is"
