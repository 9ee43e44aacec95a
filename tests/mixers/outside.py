"""References that nobody here wrote, and a comparison of two ways to compute one layer."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from numerics import TOLERANCE, relative_rms


def fla_reference(path, name):
    """A naive function of flash-linear-attention, read from its file: importing the package itself needs triton."""
    found = importlib.util.find_spec("fla")
    if found is None:
        pytest.skip("flash-linear-attention is not installed")
    file = Path(found.submodule_search_locations[0]) / "ops" / path
    spec = importlib.util.spec_from_file_location(f"fla_{file.stem}_{file.parent.name}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def assert_same_function(results, wanted, arguments, kind="law"):
    """Two lists of tensors computed from the same arguments agree, and so do the arguments' gradients."""
    dtype = arguments[0].dtype
    cotangents = [torch.randn_like(tensor) for tensor in wanted]
    pairs = [*zip(results, wanted, strict=True)]
    pairs += zip(*(torch.autograd.grad(tensors, arguments, cotangents) for tensors in (results, wanted)), strict=True)
    for mine, theirs in pairs:
        assert relative_rms(mine.detach(), theirs.detach()) <= TOLERANCE[dtype, kind]
