"""The Triton kernel of the cross-entropy. Importing this module imports Triton, so only a loss on a GPU does."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

BLOCK, WARPS = 4096, 8


@triton.jit
def loss_of_row(
    logits,
    targets,
    losses,
    row_stride,
    classes,
    IGNORED: tl.constexpr,
    LEARNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The loss of one token, 0 where its target is IGNORED and NaN where it is no class; with LEARNS its logits become
    their gradient. A row is read twice, the second time from the cache."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    target = tl.load(targets + row)
    counts = target != IGNORED
    is_class = (target >= 0) & (target < classes)
    # before the sums, which all threads wait for: after them the first may already write
    own = tl.load(logits + target, mask=is_class, other=float("nan")).to(tl.float32)
    column = tl.arange(0, BLOCK)
    largest, total = float("-inf"), 0.0
    for start in range(0, classes, BLOCK):
        value = tl.load(logits + start + column, mask=start + column < classes, other=float("-inf")).to(tl.float32)
        before = largest
        largest = tl.maximum(largest, tl.max(value))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(value - largest))
    log_sum = largest + tl.log(total)
    tl.store(losses + row, tl.where(counts, log_sum - own, 0.0))
    if LEARNS:
        for start in range(0, classes, BLOCK):
            place = logits + start + column
            inside = start + column < classes
            value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            slope = tl.exp(value - log_sum) - tl.where(start + column == target, 1.0, 0.0)
            tl.store(place, tl.where(counts, slope, 0.0), mask=inside)
