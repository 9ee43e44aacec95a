"""Which kernels run for a scan, over which grid, in which configuration. Nothing here waits for the device."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from naju.scan.operator import Gradients

MOST_D_STATE = 256
PROGRAMS_PER_PROCESSOR = 3
CARRY_BLOCK = 512


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One program's share of a kernel."""

    channels: int
    warps: int = 4
    stages: int = 1
    registers: int | None = None  # at most this many a thread, so that more programs share a processor


CARRY_TILE = Tile(channels=1, stages=3)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The shape of every kernel's work. `chunk` tokens lie between kept states and form a block of the backward."""

    precision: str
    chunk: int
    block: int  # tokens in a step of the forward
    prefetch: bool = False
    leaf: int  # tokens in a leaf of the block's tree; 1 where every decay is to be exact
    states: Tile
    outputs: Tile
    channels: Tile
    keys: Tile


def precision_of(dtype: torch.dtype) -> str:
    """float16 has neither the range for states nor bfloat16 its digits: its products are made in tf32."""
    return {torch.bfloat16: "bf16", torch.float16: "tf32"}.get(dtype, "ieee")


def chunk_length(dtype: torch.dtype) -> int:
    return 32 if precision_of(dtype) == "bf16" else 16


def padded_state(d_state: int) -> int:
    return max(16, 1 << (d_state - 1).bit_length())


def configuration(d_state: int, dtype: torch.dtype) -> Config:
    """A fixed table over d_state and the precision of h. All of it fits the 99 KiB that the smaller chips have."""
    precision, width = precision_of(dtype), padded_state(d_state)
    if precision == "bf16":
        wide = Tile(channels=64, warps=4 if width <= 128 else 8)
        return Config(
            precision=precision,
            chunk=chunk_length(dtype),
            block=16,
            leaf=16,
            states=Tile(channels=64),
            outputs=Tile(channels=64, registers=168) if width <= 64 else wide,
            channels=Tile(channels=64 if width <= 128 else 32),
            keys=Tile(channels=64, warps=4 if width <= 64 else 8),
        )
    tile = Tile(channels=32 if width <= 64 else 16)
    wide = tile if width <= 64 else Tile(channels=32, warps=8)
    return Config(
        precision=precision,
        chunk=chunk_length(dtype),
        block=16,
        leaf=1,
        states=tile,
        outputs=wide if width <= 128 else Tile(channels=16, warps=8),
        channels=wide,
        keys=tile,
    )


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """How the sequences are cut into segments, a program each, and segments into chunks.

    Packed sequences have their tables on the device: how many pieces there are is only bounded here, and programs
    beyond the last one find an owner that does not exist.
    """

    sequences: int
    length: int
    segment: int
    segments: int  # in each sequence, where all are equally long
    chunks: int
    n_segments: int
    n_chunks: int
    tables: dict[str, Tensor] | None

    def segment_tables(self, absent: Tensor) -> list[Tensor]:
        return self._tables(("boundaries", "owners", "firsts", "first_chunks"), absent)

    def chunk_tables(self, absent: Tensor) -> list[Tensor]:
        return self._tables(("boundaries", "chunk_owners", "first_chunks"), absent)

    def _tables(self, names: tuple[str, ...], absent: Tensor) -> list[Tensor]:
        return [absent if self.tables is None else self.tables[name] for name in names]


