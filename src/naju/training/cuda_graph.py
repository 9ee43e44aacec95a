"""A training step as one CUDA graph: hundreds of small launches become one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

WARM_UP = 3


def recorded(step: Callable[[], object], state: Iterable[Tensor]) -> Callable[[], object]:
    """`step` as a graph that is replayed by calling it. `state` names every tensor that a step changes.

    Before a recording every kernel has to have run (to be compiled, tuned, and given its workspace) on a side stream;
    what these runs change is put back after each, so that the first replay is the first step. Recording runs nothing.
    """
    tensors = list(state)
    before = [tensor.clone() for tensor in tensors]
    with torch.cuda.device_of(tensors[0]):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                step()
                _put_back(tensors, before)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    return graph.replay


@torch.no_grad()
def _put_back(tensors: Iterable[Tensor], before: Iterable[Tensor]) -> None:
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(old)
