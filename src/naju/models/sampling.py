"""From logits to the next token."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def next_token(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """Draw a token a row from logits (b, vocabulary); temperature 0 takes the most likely one."""
    if temperature == 0:
        return logits.argmax(-1)
    temperature = max(temperature, torch.finfo(torch.float32).tiny)  # what is smaller would be 0 there
    logits = logits.float()
    logits = (logits - logits.max(-1, keepdim=True).values) / temperature  # never above 0, so nothing overflows
    if top_k is not None and top_k < logits.shape[-1]:
        weakest = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < weakest, -math.inf)
    if top_p is not None and top_p < 1:
        ranked, order = logits.sort(dim=-1, descending=True)
        chance = ranked.softmax(-1)
        beyond = chance.cumsum(-1) - chance >= top_p  # the token that crosses top_p is still in
        logits = torch.full_like(logits, -math.inf).scatter(1, order, ranked.masked_fill(beyond, -math.inf))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def check_seed(seed: int | None) -> None:
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must fit into 64 bits, but is {seed}")


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not temperature >= 0:
        raise ValueError(f"temperature must be 0 (greedy) or positive, but is {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, but is {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], but is {top_p}")
