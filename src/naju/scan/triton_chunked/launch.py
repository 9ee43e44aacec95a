"""Which kernels run for a scan, over which grid, in which configuration. Nothing here waits for the device."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from naju.scan.dispatch import boundaries_on

MOST_WIDTH = 16  # of a convolution: a tail fits into the smallest chunk
BLOCK = 16  # tokens in a step of the sweeps
CARRY_BLOCK = 512
MOST_CHUNKS_OF_WALK = 8


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One program's share of a kernel."""

    channels: int
    warps: int = 4
    stages: int = 1
    registers: int | None = None  # at most this many a thread, so that more programs share a processor
    programs: int = 3  # for each processor, as a goal: segments and walks are cut to make that many
    step: int = 4  # tokens that a walk loads at once


CARRY_TILE = Tile(channels=1, stages=3)
LOGARITHMS_TILE = Tile(channels=128, warps=8)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The shape of every kernel's work. A chunk has one block or more; the state before every block can be kept."""

    precision: str
    chunk: int  # tokens in a step of the kernels that do not sweep
    leaf: int  # tokens in a leaf of the block's tree; 1 where every decay is to be exact
    states: Tile
    outputs: Tile
    outputs_keeping: Tile  # where the states before every block are kept for the backward
    channels: Tile
    keys: Tile
    convolution: Tile = Tile(channels=128, warps=1, registers=64, programs=32)
    convolution_backward: Tile = Tile(channels=512, warps=4, registers=144)
    gates: Tile = Tile(channels=128, warps=1, registers=128, programs=16)
    gates_backward: Tile = Tile(channels=64, warps=1, registers=136, programs=16)


def precision_of(dtype: torch.dtype) -> str:
    """float16 has neither the range for states nor bfloat16 its digits: its products are made in tf32."""
    return {torch.bfloat16: "bf16", torch.float16: "tf32"}.get(dtype, "ieee")


def chunk_length(dtype: torch.dtype) -> int:
    return 32 if precision_of(dtype) == "bf16" else 16


def padded_state(d_state: int) -> int:
    return max(16, 1 << (d_state - 1).bit_length())


