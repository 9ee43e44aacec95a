"""Which kernels a changed length compiles again: Triton's own keys of every launch, made without a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from naju import NajuMixer
from naju.scan import triton_chunked
from naju.scan.dispatch import check_inputs
from naju.scan.on_gpu import interpreted
from naju.scan.triton_chunked import launch, layer

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(interpreted(), reason="Triton's interpreter is on"),
]

BATCH, D_MODEL = 8, 256
PROCESSORS = 132
LONG = (300, 301, 1000, 4096, 70001)  # each is cut into several segments


@dataclass(frozen=True)
class Address:
    """What Triton sees of a tensor: its precision, and where it lies. Memory of its own begins at an aligned place."""

    dtype: torch.dtype
    place: int

    def data_ptr(self) -> int:
        return self.place


def key_of(kernel: Any, arguments: Iterable[Any], named: dict[str, Any]) -> tuple[str, str]:
    """The kernel's name, and all that tells one compilation of it from another."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import compute_cache_key, create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    _, specialization, options = bind(*map(seen, arguments), **named)
    return kernel.__name__, compute_cache_key({}, specialization, options)


def seen(argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    return Address(argument.dtype, argument.storage_offset() * argument.itemsize)


class Compiled:
    """Runs steps on tensors without memory, and knows which kernels each of them compiles."""

    def __init__(self) -> None:
        self.keys: set[tuple[str, str]] = set()

    def launch(self, kernel: Any, programs: int, tile: launch.Tile, *arguments: Any, **named: Any) -> None:
        options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers}
        self.keys.add(key_of(kernel, arguments, named | options))

    def anew(self, step: Callable[..., None], length: int, packed: int = 0) -> list[str]:
        """The kernels that a step compiles and none before it did, with a name for each time."""
        before = set(self.keys)
        with torch.device("meta"):
            step(length, packed)
        return sorted(name for name, _ in self.keys - before)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    compiled = Compiled()
    monkeypatch.setattr(launch, "launch", compiled.launch)
    monkeypatch.setattr(launch, "_processors", lambda device: PROCESSORS)
    monkeypatch.setattr(launch, "_config_for", lambda h, d_state: launch.configuration(d_state, h.dtype))
    monkeypatch.setattr("naju.mixers.naju.layer_refuses", lambda *arguments: None)
    monkeypatch.setattr("naju.mixers.naju.layer", forward_and_training)
    return compiled


def forward_and_training(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """In place of the fused layer's operator; the output alone is differentiated."""
    layer._forward(*arguments, keep=False)
    y, state, h, kept = layer._forward(*arguments, keep=True)
    layer._backward(torch.empty_like(y), None, None, h, kept, *arguments)
    return y, state, h


def boundaries(packed: int) -> Tensor | None:
    return torch.empty(packed + 1, dtype=torch.int64) if packed else None


def layer_step(length: int, packed: int, carried: bool = False, d_model: int = D_MODEL) -> None:
    mixer = NajuMixer(d_model).to(torch.bfloat16)
    u = torch.empty(1 if packed else BATCH, length, d_model, dtype=torch.bfloat16)
    state = mixer.init_state(packed or BATCH) if carried else None
    mixer(u, state, cu_seqlens=boundaries(packed))


def scan_step(length: int, packed: int) -> None:
    """With every gradient."""
    wide = torch.empty(1 if packed else BATCH, length, 2 * D_MODEL, dtype=torch.bfloat16)
    narrow = torch.empty(*wide.shape[:2], 64, dtype=torch.bfloat16)
    state, D = torch.empty(packed or BATCH, 2 * D_MODEL, 64), torch.empty(2 * D_MODEL)
    options = {"alpha": None, "D": D, "z": wide, "initial_state": state, "cu_seqlens": boundaries(packed)}
    given = check_inputs(wide, wide, wide, narrow, narrow, **options, reverse=False)
    triton_chunked._forward(given, keep=False)
    y, state, kept = triton_chunked._forward(given, keep=True)
    triton_chunked._backward(torch.empty_like(y), torch.empty_like(state), kept, given)


STEPS = {"layer": layer_step, "carried layer": partial(layer_step, carried=True), "scan": scan_step}


@pytest.mark.parametrize("packed", [(0,) * 5, (3, 1, 2, 16, 1000)], ids=["rows", "packed"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_after_a_first_long_sequence_no_length_compiles_anything(
    step: Callable[..., None], packed: tuple[int, ...], compiled: Compiled
) -> None:
    assert compiled.anew(step, LONG[0], packed[0])
    for length, sequences in zip(LONG[1:], packed[1:], strict=True):
        assert compiled.anew(step, length, sequences) == [], length


def test_the_first_sequence_of_several_segments_compiles_what_joins_them(compiled: Compiled) -> None:
    compiled.anew(layer_step, 20)
    assert compiled.anew(layer_step, 64) == ["carry", "carry", "states", "states"]
    assert compiled.anew(layer_step, 20) == []


def test_no_length_compiles_a_kernel_again(compiled: Compiled) -> None:
    """Not even one that is shorter than the convolutions' tail."""
    for length in (20, 64):
        compiled.anew(layer_step, length)
    for length in (1, 2, 3, 15, 16, 17, 63, 5000):
        assert compiled.anew(layer_step, length) == [], length


def test_a_kernel_is_compiled_for_rows_that_are_not_aligned(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys see what Triton sees."""
    compiled.anew(layer_step, 300)
    assert "channel_gradients" in compiled.anew(partial(layer_step, d_model=D_MODEL + 4), 300)
