"""Blocks compiled by torch while a training step is recorded on a GPU.

A mixer written in torch is a hundred small operations, each of which reads and writes all of its tensors; compiled,
they become a few kernels. What was recorded stays compiled; an evaluation, of other lengths, runs the module as it is.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from naju.layers.cuts import cuts
from naju.layers.diagonal_scan import diagonal_scan
from naju.layers.matrix_scan import matrix_scan
from naju.mixers.base import Mixer


@contextmanager
def compiled_blocks(model: nn.Module) -> Iterator[None]:
    """Within it, modules that hold a mixer which is worth it run compiled, for the shapes that they first see."""
    blocks = blocks_to_compile(model)
    for block in blocks:
        block.compile(dynamic=False)
    try:
        with compiling():
            yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None


@contextmanager
def compiling() -> Iterator[None]:
    """Within it, blocks that are compiled when they are first called are cut around public kernels."""
    with cuts(*scans_outside()), warnings.catch_warnings():
        # torch's own look at its inputs, while it traces, and its advice; float32 is meant
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
        yield


def scans_outside() -> list[Callable[..., Any]]:
    """Those that have public kernels here, which are faster than what would be compiled of them."""
    scans: dict[str, Callable[..., Any]] = {"fla": matrix_scan, "mamba_ssm": diagonal_scan}
    return [scan for package, scan in scans.items() if importlib.util.find_spec(package) is not None]


def blocks_to_compile(model: nn.Module) -> list[nn.Module]:
    mixers = ((module, getattr(module, "mixer", None)) for module in model.modules())
    return [module for module, mixer in mixers if isinstance(mixer, Mixer) and mixer.worth_compiling]
