"""torch.compile of a whole model in one graph, and torch.export of its step."""

from __future__ import annotations

import warnings

import pytest
import torch
from model_cases import HYBRID, sentences, small_model
from torch import nn
from torch.nn import functional as F

from memories import difference
from naju.models import backbone
from naju.scan import backends


@pytest.fixture(autouse=True)
def forget_compiled_code():
    yield
    torch.compiler.reset()


class Step(nn.Module):
    """Export takes a module and calls its forward."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, token, state):
        return self.model.step(token, state)


def assert_same_results(model, compiled, tokens, *args, **kwargs):
    want, memory = model(tokens, *args, **kwargs)
    got, state = compiled(tokens, *args, **kwargs)
    assert difference(got, want) <= 1e-5
    for name, tensor in memory.tensors().items():
        assert difference(state.tensors()[name], tensor) <= 1e-5, name
    losses = [F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) for logits in (got, want)]
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    for mine, theirs in zip(*gradients, strict=True):
        assert difference(mine, theirs) <= 1e-5


def padding():
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :3] = mask[1, 9:] = 0
    return mask


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_inductor_compiles_one_graph_forward_and_backward():
    model = small_model(["naju"], torch.float32)
    compiled = torch.compile(model, fullgraph=True)
    assert_same_results(model, compiled, sentences(2, 20), attention_mask=padding())


def test_one_graph_of_a_hybrid_with_a_mask_and_a_state():
    model = small_model(HYBRID, torch.float32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    _, state = model.prefill(sentences(2, 6, seed=2))
    assert_same_results(model, compiled, sentences(2, 20), state, attention_mask=padding())


def test_one_graph_of_packed_sequences():
    if (reason := backends()["cpu_compiled"]) is not None:
        pytest.skip(f"the other backends read the boundaries as they run: {reason}")
    model = small_model(["naju"], torch.float32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_results(model, compiled, sentences(1, 20), cu_seqlens=torch.tensor([0, 3, 3, 20]))


def test_one_graph_of_a_step():
    model = small_model(["naju", "coupled"], torch.float32)
    compiled = torch.compile(Step(model), fullgraph=True, backend="aot_eager")
    state = want_state = model.init_state(2)
    with torch.no_grad():
        for token in sentences(2, 4).unbind(1):
            want, want_state = model.step(token, want_state)
            got, state = compiled(token, state)
            assert difference(got, want) <= 1e-6


@pytest.mark.parametrize("layers", [["naju", "coupled"], HYBRID], ids=["recurrent", "hybrid"])
def test_an_exported_step_is_the_step(layers):
    model = small_model(layers, torch.float32)
    _, state = model.prefill(sentences(2, 6, seed=2))
    program = torch.export.export(Step(model), (sentences(2, 1)[:, 0], state))
    steps = 1 if "attention" in layers else 5  # a state that grows fits an exported step once
    want_state = state
    for token in sentences(2, steps).unbind(1):
        want, want_state = model.step(token, want_state)
        got, state = program.module()(token, state)
        assert difference(got, want) <= 1e-6
    for name, tensor in want_state.tensors().items():
        assert difference(state.tensors()[name], tensor) <= 1e-6, name


def test_dynamic_shapes_leave_one_graph():
    model = small_model(["naju", "naju"], torch.float32)
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend="aot_eager")
    for length in (7, 12):
        assert_same_results(model, compiled, sentences(2, length))


def test_an_exported_model_reads_more_than_a_piece():
    model = small_model(["naju"], torch.float32).eval()
    length = torch.export.Dim("length", min=4, max=100_000)
    shapes = {"tokens": {1: length}, "state": None, "attention_mask": None, "cu_seqlens": None}
    with torch.no_grad():
        exported = torch.export.export(model, (sentences(1, 8), None, None, None), dynamic_shapes=shapes)
        tokens = sentences(1, backbone.PIECE + 5)
        assert difference(exported.module()(tokens, None, None, None)[0], model(tokens)[0]) <= 1e-5


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_projections_may_be_quantised(tie_embeddings):
    model = small_model(["naju"], torch.float32, tie_embeddings=tie_embeddings).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of its quantisation
        small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    tokens = sentences(1, 9)
    assert difference(small(tokens)[0], model(tokens)[0]) <= 0.1
    assert small.generate(tokens, 3).shape == (1, 12)
