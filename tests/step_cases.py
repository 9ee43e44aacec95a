"""What the tests of the step kernels share: awkward mixers and states, and the mixer's own step in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memories import unsettle
from naju import NajuMixer
from naju.mixers import build_mixer
from naju.scan.step_operator import StepInputs
from numerics import TOLERANCE, relative_rms

# batch, expand (of 12 channels), d_state, d_conv
SIZES = [(1, 2, 1, 1), (3, 1, 5, 4), (17, 2, 17, 3), (1, 4, 70, 4), (2, 1.5, 130, 2), (66, 3, 64, 4), (5, 1, 256, 4)]


def draw(name: str, batch: int, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[NajuMixer, Tensor, Any]:
    """A mixer without a parameter at its initial value, an input, and a state that no token has made."""
    mixer = build_mixer(name, 12, **options)
    unsettle(mixer)
    mixer.to(dtype)
    assert isinstance(mixer, NajuMixer)
    return mixer, torch.randn(batch, 12).to(dtype), mixer.init_state(batch).map(torch.randn_like)


def assert_step_agrees(
    refuses: Callable[[StepInputs], str | None], mixer: NajuMixer, u: Tensor, state: Any, dtype: torch.dtype
) -> None:
    """A step, which the kernel must not refuse, against float64."""
    with torch.no_grad():
        inputs = mixer._step_inputs(mixer.project_in(u), state)
        assert inputs is not None
        assert refuses(inputs) is None
        out, after = mixer.step(u, state)
        want, want_after = copy.deepcopy(mixer).double().step(u.double(), state.map(Tensor.double))
    got, wanted = {"out": out, **after.tensors()}, {"out": want, **want_after.tensors()}
    for name, tensor in wanted.items():
        assert got[name].shape == tensor.shape
        assert got[name].dtype == (torch.float32 if name == "x" else dtype)
        assert not tensor.numel() or relative_rms(got[name], tensor) <= TOLERANCE[dtype, "forward"], name


def assert_poison_stays(mixer: NajuMixer, u: Tensor, state: Any) -> None:
    """NaN in two of the sequences changes nothing in the others."""
    bad, clean = [3, len(u) - 1], [row for row in range(len(u) - 1) if row != 3]
    with torch.no_grad():
        want, want_after = mixer.step(u, state)
        for tensor in (u, *state.tensors().values()):
            tensor[bad] = math.nan
        got, after = mixer.step(u, state)
    assert torch.equal(got[clean], want[clean])
    assert got[bad].isnan().all()
    for name, tensor in want_after[clean].tensors().items():
        assert torch.equal(after[clean].tensors()[name], tensor)
