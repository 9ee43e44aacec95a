"""The decoding step as a graph: any number of sequences, a past of any length, the plain model's numbers."""

from __future__ import annotations

import pytest
import torch

from memories import LAW_TOLERANCE, SMALL, difference, unsettle
from naju import LanguageModel, ModelConfig
from naju.lm.export import ExportConfig, run_export
from naju.lm.folder import save_model
from naju.lm.step import export_step, save_onnx
from naju.mixers import MIXERS, State

TOLERANCE = LAW_TOLERANCE[torch.float32]
VOCABULARY = 11


def model_of(*mixers):
    options = {name: SMALL[name] for name in mixers if name in SMALL}
    model = LanguageModel(ModelConfig(VOCABULARY, 16, len(mixers), mixers, options, embedding_std=1.0))
    unsettle(model)
    return model.eval()


def assert_steps_agree(step, model, batch):
    """`step` takes a token and named tensors and returns logits and new ones; both go on from their own states."""
    want, state = model.init_state(batch), model.init_state(batch).tensors()
    for _ in range(4):
        token = torch.randint(VOCABULARY, (batch,))
        with torch.no_grad():
            logits, want = model.step(token, want)
        found, state = step(token, state)
        assert difference(found, logits) <= TOLERANCE
        for name, tensor in want.tensors().items():
            assert difference(state[name], tensor) <= TOLERANCE, name


def through(program):
    run = program.module()

    def step(token, state):
        with torch.no_grad():
            logits, *after = run(token, *state.values())
        return logits, dict(zip(state, after, strict=True))

    return step


@pytest.mark.parametrize("mixer", MIXERS)
def test_an_exported_step_is_the_step(mixer):
    model = model_of(mixer)
    program = export_step(model)
    own = [node for node in program.graph.nodes if "naju" in str(node.target) and node.op == "call_function"]
    assert not own, "the graph needs operators of this library"
    state = model(torch.randint(VOCABULARY, (3, 5)))[1]  # a past that a growing state can begin with
    token = torch.randint(VOCABULARY, (3,))
    found, after = through(program)(token, {name: t.contiguous() for name, t in state.tensors().items()})
    logits, want = model.step(token, state)
    assert difference(found, logits.detach()) <= TOLERANCE
    for name, tensor in want.tensors().items():
        assert difference(after[name], tensor.detach()) <= TOLERANCE, name


def through_onnx(path):
    import onnxruntime

    session = onnxruntime.InferenceSession(path)

    def step(token, state):
        arrays = {name: tensor.numpy() for name, tensor in state.items()}
        names = ["logits", *(f"next.{name}" for name in state)]
        logits, *after = map(torch.from_numpy, session.run(names, {"token": token.numpy(), **arrays}))
        return logits, dict(zip(state, after, strict=True))

    return step


def test_onnxruntime_decodes_as_torch_does(tmp_path):
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=f"ONNX needs {name}")
    model = model_of("naju", "attention")
    save_model(model, tmp_path / "plain")
    run_export(ExportConfig(model=tmp_path / "plain", out=tmp_path / "onnx", to="onnx"))
    step = through_onnx(tmp_path / "onnx" / "step.onnx")
    for batch in (1, 3):
        assert_steps_agree(step, model, batch)
    first = State.load(tmp_path / "onnx" / "state.safetensors")
    assert first.tensors().keys() == model.init_state(1).tensors().keys()


def test_without_onnx_the_refusal_names_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("naju.lm.step.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="writing ONNX needs onnx and onnxscript"):
        save_onnx(model_of("naju"), tmp_path / "step.onnx")
