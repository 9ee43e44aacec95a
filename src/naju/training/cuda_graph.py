"""A training step as one CUDA graph: hundreds of small launches become one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

WARM_UP = 3


def recorded(steps: Sequence[Callable[[], object]], state: Iterable[Tensor]) -> list[Callable[[], object]]:
    """Each step as a graph that is replayed by calling it. `state` names every tensor that a step changes.

    Before a recording every kernel has to have run (to be compiled, tuned, and given its workspace) on a side stream;
    what these runs change is put back after each, so that the first replay is the first step. Recording runs nothing.

    A step leaves nothing behind but its state, so that all of them work in one pool of memory. The last, which has the
    longest sequences where they differ, is recorded first: what the others need then fits into what it has taken.
    """
    tensors = list(state)
    before = [tensor.clone() for tensor in tensors]
    graphs = [torch.cuda.CUDAGraph() for _ in steps]
    with torch.cuda.device_of(tensors[0]):
        pool = torch.cuda.graph_pool_handle()
        for graph, step in zip(reversed(graphs), reversed(steps), strict=True):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    step()
                    _put_back(tensors, before)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph, pool=pool):
                step()
    return [graph.replay for graph in graphs]


@torch.no_grad()
def _put_back(tensors: Iterable[Tensor], before: Iterable[Tensor]) -> None:
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(old)
