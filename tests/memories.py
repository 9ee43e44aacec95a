"""What the tests of mixers and of models share: small sizes, the tolerance of a law, comparisons of states."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import settings
from torch import Tensor, nn

from naju.mixers import State
from numerics import TOLERANCE, relative_rms

D_MODEL = 16
# Fewer numbers than the defaults; a mixer that is not named here is tested with its own.
SMALL: dict[str, dict[str, Any]] = {
    "naju": {"d_state": 6},
    "coupled": {"d_state": 6},
    "mamba2": {"d_state": 6, "d_head": 8},
    "gla": {"d_conv": 3},  # plain, it has an empty tail
    "rwkv": {"n_heads": 2},  # in float32 a norm over four channels leaves too few digits for second derivatives
}
LAW_TOLERANCE = {dtype: TOLERANCE[dtype, "law"] for dtype in (torch.float32, torch.float64)}
EXACT = LAW_TOLERANCE[torch.float64]
few_examples = settings(max_examples=15)


def unsettle(module: nn.Module) -> None:
    """Move every parameter off its initial value, so that a wrongly placed one shows."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))


def difference(got: Tensor, want: Tensor) -> float:
    """The error metric, also where nothing is to be measured against: equal tensors, zero or empty, do not differ."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    return 0.0 if torch.equal(got, want) else relative_rms(got.detach(), want.detach())


def assert_states_agree(got: State, want: State, tolerance: float) -> None:
    """The same kind with the same shapes and precisions, and every tensor within the tolerance; 0 means bit for bit."""
    assert type(got) is type(want)
    mine, theirs = got.tensors(), want.tensors()
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert difference(mine[name], tensor) <= tolerance, name


def storage_bytes(state: State) -> int:
    """Memory that the state keeps alive, which for a view is all of the tensor behind it."""
    return sum(tensor.untyped_storage().nbytes() for tensor in state.tensors().values())
