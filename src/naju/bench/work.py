"""How much a run cannot do without: multiplications with weights, and bytes that have to move.

Where a model reads a sequence, the memory's own arithmetic is left out, for it depends on the algorithm (a scan by
chunks does more than a loop), so a rate is what the hardware achieves of the work that every form of a model shares. A
step of one token has one form only; and of the scan alone, which is nothing else, the loop's arithmetic is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from naju.bench.compare import Failed

# For each number of the memory and token: f x + w B and x C, three products and two sums. Backward, with g for the
# gradient of x: f g + dy C, and the sums of dy x, w g, g B and g x that are the gradients of C, B, w and f.
LOOP_FLOP, LOOP_BACKWARD_FLOP = 5, 11
NO_FACTORS = ("A_log",)  # matrices that multiply nothing as such


def work_of(
    module: nn.Module | Failed, *, tokens: int, length: int, d_model: int, n_layers: int, itemsize: int, passes: int = 1
) -> dict[str, int]:
    """FLOP of the products with weights, and with the past where a model attends to all of it; bytes of the weights and
    of every layer's input and output. Training has three `passes`: forward, and backward to both factors."""
    if isinstance(module, Failed):
        return {}
    attends = getattr(module, "d_state", None) is None
    products = tokens * factors_of(module) + attends * n_layers * tokens * length * d_model
    weights = sum(parameter.numel() for parameter in module.parameters())
    return {
        "flop": passes * 2 * products,
        "least_bytes": passes * itemsize * (weights + 2 * n_layers * tokens * d_model),
    }


def work_of_step(
    module: nn.Module, states: Sequence[Sequence[Tensor]], *, batch: int, d_model: int, n_layers: int, itemsize: int
) -> dict[str, int]:
    """The same of one token for each of `batch` sequences, and their states read and written; `states` are those of one
    sequence, layer by layer, each with the memory first and then what convolutions keep."""
    sizes = {"tokens": batch, "length": 0, "d_model": d_model, "n_layers": n_layers, "itemsize": itemsize}
    work = work_of(module, **sizes)
    memories = sum(memory.numel() for memory, *_ in states)
    kept_bytes = sum(tensor.nbytes for layer in states for tensor in layer)
    return {
        "flop": work["flop"] + LOOP_FLOP * batch * memories,
        "least_bytes": work["least_bytes"] + 2 * batch * kept_bytes,
    }


def work_of_scan(
    *, batch: int, length: int, d_inner: int, d_state: int, itemsize: int, backward: bool = False
) -> dict[str, int]:
    """FLOP of the loop; bytes of h, both logits, z, B and C in and y out. A backward reads these and dy, and writes the
    gradients of those."""
    tokens = batch * length
    given, result = tokens * (4 * d_inner + 2 * d_state), tokens * d_inner
    return {
        "flop": tokens * d_inner * d_state * (LOOP_FLOP + backward * LOOP_BACKWARD_FLOP),
        "least_bytes": itemsize * (given + result + backward * (2 * given + result)),
    }


def factors_of(module: nn.Module) -> int:
    """Numbers in the matrices that a token is multiplied with."""
    named = dict(module.named_parameters())  # a tied one once
    return sum(p.numel() for name, p in named.items() if p.dim() == 2 and name.rpartition(".")[2] not in NO_FACTORS)


def rates(row: Mapping[str, Any]) -> dict[str, float]:
    """What a timed row achieved of its work, a second."""
    if "median_s" not in row or "flop" not in row:
        return {}
    return {"flop_per_s": row["flop"] / row["median_s"], "bytes_per_s": row["least_bytes"] / row["median_s"]}
