"""torch.compile without graph breaks, and torch.export of a step."""

from __future__ import annotations

import io

import pytest
import torch
from mixer_cases import sequence, small_mixer, used_state
from torch import nn

from memories import difference
from naju.mixers import MIXERS, State
from naju.scan import backends

everywhere = pytest.mark.parametrize("name", MIXERS)


@pytest.fixture(autouse=True)
def forget_compiled_code():
    yield
    torch.compiler.reset()


class Step(nn.Module):
    """Export takes a module and calls its forward."""

    def __init__(self, mixer):
        super().__init__()
        self.mixer = mixer

    def forward(self, u, state):
        return self.mixer.step(u, state)


def assert_same_results(mixer, compiled, *args, **kwargs):
    want, memory = mixer(*args, **kwargs)
    got, state = compiled(*args, **kwargs)
    assert difference(got, want) <= 1e-6
    for name, tensor in memory.tensors().items():
        assert difference(state.tensors()[name], tensor) <= 1e-6, name
    gradients = [torch.autograd.grad(out.square().sum(), list(mixer.parameters())) for out in (got, want)]
    for mine, theirs in zip(*gradients, strict=True):
        assert difference(mine, theirs) <= 1e-5


@everywhere
def test_one_graph_forward_and_backward(name):
    mixer = small_mixer(name, torch.float32)
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    assert_same_results(mixer, compiled, sequence(2, 20, torch.float32))


@everywhere
def test_one_graph_with_a_mask_and_a_state(name):
    mixer = small_mixer(name, torch.float32)
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :3] = mask[1, 9:] = 0
    assert_same_results(mixer, compiled, sequence(2, 20, torch.float32), used_state(mixer, 2), attention_mask=mask)


@pytest.mark.parametrize("name", ["naju", "coupled"])
def test_one_graph_for_packed_sequences(name):
    if (reason := backends()["cpu_compiled"]) is not None:
        pytest.skip(f"the other backends read the boundaries as they run: {reason}")
    mixer = small_mixer(name, torch.float32)
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    u = sequence(1, 20, torch.float32)
    for boundaries in ([0, 3, 3, 20], [0, 8, 15, 20]):
        assert_same_results(mixer, compiled, u, cu_seqlens=torch.tensor(boundaries))


def test_other_lengths_need_few_graphs():
    mixer = small_mixer("naju", torch.float32)
    graphs = []

    def counting(graph, example_inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(mixer, fullgraph=True, backend=counting)
    for length in (20, 7, 13, 40, 31):
        u = sequence(2, length, torch.float32)
        assert difference(compiled(u)[0], mixer(u)[0]) <= 1e-6
    assert len(graphs) <= 2


@everywhere
def test_an_exported_step_is_the_step(name):
    mixer = small_mixer(name, torch.float32)
    u = sequence(2, 6, torch.float32)
    state = used_state(mixer, 2)
    program = torch.export.export(Step(mixer), (u[:, 0], state))
    steps = 6 if mixer.state_size is not None else 1  # a state that grows fits an exported step once
    want = got = state
    for u_t in u[:, :steps].unbind(1):
        expected, want = mixer.step(u_t, want)
        out, got = program.module()(u_t, got)
        assert difference(out, expected) <= 1e-6
    assert isinstance(got, State)
    for key, tensor in want.tensors().items():
        assert difference(got.tensors()[key], tensor) <= 1e-6, key


def test_an_exported_step_survives_a_file():
    mixer = small_mixer("naju", torch.float32)
    u, state = sequence(2, 1, torch.float32)[:, 0], used_state(mixer, 2)
    file = io.BytesIO()
    torch.export.save(torch.export.export(Step(mixer), (u, state)), file)
    file.seek(0)
    with torch.serialization.safe_globals([type(state)]):
        loaded = torch.export.load(file)
    assert difference(loaded.module()(u, state)[0], mixer.step(u, state)[0]) <= 1e-6
