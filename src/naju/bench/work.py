"""How much a run cannot do without: multiplications with weights, and bytes that have to move.

The memory's own arithmetic is left out, for it depends on the algorithm (a scan by chunks does more than a loop), so a
rate is what the hardware achieves of the work that every form of a model shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from naju.bench.compare import Failed

NO_FACTORS = ("A_log",)  # matrices that multiply nothing as such


def work_of(
    module: nn.Module | Failed, *, tokens: int, length: int, d_model: int, n_layers: int, itemsize: int, passes: int = 1
) -> dict[str, int]:
    """FLOP of the products with weights, and with the past where a model attends to all of it; bytes of the weights and
    of every layer's input and output. A training step has three `passes`: forward, and backward to both factors."""
    if isinstance(module, Failed):
        return {}
    attends = getattr(module, "d_state", None) is None
    products = tokens * factors_of(module) + attends * n_layers * tokens * length * d_model
    weights = sum(parameter.numel() for parameter in module.parameters())
    return {
        "flop": passes * 2 * products,
        "least_bytes": passes * itemsize * (weights + 2 * n_layers * tokens * d_model),
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
