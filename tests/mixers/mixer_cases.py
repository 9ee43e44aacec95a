"""Small mixers by name, ways to cut a sequence, and comparisons of what a mixer remembers."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from memories import D_MODEL, SMALL, assert_states_agree, difference, unsettle
from naju.mixers import MIXERS, Mixer, State, build_mixer
from naju.mixers.registry import _options

lengths = st.integers(1, 24)
widths = st.integers(1, 5)
seeds = st.integers(0, 2**16)


def small_mixer(name: str, dtype: torch.dtype = torch.float64, *, seed: int = 0, **options: Any) -> Mixer:
    """The same mixer in any precision, with no parameter at its initial value."""
    torch.manual_seed(seed)
    mixer = build_mixer(name, D_MODEL, **(SMALL.get(name, {}) | options))
    unsettle(mixer)
    return mixer.to(dtype)


def with_width(name: str, width: int) -> dict[str, int]:
    """The option that sets the width of the short convolutions, for mixers that have them."""
    return {"d_conv": width} if "d_conv" in _options(MIXERS[name]) else {}


def sequence(batch: int, length: int, dtype: torch.dtype = torch.float64, *, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, D_MODEL, generator=generator, dtype=torch.float64).to(dtype)


def used_state(mixer: Mixer, batch: int) -> State:
    """The state after a few tokens, different in every row."""
    state: State = mixer(sequence(batch, 5, next(mixer.parameters()).dtype, seed=7))[1]
    return state.detach()


def run_in_pieces(mixer: Mixer, u: Tensor, cuts: list[int], state: State | None = None) -> tuple[Tensor, State]:
    """Forward from cut to cut; cuts outside the sequence are left out."""
    ends = sorted({cut for cut in cuts if 0 < cut < u.shape[1]} | {u.shape[1]})
    outputs = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        out, state = mixer(u[:, start:end], state)
        outputs.append(out)
    assert state is not None
    return torch.cat(outputs, dim=1), state


def run_in_steps(mixer: Mixer, u: Tensor, state: State) -> tuple[Tensor, State]:
    outputs = []
    for u_t in u.unbind(1):
        out, state = mixer.step(u_t, state)
        outputs.append(out)
    return torch.stack(outputs, dim=1), state


def assert_same_memory(mixer: Mixer, got: State, want: State, tolerance: float) -> None:
    """The states read the same future alike; those of a fixed size also agree tensor by tensor.

    A cache that grows with the context may hold padding, so two of them can be the same memory in different shapes.
    """
    probe = sequence(want.batch, 4, next(mixer.parameters()).dtype, seed=3)
    assert difference(mixer(probe, got)[0], mixer(probe, want)[0]) <= tolerance
    if mixer.state_size is not None:
        assert_states_agree(got, want, tolerance)


def assert_untouched(mixer: Mixer, got: State, want: State, tolerance: float) -> None:
    """A sequence without tokens leaves its memory bit for bit; a cache may gain padding, which may move a rounding."""
    if mixer.state_size is None:
        assert_same_memory(mixer, got, want, tolerance)
    else:
        assert_states_agree(got, want, 0.0)
