"""The algebra of one block of tokens, which the forward and the backward kernels share.

Tiles are channel-major, (d, t): channels are the rows of every matrix product, the state (d, n) never leaves registers,
and one table of scores (B_s · C_t) serves all channels of a block. Gates arrive as logarithms to the base 2; `g` is
that of the forget gate. As float16 they are stored G_SCALE times as large.

A pair of tokens s < t needs the decay 2^(g_{s+1} + … + g_t). A block is a binary tree over its tokens, and the pair
belongs to the smallest node that holds both, s in its left half and t in its right: the decay is then what s keeps on
its way to the node's middle times what t keeps from there on. Both factors are products of gates, at most 1, and sums
of g never leave a node, so nothing overflows and no two long sums are subtracted, however strongly a gate forgets.
Level k of the tree has nodes of 2^(k+1) tokens; each level is one matrix product. Half precision replaces the levels
below `LEAF` tokens by one product around the leaf's middle, with g floored so that neither factor overflows.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# 2^-1000 is 0, sixty-four of them still sum in float32, and 64 times it is within float16.
LEAST_G = tl.constexpr(-1000.0)
# A gate of 2^-12 is 0 to half precision. In a leaf of 16 tokens the largest factor is then 2^96, which leaves 2^32 for
# what it multiplies: a write times B · C.
LEAF_LEAST_G = tl.constexpr(-12.0)
LEAST_F = tl.constexpr(2.0**-12)
# Two float32 to the nearest bfloat16 at once, and back; one by one takes the slow unit of the exponentials.
ROUND_PAIR = tl.constexpr(
    "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }"
)
# Gates near 1 thus stay clear of float16's subnormal numbers.
G_SCALE = tl.constexpr(64.0)


@triton.jit
def exp2(x, PRECISION: tl.constexpr):
    """The hardware's instruction, without the care for subnormal results that surrounds it in `tl.exp2`."""
    if PRECISION == "bf16" or PRECISION == "tf32":
        result = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1)
    else:
        result = tl.exp2(x)
    return result


@triton.jit
def log2(x, PRECISION: tl.constexpr):
    if PRECISION == "bf16" or PRECISION == "tf32":
        result = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1)
    else:
        result = tl.log2(x)
    return result


@triton.jit
def reciprocal(x, PRECISION: tl.constexpr):
    if PRECISION == "bf16" or PRECISION == "tf32":
        result = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, True, 1)
    else:
        result = 1.0 / x
    return result


@triton.jit
def sigmoid(x, PRECISION: tl.constexpr):
    return reciprocal(1.0 + exp2(-x * LOG2E, PRECISION), PRECISION)


@triton.jit
def logarithm(gate):
    """A stored gate's logarithm in float32."""
    return gate.to(tl.float32) / G_SCALE if gate.dtype == tl.float16 else gate


@triton.jit
def unpacked(tile, PRECISION: tl.constexpr, SCALE: tl.constexpr = 1.0):
    """A loaded tile (·, t) in float32, SCALE times as large.

    In half precision it is multiplied by the identity: the tensor cores read it where it was loaded to and leave it as
    the products of a block lie, which takes fewer instructions than to convert it and to move it there.
    """
    if PRECISION == "bf16":
        j, t = token_pairs(tile.shape[1])
        result = tl.dot(tile, tl.where(j == t, SCALE, 0.0).to(tile.dtype))
    else:
        result = tile.to(tl.float32) * SCALE
    return result


@triton.jit
def unpacked_gate(gate, PRECISION: tl.constexpr, SCALE: tl.constexpr = 1.0):
    """The logarithm of a loaded tile of gates (·, t), SCALE times as large."""
    return unpacked(gate, PRECISION, SCALE / G_SCALE if gate.dtype == tl.float16 else SCALE)


@triton.jit
def gate_value(gate, PRECISION: tl.constexpr):
    return exp2(logarithm(gate), PRECISION)


