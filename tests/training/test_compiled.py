"""Blocks compiled for the recording of a training step: which they are, that they compute the same, and failures."""

from contextlib import nullcontext

import pytest
import torch
from tiny import TokenBeforeLast, config
from torch import nn

from naju import Classifier, ModelConfig
from naju.layers.diagonal_scan import diagonal_scan
from naju.layers.matrix_scan import matrix_scan
from naju.training import FixedSet, Learner, compiled, loop
from naju.training.compiled import blocks_to_compile, compiled_blocks

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script.* is deprecated:DeprecationWarning")


def classifier(*mixers, **options):
    torch.manual_seed(0)
    shape = ModelConfig(vocab_size=4, d_model=8, n_layers=len(mixers), mixer=list(mixers), **options)
    return Classifier(shape, n_classes=4)


@pytest.fixture
def without_inductor(monkeypatch):
    """Traced and differentiated as on a GPU, but run by torch's own operations: no compiler, no wait for it."""
    torch._dynamo.reset()  # one function is compiled for a limited number of modules
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module, **how: compile_module(module, backend="aot_eager", **how))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_blocks_of_torch_operations_are_compiled_and_others_not(bidirectional):
    model = classifier("naju", "retnet", "coupled", "mamba", bidirectional=bidirectional)
    assert blocks_to_compile(model) == [model.backbone.blocks[index] for index in (1, 3)]


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("outside", [[], [matrix_scan, diagonal_scan]])
@pytest.mark.parametrize("mixer", ["mamba2", "retnet", "mlstm", "hgrn", "gla", "rwkv", "mamba"])
def test_a_compiled_step_is_the_plain_one(mixer, outside, monkeypatch):
    """As one graph for both layers, or, where there are public kernels, cut around their scans."""
    monkeypatch.setattr(compiled, "scans_outside", lambda: outside)
    monkeypatch.setattr("naju.layers.matrix_scan.suits_public_kernels", lambda *scan: True)
    settings, losses = config(steps=3, sequences=64), []
    for compiles in (False, True):
        learner, data = Learner(classifier(mixer, mixer), settings), FixedSet(TokenBeforeLast(), settings, "cpu")
        data.shuffle(0)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with compiled_blocks(learner.model) if compiles else nullcontext():
            losses.append([float(learner.learn(*data.batch(learner.steps_done, 0))) for _ in range(3)])
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
        assert graphs > 1 if compiles and outside and mixer != "hgrn" else graphs == compiles
    torch.testing.assert_close(*losses)
    assert all(block._compiled_call_impl is None for block in learner.model.backbone.blocks)


@pytest.mark.usefixtures("without_inductor")
def test_a_scan_that_no_public_kernel_takes_is_not_cut_out(monkeypatch):
    """In float32 they would run torch's operations, and these are worth compiling."""
    monkeypatch.setattr(compiled, "scans_outside", lambda: [matrix_scan])
    model, before = classifier("mamba2"), torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with compiled_blocks(model):
        model(torch.zeros(2, 9, dtype=torch.int64))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 1


def test_what_cannot_be_compiled_is_recorded_as_it_is(monkeypatch):
    settings, notes, tried = config(sequences=64), [], []
    learner, data = Learner(classifier("retnet"), settings), FixedSet(TokenBeforeLast(), settings, "cpu")

    def recorded(steps, state):
        (block,) = learner.model.backbone.blocks
        tried.append(block._compiled_call_impl is not None)
        if tried[-1]:
            raise RuntimeError("\nno compiler here\nand much more")
        return steps

    monkeypatch.setattr("naju.training.execution.recorded", recorded)
    monkeypatch.setattr(learner, "device", torch.device("cuda"))
    _, execution = loop.executables(learner, data, notes.append)
    assert tried == [True, False]
    assert execution == "CUDA graph"
    assert notes == ["no CUDA graph of compiled blocks: no compiler here"]