def cut(h: Tensor, sequences: int, cu_seqlens: Tensor | None, tile: Tile, chunk: int) -> Pieces:
    """As few segments as fill the device, since each costs a state's round trip through memory."""
    batch, length, d_inner = h.shape
    programs = batch * -(-d_inner // tile.channels)
    processors = _processors(h.device)
    wanted = 1 if 2 * programs >= 3 * processors else PROGRAMS_PER_PROCESSOR * processors // programs
    segment = chunk * max(1, -(-length // (max(1, wanted) * chunk)))
    segments, chunks = -(-length // segment), -(-length // chunk)
    if cu_seqlens is None:
        return Pieces(
            sequences=sequences,
            length=length,
            segment=segment,
            segments=segments,
            chunks=chunks,
            n_segments=sequences * segments,
            n_chunks=sequences * chunks,
            tables=None,
        )
    n_segments, n_chunks = length // segment + sequences, length // chunk + sequences
    return Pieces(
        sequences=sequences,
        length=length,
        segment=segment,
        segments=0,
        chunks=0,
        n_segments=n_segments,
        n_chunks=n_chunks,
        tables=_packed_tables(cu_seqlens, segment, n_segments, chunk, n_chunks),
    )


def _packed_tables(cu_seqlens: Tensor, segment: int, n_segments: int, chunk: int, n_chunks: int) -> dict[str, Tensor]:
    lengths = cu_seqlens.diff()
    # an empty sequence still has a segment, which hands its state through
    firsts = F.pad(((lengths + segment - 1) // segment).clamp(min=1).cumsum(0), (1, 0))
    first_chunks = F.pad(((lengths + chunk - 1) // chunk).cumsum(0), (1, 0))
    return {
        "boundaries": cu_seqlens.contiguous(),
        "firsts": firsts,
        "owners": _owners(firsts, n_segments),
        "first_chunks": first_chunks,
        "chunk_owners": _owners(first_chunks, n_chunks),
    }


def _owners(firsts: Tensor, pieces: int) -> Tensor:
    return torch.searchsorted(firsts[1:], torch.arange(pieces, device=firsts.device), right=True)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _config_for(h: Tensor, d_state: int) -> Config:
    config = configuration(d_state, h.dtype)
    if h.device.type == "cuda":
        return config
    return replace(config, precision={"bf16": "rounded"}.get(config.precision, "ieee"))  # in the interpreter


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _rows(tensor: Tensor | None, like: Tensor) -> tuple[Tensor, int]:
    """(b, l, ·) as rows of contiguous channels and the step from row to row; an absent tensor is never read."""
    if tensor is None:
        return like, 0
    rows = tensor.flatten(0, 1)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return rows, rows.stride(0)


def _levels(block: int) -> int:
    return block.bit_length() - 1


def kept_states(h: Tensor, B: Tensor, cu_seqlens: Tensor | None, sequences: int) -> Tensor:
    """Room for the state before every chunk."""
    batch, length, d_inner = h.shape
    chunk = chunk_length(h.dtype)
    chunks = batch * -(-length // chunk) if cu_seqlens is None else length // chunk + sequences
    return h.new_empty(chunks, d_inner, B.shape[2], dtype=_kept_dtype(h.dtype))


def _kept_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32  # float16 has not the range of a state


def _states(
    pieces: Pieces,
    config: Config,
    driven: tuple[Tensor, Tensor, Tensor | None, Tensor],
    entering: Tensor | None,
    ends: Tensor,
    decays_or_kept: Tensor,
    alpha: float,
    reverse: bool,
    adjoint: bool,
) -> None:
    """Run the segments from zero, or (with `entering`) sweep them; `driven`: f_logit, value, its gate, and keys."""
    from naju.scan.triton_chunked import forward as kernels

    d_inner, d_state = ends.shape[1:]
    tile, sweep = config.states, entering is not None
    _launch(
        kernels.states,
        pieces.n_segments * -(-d_inner // tile.channels),
        tile,
        *(part for tensor in driven for part in _rows(tensor, ends)),
        ends if entering is None else entering,
        ends,
        decays_or_kept,
        decays_or_kept,
        *pieces.segment_tables(ends),
        length=pieces.length,
        sequences=pieces.sequences,
        segments=pieces.segments,
        segment=pieces.segment,
        chunks=pieces.chunks,
        alpha=alpha,
        d_inner=d_inner,
        d_state=d_state,
        BLOCK=config.chunk,
        BD=tile.channels,
        BN=padded_state(d_state),
        PRECISION=config.precision,
        SWEEP=sweep,
        ADJOINT=adjoint,
        HAS_GATE=driven[2] is not None,
        REVERSE=reverse,
        PACKED=pieces.tables is not None,
    )


def _entering(
    pieces: Pieces,
    config: Config,
    driven: tuple[Tensor, Tensor, Tensor | None, Tensor],
    initial: Tensor,
    alpha: float,
    reverse: bool,
    adjoint: bool,
) -> Tensor:
    """The state that enters each segment, or (adjoint) the gradient of the one that leaves it."""
    from naju.scan.triton_chunked import forward as kernels

    if pieces.tables is None and pieces.segments == 1:
        return initial
    d_inner, d_state = initial.shape[1:]
    ends = initial.new_empty(pieces.n_segments, d_inner, d_state)
    decays = initial.new_empty(pieces.n_segments, d_inner)
    entering = torch.empty_like(ends)
    _states(pieces, config, driven, None, ends, decays, alpha, reverse, adjoint)
    _launch(
        kernels.carry,
        pieces.sequences * -(-d_inner * d_state // CARRY_BLOCK),
        CARRY_TILE,
        ends,
        decays,
        initial,
        entering,
        pieces.segment_tables(initial)[2],
        segments=pieces.segments,
        d_inner=d_inner,
        d_state=d_state,
        BLOCK=CARRY_BLOCK,
        ADJOINT=adjoint,
        PACKED=pieces.tables is not None,
    )
    return entering


def forward(
    h: Tensor,
    f_logit: Tensor,
    i_logit: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    alpha: float,
    reverse: bool,
    kept: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """y and the final state; fills `kept` where it is given."""
    from naju.scan.triton_chunked import forward as kernels

    d_inner, d_state = h.shape[2], B.shape[2]
    config = _config_for(h, d_state)
    tile = config.outputs
    initial_state = initial_state.contiguous()
    y, final = h.new_empty(h.shape), torch.empty_like(initial_state)
    with _on(h.device):
        pieces = cut(h, len(initial_state), cu_seqlens, tile, config.chunk)
        driven = (f_logit, h, i_logit, B)
        entering = _entering(pieces, config, driven, initial_state, 1.0, reverse, adjoint=False)
        _launch(
            kernels.outputs,
            pieces.n_segments * -(-d_inner // tile.channels),
            tile,
            *(part for tensor in (h, f_logit, i_logit, z, B, C) for part in _rows(tensor, h)),
            h if D is None else D.contiguous(),
            entering,
            y,
            final,
            h if kept is None else kept,
            *pieces.segment_tables(h),
            length=pieces.length,
            sequences=pieces.sequences,
            segments=pieces.segments,
            segment=pieces.segment,
            chunks=pieces.chunks,
            alpha=alpha,
            d_inner=d_inner,
            d_state=d_state,
            CHUNK=config.chunk,
            BLOCK=config.block,
            LEVELS=_levels(config.block),
            LEAF=config.leaf,
            BD=tile.channels,
            BN=padded_state(d_state),
            PRECISION=config.precision,
            HAS_D=D is not None,
            HAS_Z=z is not None,
            KEEP=kept is not None,
            PREFETCH=config.prefetch,
            REVERSE=reverse,
            PACKED=cu_seqlens is not None,
        )
    return y, final


def backward(
    dy: Tensor,
    dstate: Tensor,
    kept: Tensor,
    h: Tensor,
    f_logit: Tensor,
    i_logit: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    alpha: float,
    reverse: bool,
) -> Gradients:
    """The gradient of the state after every chunk first, then what remains is one chunk's business."""
    from naju.scan.triton_chunked import backward as kernels

    d_inner, d_state = h.shape[2], B.shape[2]
    config = _config_for(h, d_state)
    dh, df_logit, di_logit, dB, dC = (tensor.new_empty(tensor.shape) for tensor in (h, f_logit, i_logit, B, C))
    dz = h.new_empty(0) if z is None else z.new_empty(z.shape)
    dinitial, adjoints = initial_state.new_empty(initial_state.shape), torch.empty_like(kept)
    with _on(h.device):
        pieces = cut(h, len(initial_state), cu_seqlens, config.states, config.chunk)
        driven = (f_logit, dy, z, C)
        leaving = _entering(pieces, config, driven, dstate.contiguous(), alpha, reverse, adjoint=True)
        _states(pieces, config, driven, leaving, dinitial, adjoints, alpha, reverse, adjoint=True)
        # chunks that a packed batch only might have are skipped, and their rows must be zero
        dD = h.new_zeros(pieces.n_chunks if D is not None else 0, d_inner, dtype=torch.float32)
        inputs = [part for tensor in (dy, h, f_logit, i_logit, z, B, C) for part in _rows(tensor, h)]
        shared = {
            "length": pieces.length,
            "sequences": pieces.sequences,
            "chunks": pieces.chunks,
            "alpha": alpha,
            "d_inner": d_inner,
            "d_state": d_state,
            "BLOCK": config.chunk,
            "LEVELS": _levels(config.chunk),
            "LEAF": config.leaf,
            "BN": padded_state(d_state),
            "PRECISION": config.precision,
            "HAS_Z": z is not None,
            "REVERSE": reverse,
            "PACKED": cu_seqlens is not None,
        }
        _launch(
            kernels.channel_gradients,
            pieces.n_chunks * -(-d_inner // config.channels.channels),
            config.channels,
            *inputs,
            h if D is None else D.contiguous(),
            *(kept, adjoints, dh, df_logit, di_logit, dz, dD),
            *pieces.chunk_tables(h),
            BD=config.channels.channels,
            HAS_D=D is not None,
            **shared,
        )
        _launch(
            kernels.key_gradients,
            pieces.n_chunks,
            config.keys,
            *inputs,
            *(kept, adjoints, dB, dC),
            *pieces.chunk_tables(h),
            BD=config.keys.channels,
            **shared,
        )
    return dh, df_logit, di_logit, dB, dC, h.new_empty(0) if D is None else dD.sum(0).to(D.dtype), dz, dinitial


def _launch(kernel: Any, programs: int, tile: Tile, *arguments: Any, **named: Any) -> None:
    options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
    if tile.registers is not None:
        options["maxnreg"] = tile.registers
    kernel[(programs,)](*arguments, **named, **options)