@triton.jit
def rest_of(log, value, PRECISION: tl.constexpr):
    """1 - a gate of this logarithm and value, with all its digits also where the gate is nearly 1."""
    if PRECISION == "bf16":
        half = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=r,r", [log * (-0.5 * LN2)], tl.float32, True, 1)
        rest = half + half * value
    else:
        x = log * LN2
        series = 1.0 + x * (0.5 + x * (0.1666666667 + x * (0.0416666667 + x * 0.0083333333)))
        if PRECISION == "ieee":
            series += x * x * x * x * x * (0.0013888889 + x * 0.000198412698)
        rest = tl.where(x > -0.25, -x * series, 1.0 - value)
    return rest


@triton.jit
def rounded_to_bfloat16(x):
    """To the nearest, as a GPU does it, in integers: the interpreter cuts the digits off."""
    bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def product(a, b, PRECISION: tl.constexpr, onto=None):
    """a @ b (+ onto) in float32; PRECISION is "bf16" for rounded operands, else the input_precision of `tl.dot`.

    "rounded" is "bf16" for the interpreter, which cannot multiply bfloat16.
    """
    if PRECISION == "bf16":
        result = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), onto)
    elif PRECISION == "rounded":
        result = tl.dot(rounded_to_bfloat16(a), rounded_to_bfloat16(b), onto, input_precision="ieee")
    else:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), onto, input_precision=PRECISION)
    return result


@triton.jit
def as_factor(x, PRECISION: tl.constexpr):
    """x in the type in which `product` multiplies it, so that two products share it."""
    return x.to(tl.bfloat16) if PRECISION == "bf16" else x.to(tl.float32)


@triton.jit
def rounded(x, PRECISION: tl.constexpr):
    """x as `product` sees it."""
    if PRECISION == "bf16":
        x = tl.inline_asm_elementwise(ROUND_PAIR, "=r,=r,r,r", [x], tl.float32, is_pure=True, pack=2)
    elif PRECISION == "rounded":
        x = rounded_to_bfloat16(x)
    return x


@triton.jit
def sums(g, weights, TOKEN_MAJOR: tl.constexpr = False):
    """(d, t) of the sums of g over the tokens j, each with its weight[j, t]; token-major: g and the sums are (t, d)."""
    weights = weights.to(tl.float32)
    if TOKEN_MAJOR:
        weights = tl.trans(weights)
    if g.dtype == tl.float16:
        weights = (weights / G_SCALE).to(tl.float16)
    left, right = (weights, g) if TOKEN_MAJOR else (g, weights)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def block_sums(g, BLOCK: tl.constexpr):
    """(d, t) of the sums of g over the tokens after t, over those up to t, over t alone, and over all.

    In half precision they are one product with four tables side by side, which lie apart in registers already.
    """
    if g.dtype == tl.float16:
        j, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, 4 * BLOCK)[None, :]
        table, t = column // BLOCK, column % BLOCK
        weights = tl.where(table == 0, j > t, tl.where(table == 1, j <= t, (table == 3) | (j == t)))
        tables = tl.reshape(sums(g, weights), (g.shape[0], 2, 2, BLOCK))
        even, odd = tl.split(tl.permute(tables, (0, 3, 1, 2)))
        after, own = tl.split(even)
        upto, everything = tl.split(odd)
    else:
        j, t = token_pairs(BLOCK)
        after, upto, own, everything = sums(g, j > t), sums(g, j <= t), g, sums(g, j + t >= 0)
    return after, upto, own, everything


@triton.jit
def token_pairs(BLOCK: tl.constexpr):
    """Token numbers as a column and as a row."""
    t = tl.arange(0, BLOCK)
    return t[:, None], t[None, :]


@triton.jit
def decay_from_start(g, BLOCK: tl.constexpr, PRECISION: tl.constexpr, TOKEN_MAJOR: tl.constexpr = False):
    """What is left at each token of the state that enters the block."""
    j, t = token_pairs(BLOCK)
    return exp2(sums(g, j <= t, TOKEN_MAJOR), PRECISION)


