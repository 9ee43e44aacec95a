"""Decoding a token at a time: plainly, or on a GPU as CUDA graphs, which spare the launch of every small kernel.

A step makes its new state in new memory, but a graph works at fixed addresses. Two graphs therefore hand one state back
and forth between two buffers: one reads A and writes B, the other reads B and writes A. Naju's memory x, by far the
largest part, is one tensor in both: every cell of it depends on itself alone, and is written after it was read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from naju.mixers.base import Mixer
from naju.mixers.naju import NajuState
from naju.mixers.state import State
from naju.models.backbone import ModelState
from naju.scan.step_operator import StepInputs
from naju.scan.triton_step import step_into

Step = Callable[[Tensor, ModelState], tuple[Tensor, ModelState]]
Decoder = Callable[[Tensor], Tensor]  # the next token of each sequence, (b,), to the logits after it
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]

WORTHWHILE = 32  # steps; capturing two graphs costs about as much as running that many


class PlainDecoder:
    """Logits after each token, with the state kept between calls."""

    def __init__(self, step: Step, state: ModelState) -> None:
        self._step, self._state = step, state

    def __call__(self, token: Tensor) -> Tensor:
        logits, self._state = self._step(token, self._state)
        return logits


class GraphedDecoder:
    """The same as two graphs. The logits that a call returns are overwritten by the call after the next."""

    @torch.no_grad()
    def __init__(self, step: Step, token: Tensor, state: ModelState, capture: Capture) -> None:
        self._step = step  # keeps the weights, of which the graphs know the addresses only
        self._token = token.clone()
        after = step(token, state)[1].clone()  # has the precisions that a step hands on
        self._buffers = [after, next_buffer(after)]  # likewise
        orders = (self._buffers, self._buffers[::-1])
        self._replays = [capture(partial(step_between, step, self._token, *order)) for order in orders]
        self._buffers[0].restore(state)
        self._turn = 0

    def __call__(self, token: Tensor) -> Tensor:
        self._token.copy_(token)
        logits = self._replays[self._turn]()
        self._turn = 1 - self._turn
        return logits


def decoder_for(model: nn.Module, step: Step, token: Tensor, state: ModelState, steps: int) -> Decoder:
    """A decoder that goes on from `state`, for about `steps` tokens like `token`."""
    if steps < WORTHWHILE or graphs_refuse(model, token) is not None:
        return PlainDecoder(step, state)
    with torch.cuda.device_of(token):
        return GraphedDecoder(step, token, state, capture_on_gpu)


def graphs_refuse(model: nn.Module, token: Tensor) -> str | None:
    """None where the model's step can be captured, or the reason why not as the end of a sentence."""
    if token.device.type != "cuda":
        return f"tokens are on {token.device} and graphs are for GPUs"
    if any(isinstance(module, Mixer) and module.state_size is None for module in model.modules()):
        return "the state of a layer grows with its context"
    if any(parameter.device != token.device for parameter in model.parameters()):
        return f"the tokens are on {token.device} and not all of the model is"
    if torch.is_autocast_enabled("cuda"):
        return "autocast keeps rounded weights that a graph would outlive"
    if torch.cuda.is_current_stream_capturing():
        return "a graph is being captured already"
    return None


def next_buffer(state: ModelState) -> ModelState:
    """Memory for the state after this one: its own, but for what a step may work on where it lies."""

    def after(layer: State) -> State:
        if isinstance(layer, NajuState):
            return replace(layer, u_tail=layer.u_tail.clone(), h_tail=layer.h_tail.clone())
        return layer.clone()

    return ModelState(tuple(map(after, state.layers)))


def step_between(step: Step, token: Tensor, before: ModelState, after: ModelState) -> Tensor:
    """The logits of a step whose new state ends up in the tensors of `after`."""
    with _StateInto(before, after):
        logits, made = step(token, before)
    pairs = zip(after.tensors().values(), made.tensors().values(), strict=True)
    elsewhere = [pair for pair in pairs if pair[0].data_ptr() != pair[1].data_ptr()]
    if elsewhere:
        places, tensors = map(list, zip(*elsewhere, strict=True))
        torch._foreach_copy_(places, tensors)
    return logits


class _StateInto(TorchDispatchMode):
    """Has every step kernel write the state of its layer where it is wanted, which spares a copy of all of it."""

    def __init__(self, before: ModelState, after: ModelState) -> None:
        super().__init__()
        layers = zip(before.layers, after.layers, strict=True)
        self._places = {old.x.data_ptr(): new for old, new in layers if isinstance(old, NajuState)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.naju.triton_step.default:
            return func(*args, **(kwargs or {}))
        inputs = StepInputs(*args)
        place = tuple(self._places[inputs.x.data_ptr()].tensors().values())
        return step_into(inputs, *place), *place


def capture_on_gpu(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Run the function once, so that everything is compiled and allocated, then record it; returns the replay."""
    side = _side_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        result = function()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One for good: torch keeps a workspace for matrix products for every stream that ever made one."""
    return torch.cuda.Stream(device)