@functools.cache
def configuration(d_state: int, dtype: torch.dtype) -> Config:
    """A fixed table over d_state and the precision of h. All of it fits the 99 KiB that the smaller chips have."""
    precision, width = precision_of(dtype), padded_state(d_state)
    if precision == "bf16":
        wide = Tile(channels=64, warps=4 if width <= 128 else 8)
        return Config(
            precision=precision,
            chunk=chunk_length(dtype),
            leaf=16,
            states=Tile(channels=64, stages=2),
            outputs=Tile(channels=64, stages=3, registers=128, programs=4) if width <= 64 else wide,
            outputs_keeping=Tile(channels=64, stages=3, registers=168, programs=3) if width <= 64 else wide,
            channels=Tile(channels=64 if width <= 128 else 32, stages=3 if width <= 64 else 1, programs=4),
            keys=Tile(channels=32, warps=2, stages=3) if width <= 64 else Tile(channels=64, warps=8),
        )
    tile = Tile(channels=32 if width <= 64 else 16)
    wide = tile if width <= 64 else Tile(channels=32, warps=8)
    outputs = wide if width <= 128 else Tile(channels=16, warps=8)
    return Config(
        precision=precision,
        chunk=chunk_length(dtype),
        leaf=1,
        states=tile,
        outputs=outputs,
        outputs_keeping=outputs,
        channels=outputs,
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
    wanted = 1 if 2 * programs >= 3 * processors else tile.programs * processors // programs
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
    boundaries = _within(boundaries_on(h.device, cu_seqlens), length)
    return Pieces(
        sequences=sequences,
        length=length,
        segment=segment,
        segments=0,
        chunks=0,
        n_segments=n_segments,
        n_chunks=n_chunks,
        tables=_packed_tables(boundaries, segment, n_segments, chunk, n_chunks),
    )


def _within(cu_seqlens: Tensor, length: int) -> Tensor:
    """As it is where it is right; where it is not, which only the device knows, nothing outside of a tensor is read."""
    return cu_seqlens.clamp(0, length).cummax(0).values


def _packed_tables(cu_seqlens: Tensor, segment: int, n_segments: int, chunk: int, n_chunks: int) -> dict[str, Tensor]:
    lengths = cu_seqlens.diff()
    # an empty sequence still has a segment, which hands its state through
    firsts = F.pad(((lengths + segment - 1) // segment).clamp(min=1).cumsum(0), (1, 0))
    first_chunks = F.pad(((lengths + chunk - 1) // chunk).cumsum(0), (1, 0))
    return {
        "boundaries": cu_seqlens,
        "firsts": firsts,
        "owners": _owners(firsts, n_segments),
        "first_chunks": first_chunks,
        "chunk_owners": _owners(first_chunks, n_chunks),
    }


def _owners(firsts: Tensor, pieces: int) -> Tensor:
    return torch.searchsorted(firsts[1:], torch.arange(pieces, device=firsts.device), right=True)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _config_for(h: Tensor, d_state: int) -> Config:
    config = configuration(d_state, h.dtype)
    if h.device.type == "cuda":
        return config
    return replace(config, precision={"bf16": "rounded"}.get(config.precision, "ieee"))  # in the interpreter


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def rows_of(tensor: Tensor | None, like: Tensor) -> tuple[Tensor, int]:
    """(b, l, ·) as rows of contiguous channels and the step from row to row; an absent tensor is never read."""
    if tensor is None:
        return like, 0
    batch, row, channel = tensor.stride()
    if channel != 1 or (batch != tensor.shape[1] * row and tensor.shape[0] > 1):
        return tensor.contiguous(), tensor.shape[2]  # the stride of an axis of length 1 can be any
    return tensor, row


def _levels(block: int) -> int:
    return block.bit_length() - 1


def kept_states(h: Tensor, d_state: int, cu_seqlens: Tensor | None) -> Tensor:
    """Room for the state before every block."""
    batch, length, d_inner = h.shape
    chunk = chunk_length(h.dtype)
    chunks = batch * -(-length // chunk) if cu_seqlens is None else length // chunk + cu_seqlens.shape[0] - 1
    return h.new_empty(chunks * (chunk // BLOCK), d_inner, d_state, dtype=_kept_dtype(h.dtype))


def _kept_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32  # float16 has not the range of a state


def gate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Gates are kept as logarithms, in as many bytes as the rest."""
    return torch.float32 if dtype == torch.float32 else torch.float16


@dataclass(frozen=True, kw_only=True)
class Drive:
    """What the sweeps read: everything (b, l, ·), gates as logarithms. Rows may lie apart, channels may not."""

    h: Tensor
    log_f: Tensor
    log_i: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    alpha: float
    reverse: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A configuration and the pieces it cuts the sequences of one call into."""

    config: Config
    pieces: Pieces
    d_inner: int
    d_state: int
    processors: int


def plan(h: Tensor, d_state: int, cu_seqlens: Tensor | None, *, keep: bool = False, backward: bool = False) -> Plan:
    """For a forward, which may keep what a backward needs, or for a backward."""
    config = _config_for(h, d_state)
    if keep:
        config = replace(config, outputs=config.outputs_keeping)
    sequences = h.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    pieces = cut(h, sequences, cu_seqlens, config.channels if backward else config.outputs, config.chunk)
    return Plan(config=config, pieces=pieces, d_inner=h.shape[2], d_state=d_state, processors=_processors(h.device))


def gates(f_logit: Tensor, i_logit: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """log2 of both gates, from their finished logits."""
    from naju.scan.triton_chunked import gates as kernels

    config = _config_for(h, 1)
    log_f, log_i = (h.new_empty(h.shape, dtype=gate_dtype(h.dtype)) for _ in range(2))
    rows, d_inner = h.shape[0] * h.shape[1], h.shape[2]
    launch(
        kernels.gates,
        -(-rows // config.chunk) * -(-d_inner // LOGARITHMS_TILE.channels),
        LOGARITHMS_TILE,
        *(part for tensor in (f_logit, i_logit) for part in rows_of(tensor, h)),
        log_f,
        log_i,
        rows_in_all=rows,
        d_inner=d_inner,
        BLOCK=config.chunk,
        BD=LOGARITHMS_TILE.channels,
        PRECISION=config.precision,
    )
    return log_f, log_i


def _entering(plan: Plan, drive: Drive, dy: Tensor | None, initial: Tensor | None) -> Tensor | None:
    """The state that enters each segment, or, with dy, the gradient of the one that leaves it."""
    from naju.scan.triton_chunked import forward as kernels

    pieces, tile, h = plan.pieces, plan.config.states, drive.h
    if pieces.tables is None and pieces.segments == 1:
        return initial
    ends = h.new_empty(pieces.n_segments, plan.d_inner, plan.d_state, dtype=torch.float32)
    decays = ends.new_empty(pieces.n_segments, plan.d_inner)
    entering = torch.empty_like(ends)
    value, gate, keys = (h, drive.log_i, drive.B) if dy is None else (dy, drive.z, drive.C)
    adjoint, packed = dy is not None, pieces.tables is not None
    launch(
        kernels.states,
        pieces.n_segments * -(-plan.d_inner // tile.channels),
        tile,
        *(part for tensor in (drive.log_f, value, gate, keys) for part in rows_of(tensor, h)),
        ends,
        decays,
        *pieces.segment_tables(ends)[:3],
        length=pieces.length,
        sequences=pieces.sequences,
        segments=pieces.segments,
        segment=pieces.segment,
        alpha=drive.alpha,
        d_inner=plan.d_inner,
        d_state=plan.d_state,
        BLOCK=plan.config.chunk,
        BD=tile.channels,
        BN=padded_state(plan.d_state),
        PRECISION=plan.config.precision,
        ADJOINT=adjoint,
        HAS_GATE=gate is not None,
        REVERSE=drive.reverse,
        PACKED=packed,
    )
    launch(
        kernels.carry,
        pieces.sequences * -(-plan.d_inner * plan.d_state // CARRY_BLOCK),
        CARRY_TILE,
        ends,
        decays,
        initial,
        entering,
        pieces.segment_tables(ends)[2],
        segments=pieces.segments,
        d_inner=plan.d_inner,
        d_state=plan.d_state,
        BLOCK=CARRY_BLOCK,
        ADJOINT=adjoint,
        PACKED=packed,
    )
    return entering


def _sweep(plan: Plan, drive: Drive, tile: Tile) -> dict[str, Any]:
    """The named arguments of both kernels that sweep the segments."""
    pieces, config = plan.pieces, plan.config
    return {
        "length": pieces.length,
        "sequences": pieces.sequences,
        "segments": pieces.segments,
        "segment": pieces.segment,
        "chunks": pieces.chunks,
        "alpha": drive.alpha,
        "d_inner": plan.d_inner,
        "d_state": plan.d_state,
        "CHUNK": config.chunk,
        "BLOCK": BLOCK,
        "LEVELS": _levels(BLOCK),
        "LEAF": config.leaf,
        "BD": tile.channels,
        "BN": padded_state(plan.d_state),
        "PRECISION": config.precision,
        "HAS_D": drive.D is not None,
        "HAS_Z": drive.z is not None,
        "REVERSE": drive.reverse,
        "PACKED": pieces.tables is not None,
    }


def forward(plan: Plan, drive: Drive, initial: Tensor | None, kept: Tensor | None, y: Tensor) -> Tensor:
    """Fills y, which may take the place of log_f, and `kept` where it is given; returns the final state.

    Without `initial` every sequence starts from zero.
    """
    from naju.scan.triton_chunked import forward as kernels

    h, tile = drive.h, plan.config.outputs
    initial = None if initial is None else initial.contiguous()
    final = h.new_empty(plan.pieces.sequences, plan.d_inner, plan.d_state, dtype=torch.float32)
    entering = _entering(plan, drive, None, initial)
    launch(
        kernels.outputs,
        plan.pieces.n_segments * -(-plan.d_inner // tile.channels),
        tile,
        *_inputs(drive),
        *(final if entering is None else entering, *rows_of(y, h), final, h if kept is None else kept),
        *plan.pieces.segment_tables(h),
        carried=int(entering is not None),
        KEEP=kept is not None,
        **_sweep(plan, drive, tile),
    )
    return final


def _inputs(drive: Drive) -> list[Any]:
    tensors = (drive.h, drive.log_f, drive.log_i, drive.z, drive.B, drive.C)
    rows = [part for tensor in tensors for part in rows_of(tensor, drive.h)]
    return [*rows, drive.h if drive.D is None else drive.D.contiguous()]


@dataclass(frozen=True, kw_only=True)
class DriveGradients:
    """Room for the gradients of the tensors of a `Drive`, by the finished logits in place of the gates."""

    h: Tensor
    f_logit: Tensor
    i_logit: Tensor
    B: Tensor
    C: Tensor
    z: Tensor | None


def backward(
    plan: Plan,
    drive: Drive,
    kept: Tensor,
    dy: Tensor,
    dstate: Tensor | None,
    gradients: DriveGradients,
    dinitial: Tensor | None,
) -> Tensor:
    """Fills `gradients` and `dinitial` where it is given; returns the gradient of D, empty without one."""
    from naju.scan.triton_chunked import backward as kernels

    h, pieces, tile = drive.h, plan.pieces, plan.config.channels
    adjoints = kept.new_empty(pieces.n_chunks, *kept.shape[1:])
    dstate = None if dstate is None else dstate.contiguous()
    leaving = _entering(plan, drive, dy, dstate)
    dD = h.new_empty(pieces.n_segments if drive.D is not None else 0, plan.d_inner, dtype=torch.float32)
    if pieces.tables is not None:
        dD.zero_()  # segments that a packed batch only might have are skipped
    channel_gradients = (gradients.h, gradients.f_logit, gradients.i_logit, gradients.z)
    launch(
        kernels.channel_gradients,
        pieces.n_segments * -(-plan.d_inner // tile.channels),
        tile,
        *rows_of(dy, h),
        *_inputs(drive),
        *(kept, dD if leaving is None else leaving, adjoints),
        *(part for tensor in channel_gradients for part in rows_of(tensor, h)),
        *(dD, dinitial),
        *pieces.segment_tables(h),
        carried=int(leaving is not None),
        **_sweep(plan, drive, tile),
    )
    tile = plan.config.keys
    launch(
        kernels.key_gradients,
        pieces.n_chunks,
        tile,
        *rows_of(dy, h),
        *_inputs(drive)[:-1],
        *(kept, adjoints),
        *(part for tensor in (gradients.B, gradients.C) for part in rows_of(tensor, h)),
        *pieces.chunk_tables(h),
        length=pieces.length,
        sequences=pieces.sequences,
        chunks=pieces.chunks,
        alpha=drive.alpha,
        d_inner=plan.d_inner,
        d_state=plan.d_state,
        KEPT=plan.config.chunk // BLOCK,
        BLOCK=plan.config.chunk,
        LEVELS=_levels(plan.config.chunk),
        LEAF=plan.config.leaf,
        BD=tile.channels,
        BN=padded_state(plan.d_state),
        PRECISION=plan.config.precision,
        HAS_Z=drive.z is not None,
        REVERSE=drive.reverse,
        PACKED=pieces.tables is not None,
    )
    return dD.sum(0)


def _walk(plan: Plan, kernel: Any, tile: Tile, *arguments: Any, **constants: Any) -> None:
    """A kernel that treats every channel alone and walks time."""
    pieces, chunks = plan.pieces, _chunks_of_walk(plan, tile)
    launch(
        kernel,
        -(-pieces.n_chunks // chunks) * -(-plan.d_inner // tile.channels),
        tile,
        *arguments,
        length=pieces.length,
        sequences=pieces.sequences,
        chunks=pieces.chunks,
        walk=chunks,
        d_inner=plan.d_inner,
        CHUNK=plan.config.chunk,
        STEP=tile.step,
        BD=tile.channels,
        PACKED=pieces.tables is not None,
        **constants,
    )


def _chunks_of_walk(plan: Plan, tile: Tile) -> int:
    """As few as make the programs run all at once: where a walk begins, some rows are read once more."""
    programs = plan.pieces.n_chunks * -(-plan.d_inner // tile.channels)
    return max(1, min(MOST_CHUNKS_OF_WALK, -(-programs // (tile.programs * plan.processors))))


def convolve_silu(plan: Plan, u: Tensor, tail: Tensor | None, weight: Tensor, bias: Tensor, out: Tensor) -> None:
    from naju.scan.triton_chunked import gates as kernels

    tensors = (
        *rows_of(u, out),
        _contiguous(tail),
        weight.contiguous(),
        bias.contiguous(),
        out,
        *plan.pieces.chunk_tables(out),
    )
    _walk(
        plan,
        kernels.convolve_silu,
        plan.config.convolution,
        *tensors,
        WIDTH=weight.shape[1],
        PRECISION=plan.config.precision,
    )


def convolve_silu_backward(
    plan: Plan, dout: Tensor, u: Tensor, tail: Tensor | None, weight: Tensor, bias: Tensor, du: Tensor
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Fills du; returns the gradients of tail, bias and weight."""
    from naju.scan.triton_chunked import gates as kernels

    width, tile = weight.shape[1], plan.config.convolution_backward
    dtail, partial = _empty_tail(tail), _partial(plan, tile, dout, 1 + width)
    inputs = (dout, *rows_of(u, dout), _contiguous(tail), weight.contiguous(), bias.contiguous())
    outputs = (*rows_of(du, dout), dtail, partial, *plan.pieces.chunk_tables(dout))
    precision = plan.config.precision
    _walk(plan, kernels.convolve_silu_backward, tile, *inputs, *outputs, WIDTH=width, PRECISION=precision)
    return dtail, *_bias_and_taps(partial.sum(0))


def convolved_gates(
    plan: Plan,
    h: Tensor,
    tail: Tensor | None,
    projected: Tensor,
    f_taps: Tensor,
    i_taps: Tensor,
    f_bias: Tensor,
    i_bias: Tensor,
    lengths: Tensor | None,
) -> None:
    """Overwrites the first two parts of `projected`, W_f h and W_i h, by log2 of the gates."""
    from naju.scan.triton_chunked import gates as kernels

    f_logit, i_logit = projected[..., : plan.d_inner], projected[..., plan.d_inner : 2 * plan.d_inner]
    _walk(
        plan,
        kernels.convolved_gates,
        plan.config.gates,
        *(h, _contiguous(tail), *rows_of(f_logit, h), *rows_of(i_logit, h)),
        *(f_taps.contiguous(), i_taps.contiguous(), f_bias.contiguous(), i_bias.contiguous()),
        h if lengths is None else lengths,
        *plan.pieces.chunk_tables(h),
        WIDTH=f_taps.shape[1],
        PRECISION=plan.config.precision,
        HELD=lengths is not None,
    )


def convolved_gates_backward(
    plan: Plan, df: Tensor, di: Tensor, h: Tensor, tail: Tensor | None, f_taps: Tensor, i_taps: Tensor, dh: Tensor
) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor]:
    """Adds to dh; returns the gradients of tail, both taps and both biases."""
    from naju.scan.triton_chunked import gates as kernels

    width, tile = f_taps.shape[1], plan.config.gates_backward
    dtail, partial = _empty_tail(tail), _partial(plan, tile, dh, 2, 1 + width)
    df_rows, stride = rows_of(df, h)
    inputs = (df_rows, rows_of(di, h)[0], stride, h, _contiguous(tail), f_taps.contiguous(), i_taps.contiguous())
    outputs = (dh, dtail, partial, *plan.pieces.chunk_tables(h))
    precision = plan.config.precision
    _walk(plan, kernels.convolved_gates_backward, tile, *inputs, *outputs, WIDTH=width, PRECISION=precision)
    (df_bias, df_taps), (di_bias, di_taps) = (_bias_and_taps(total) for total in partial.sum(0))
    return dtail, df_taps, di_taps, df_bias, di_bias


def _contiguous(tail: Tensor | None) -> Tensor | None:
    return None if tail is None else tail.contiguous()


def _empty_tail(tail: Tensor | None) -> Tensor | None:
    """Room for a tail's gradient, which is 0 for a sequence without tokens."""
    return None if tail is None else torch.zeros_like(tail, memory_format=torch.contiguous_format)


def _partial(plan: Plan, tile: Tile, like: Tensor, *shape: int) -> Tensor:
    """Room for every walk's part of a parameter's gradient."""
    walks = -(-plan.pieces.n_chunks // _chunks_of_walk(plan, tile))
    return like.new_empty(walks, *shape, plan.d_inner, dtype=torch.float32)


def _bias_and_taps(total: Tensor) -> tuple[Tensor, Tensor]:
    """(1 + width, d) as a bias (d,) and taps (d, width); copies, as an operator must."""
    return total[0].clone(), total[1:].t().clone(memory_format=torch.contiguous_format)


def launch(kernel: Any, programs: int, tile: Tile, *arguments: Any, **named: Any) -> None:
    options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
    if tile.registers is not None:
        options["maxnreg"] = tile.registers
    kernel[(programs,)](*arguments, **named, **options)