@triton.jit
def decay_to_end(g, BLOCK: tl.constexpr, PRECISION: tl.constexpr, TOKEN_MAJOR: tl.constexpr = False):
    """What is left at the block's end of the write at each token."""
    j, t = token_pairs(BLOCK)
    return exp2(sums(g, j > t, TOKEN_MAJOR), PRECISION)


@triton.jit
def total(g, BLOCK: tl.constexpr):
    """The sum of g over the block (d,)."""
    j, t = token_pairs(BLOCK)
    return tl.sum(tl.where(t == 0, sums(g, j >= t), 0.0), axis=1)


@triton.jit
def decay_to_middle(
    g, LEVEL: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, TOKEN_MAJOR: tl.constexpr = False
):
    """Left halves: what the write has left at the node's middle. Right halves: what a token keeps from there on."""
    j, t = token_pairs(BLOCK)
    if LEVEL == 0:
        token = j if TOKEN_MAJOR else t
        exponent = tl.where((token & 1) == 1, logarithm(g), 0.0)
    else:
        same_half = (j >> LEVEL) == (t >> LEVEL)
        on_the_way = tl.where(((t >> LEVEL) & 1) == 1, j <= t, j > t)
        exponent = sums(g, same_half & on_the_way, TOKEN_MAJOR)
    return exp2(exponent, PRECISION)


@triton.jit
def crosses(s, t, LEVEL: tl.constexpr):
    """Whether s is in the left and t in the right half of one node of this level."""
    return ((s >> LEVEL) + 1 == (t >> LEVEL)) & (((t >> LEVEL) & 1) == 1)


@triton.jit
def floored(g):
    """A forget gate, as it is stored, that a leaf can bear."""
    LEAST: tl.constexpr = LEAF_LEAST_G * G_SCALE if g.dtype == tl.float16 else LEAF_LEAST_G
    return tl.maximum(g, tl.full(g.shape, LEAST, g.dtype), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def leaf_exponent(g, LEAF: tl.constexpr, BLOCK: tl.constexpr, TOKEN_MAJOR: tl.constexpr = False):
    """The sum of floored g from the leaf's middle to each token; counted negative to the middle's left."""
    j, t = token_pairs(BLOCK)
    HALF: tl.constexpr = LEAF // 2
    right = ((t // HALF) & 1) == 1
    sign = tl.where(right, tl.where(j <= t, 1.0, 0.0), tl.where(j > t, -1.0, 0.0))
    weights = tl.where((j // HALF) == (t // HALF), sign, 0.0)
    return sums(floored(g), weights, TOKEN_MAJOR)


@triton.jit
def read_block(g, v, scores, LEAF: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """What each token reads (d, t) of the writes of its own block, its own included; scores[s, t] = B_s · C_t."""
    s, t = token_pairs(BLOCK)
    if LEAF == 1:
        m = v * tl.sum(tl.where(s == t, scores, 0.0), axis=0)[None, :]
    else:
        exponent = leaf_exponent(g, LEAF, BLOCK)
        within = tl.where((s // LEAF == t // LEAF) & (s <= t), scores, 0.0)
        m = exp2(exponent, PRECISION) * product(v * exp2(-exponent, PRECISION), within, PRECISION)
    for level in tl.static_range(LEVELS):
        if (2 << level) > LEAF:
            decay = decay_to_middle(g, level, BLOCK, PRECISION)
            m += decay * product(v * decay, tl.where(crosses(s, t, level), scores, 0.0), PRECISION)
    return m


@triton.jit
def advance(state, g, v, key, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """The state after a block."""
    remaining = state * exp2(total(g, BLOCK), PRECISION)[:, None]
    return product(v * decay_to_end(g, BLOCK, PRECISION), key, PRECISION, remaining)
