"""What every peer is put into, so that only the mixer differs: a residual stack, and a language model around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from naju.bench.peers import Peer, build_peer

NORM_EPS = 1e-5


class ResidualStack(nn.Module):
    """`u + mixer(norm(u))`, layer after layer, (b, l, m) to (b, l, m)."""

    def __init__(self, name: str, *, n_layers: int, d_model: int, d_state: int) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(build_peer(name, d_model, d_state) for _ in range(n_layers))
        self.norms = nn.ModuleList(nn.RMSNorm(d_model, eps=NORM_EPS) for _ in range(n_layers))

    def forward(self, u: Tensor) -> Tensor:
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            u = u + mixer(norm(u))
        return u

    @property
    def peers(self) -> list[Peer]:
        return [mixer for mixer in self.mixers if isinstance(mixer, Peer)]

    @property
    def d_state(self) -> int | None:
        return self.peers[0].d_state


def build_stack(bench: Any, name: str) -> ResidualStack:
    """A stack for reading only, with the sizes, the device and the dtype of a bench."""
    stack = ResidualStack(name, n_layers=bench.n_layers, d_model=bench.d_model, d_state=bench.d_state)
    return stack.to(bench.device, getattr(torch, bench.dtype)).eval()


class LanguageShell(nn.Module):
    """Tokens (b, l) to logits (b, l, vocabulary) by the embedding that read them."""

    def __init__(self, stack: ResidualStack, *, d_model: int, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.stack = stack
        self.norm = nn.RMSNorm(d_model, eps=NORM_EPS)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.norm(self.stack(self.embedding(tokens))), self.embedding.weight)

    @property
    def d_state(self) -> int | None:
        return self.stack.d_state
