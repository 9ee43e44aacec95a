"""Decoding on a GPU: the step kernel against the mixer's step in float64, and generation through CUDA graphs."""

from __future__ import annotations

import copy
import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from memories import unsettle
from naju import LanguageModel, ModelConfig, NajuMixer
from naju.models import graphs
from naju.scan.triton_step import step_refuses
from numerics import TOLERANCE, relative_rms

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BATCHES = (1, 3, 64)
SIZES = [(16, 1, 1), (96, 16, 4), (520, 64, 4), (96, 128, 1), (520, 128, 4)]  # d_inner, d_state, d_conv: each compiles


@pytest.fixture(autouse=True)
def _no_rounded_truth() -> Any:
    """Products of float32 matrices in full precision, also around the kernel."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def draw(batch: int, dtype: torch.dtype, d_inner: int, d_state: int, d_conv: int) -> tuple[NajuMixer, Tensor, Any]:
    mixer = NajuMixer(d_inner // 2, d_state=d_state, d_conv=d_conv).cuda()
    unsettle(mixer)
    with torch.no_grad():
        for parameter in mixer.parameters():  # keep the logits of wide layers in the range of narrow ones
            parameter.mul_(min(1.0, (16 / parameter.shape[-1]) ** 0.5) if parameter.dim() == 2 else 1.0)
    mixer.to(dtype)
    u = torch.randn(batch, d_inner // 2, device="cuda").to(dtype)
    return mixer, u, mixer.init_state(batch).map(torch.randn_like)


def by_kernel(mixer: NajuMixer, u: Tensor, state: Any) -> dict[str, Tensor]:
    with torch.no_grad():
        inputs = mixer._step_inputs(mixer.project_in(u), state)
        assert inputs is not None
        assert step_refuses(inputs) is None
        out, after = mixer.step(u, state)
    return {"out": out, **after.tensors()}


def in_float64(mixer: NajuMixer, u: Tensor, state: Any) -> dict[str, Tensor]:
    with torch.no_grad():
        out, after = copy.deepcopy(mixer).double().step(u.double(), state.map(Tensor.double))
    return {"out": out, **after.tensors()}


@pytest.mark.parametrize("batch", [*BATCHES, 17, 1024])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_agrees_with_float64(dtype: torch.dtype, batch: int) -> None:
    for size in SIZES if batch in BATCHES else SIZES[-1:]:
        mixer, u, state = draw(batch, dtype, *size)
        got, want = by_kernel(mixer, u, state), in_float64(mixer, u, state)
        for name, tensor in want.items():
            assert got[name].isfinite().all(), (size, name)
            if tensor.numel():
                assert relative_rms(got[name], tensor) <= TOLERANCE[dtype, "forward"], (size, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_poisoned_neighbour_changes_nothing(dtype: torch.dtype) -> None:
    mixer, u, state = draw(40, dtype, 96, 64, 4)
    want = by_kernel(mixer, u, state)
    bad, clean = [3, 39], [row for row in range(40) if row not in (3, 39)]
    for tensor in (u, *state.tensors().values()):
        tensor[bad] = math.nan
    got = by_kernel(mixer, u, state)
    assert all(torch.equal(got[name][clean], tensor[clean]) for name, tensor in want.items())
    assert got["out"][bad].isnan().all()


def test_under_autocast() -> None:
    mixer, u, state = draw(3, torch.float32, 96, 64, 4)
    with torch.autocast("cuda", torch.bfloat16):
        got = by_kernel(mixer, u, state)
    assert (got["x"].dtype, got["h_tail"].dtype) == (torch.float32, torch.bfloat16)
    for name, tensor in in_float64(mixer, u, state).items():
        assert relative_rms(got[name], tensor) <= TOLERANCE[torch.bfloat16, "forward"], name


def test_two_hundred_steps_are_one_forward() -> None:
    mixer, _, state = draw(2, torch.float32, 96, 64, 4)
    u = torch.randn(2, 200, 48, device="cuda")
    with torch.no_grad():
        want, want_after = mixer(u, state)
        outs = []
        for u_t in u.unbind(1):
            out, state = mixer.step(u_t, state)
            outs.append(out)
    assert relative_rms(torch.stack(outs, dim=1), want) <= TOLERANCE[torch.float32, "law"]
    for name, tensor in want_after.tensors().items():
        assert relative_rms(state.tensors()[name], tensor) <= TOLERANCE[torch.float32, "law"], name


def model_of(layers: list[str], dtype: torch.dtype = torch.float32) -> LanguageModel:
    options = {name: {"d_state": 16} for name in layers if name != "attention"}
    config = ModelConfig(
        vocab_size=61, d_model=32, n_layers=len(layers), mixer=layers, mixer_options=options, embedding_std=1.0
    )
    model = LanguageModel(config).cuda()
    unsettle(model)
    return model.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("setting", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 3}], ids=["greedy", "sampled"])
def test_graphed_generation_is_the_same(
    setting: dict[str, Any], batch: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(["naju", "coupled", "naju"], dtype)
    tokens = torch.randint(61, (batch, 7), device="cuda")
    captured = []
    capture = graphs.capture_on_gpu
    monkeypatch.setattr(graphs, "capture_on_gpu", lambda function: captured.append(function) or capture(function))
    graphed = model.generate(tokens, 2 * graphs.WORTHWHILE, **setting)
    assert len(captured) == 2
    monkeypatch.setattr(graphs, "WORTHWHILE", 10**6)
    assert torch.equal(graphed, model.generate(tokens, graphed.shape[1] - 7, **setting))
    assert len(captured) == 2


def test_new_weights_are_used_by_the_next_generation() -> None:
    model, other = model_of(["naju"]), model_of(["naju"])
    tokens = torch.randint(61, (2, 7), device="cuda")
    first = model.generate(tokens, 40)
    model.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(model.generate(tokens, 40), other.generate(tokens, 40))
    assert not torch.equal(first, other.generate(tokens, 40))


@pytest.mark.parametrize("layers", [["naju", "attention"], ["attention"]], ids=str)
def test_a_growing_state_is_not_captured(layers: list[str]) -> None:
    model, tokens = model_of(layers), torch.randint(61, (2, 7), device="cuda")
    assert graphs.graphs_refuse(model, tokens[:, 0]) == "the state of a layer grows with its context"
    assert model.generate(tokens, 40).shape == (2, 47)


def test_what_else_is_not_captured() -> None:
    model, token = model_of(["naju"]), torch.zeros(1, dtype=torch.long, device="cuda")
    assert graphs.graphs_refuse(model, token) is None
    with torch.autocast("cuda", torch.bfloat16):
        assert graphs.graphs_refuse(model, token) == "autocast keeps rounded weights that a graph would outlive"
    model.backbone.norm.cpu()
    assert graphs.graphs_refuse(model, token) == "the tokens are on cuda:0 and not all of the model is"


def test_nothing_is_left_when_generation_ends() -> None:
    model, tokens = model_of(["naju", "naju"]), torch.randint(61, (64, 7), device="cuda")

    def allocated() -> int:
        model.generate(tokens, 40)
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    allocated()
    assert len({allocated() for _ in range(3)}) == 1
