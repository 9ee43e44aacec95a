"""Randomness as an argument: one seed, and an independent stream for every purpose."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derived_seed(seed: int, purpose: str) -> int:
    """A seed for one purpose; two purposes share nothing, and the same pair gives the same seed on every machine."""
    digest = hashlib.blake2b(f"{seed}:{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch takes signed 64-bit seeds


def seeded_generator(seed: int, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(derived_seed(seed, purpose))


@contextmanager
def seeded_initialisation(seed: int) -> Iterator[None]:
    """Parameters built inside depend on `seed` alone (on the CPU), and torch's global stream is left where it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(seed, "initialisation"))
        yield
