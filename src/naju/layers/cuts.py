"""Scans with public kernels, which torch.compile cannot trace.

A graph that has to stay whole (`fullgraph=True`) takes torch's own operations in their place. Where `cuts` allows it,
the graph ends before such a scan, which then runs as if nothing were compiled, and another begins after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_outside: dict[str, Callable[..., Any]] = {}


@contextmanager
def cuts(*scans: Callable[..., Any]) -> Iterator[None]:
    """Within it, graphs are cut around these scans."""
    _outside.update({scan.__name__: torch.compiler.disable(scan) for scan in scans})
    try:
        yield
    finally:
        _outside.clear()


def outside(name: str) -> Callable[..., Any] | None:
    """The scan of this name as it runs outside of graphs, where one is being compiled and may be cut here."""
    return _outside.get(name) if torch.compiler.is_compiling() else None
