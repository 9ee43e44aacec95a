"""Which tokens and channels a program works on, and how it loads them."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

# A changed length compiles no kernel again. The first that is cut into segments compiles those that join them, `states`
# and `carry`; whether a segment starts from something, `carried`, is an argument and not the lack of a pointer.
LENGTH_ARGUMENTS = ["length", "sequences", "segments", "segment", "chunks", "rows_in_all", "carried"]


@triton.jit
def split_program(size, BLOCK: tl.constexpr):
    """A program's piece, and its block of `size` channels: blocks that read the same tokens are neighbours."""
    blocks = tl.cdiv(size, BLOCK)
    block = tl.program_id(0) % blocks
    return tl.program_id(0) // blocks, block * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def sequence_rows(sequence, boundaries, length, PACKED: tl.constexpr):
    """First and end row of a sequence in the flattened (b · l, ·) tensors."""
    if PACKED:
        start = tl.load(boundaries + sequence).to(tl.int64)
        stop = tl.load(boundaries + sequence + 1).to(tl.int64)
    else:
        start = sequence.to(tl.int64) * length
        stop = start + length
    return start, stop


@triton.jit
def piece_of_sequence(piece, owners, firsts, pieces, PACKED: tl.constexpr):
    """Which sequence a segment or chunk belongs to, and its place in it.

    Packed sequences have `owners` (the sequence of each piece; their number for pieces beyond the last) and `firsts`
    (the first piece of each sequence); otherwise every sequence has `pieces` of them.
    """
    if PACKED:
        sequence = tl.load(owners + piece)
        place = piece - tl.load(firsts + sequence)
    else:
        sequence = piece // pieces
        place = piece % pieces
    return sequence, place


@triton.jit
def chunk_of_segment(sequence, place, first_chunks, chunks, chunks_in_segment, PACKED: tl.constexpr):
    """The number of a segment's first chunk among all chunks of all sequences."""
    first = tl.load(first_chunks + sequence).to(tl.int64) if PACKED else sequence.to(tl.int64) * chunks
    return first + place * chunks_in_segment


@triton.jit
def first_row(start, stop, token, REVERSE: tl.constexpr):
    """The row of a sequence's token, counted in the direction of the scan."""
    return stop - 1 - token if REVERSE else start + token


@triton.jit
def rest_of_sequence(sequence, place, size, boundaries, length, REVERSE: tl.constexpr, PACKED: tl.constexpr):
    """How many tokens a sequence has from its piece at `place` on, of `size` tokens each, and the row of the first."""
    start, stop = sequence_rows(sequence, boundaries, length, PACKED)
    before = place.to(tl.int64) * size
    return stop - start - before, first_row(start, stop, before, REVERSE)


@triton.jit
def rows_of(origin, block, tokens, BLOCK: tl.constexpr, REVERSE: tl.constexpr):
    """The rows of a block's tokens, and which of them are in the segment."""
    t = block * BLOCK + tl.arange(0, BLOCK)
    return origin - t if REVERSE else origin + t, t < tokens


@triton.jit
def load(pointer, stride, rows, columns, mask):
    """A tile as it is stored: zeros outside, which for a gate is a gate that holds."""
    return tl.load(pointer + rows * stride + columns, mask=mask, other=0.0)


@triton.jit
def store(pointer, stride, rows, columns, tile, mask):
    tl.store(pointer + rows * stride + columns, tile.to(pointer.dtype.element_ty), mask=mask)
