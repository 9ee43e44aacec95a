"""What the mixers with a matrix memory share: heads, the memory's size, and a step that is a short forward."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from naju.layers.head_norm import HeadNorm
from naju.mixers.base import Mixer
from naju.scan.dispatch import state_dtype


class MatrixMixer(Mixer):
    """A memory (heads, d_key, d_value) written by outer products; see `naju.layers.matrix_scan`."""

    n_heads: int
    d_key: int  # of one head, as is d_value
    d_value: int
    norm: HeadNorm
    project_out: nn.Linear

    @property
    def state_size(self) -> int:
        return self.n_heads * self.d_key * self.d_value

    def step(self, u: Tensor, state: Any) -> tuple[Tensor, Any]:
        self.check_input(u, 2)
        out, state = self.forward(u.unsqueeze(1), state)
        return out.squeeze(1), state

    def empty_memory(self, batch: int) -> Tensor:
        weight = self.project_out.weight
        return weight.new_zeros(batch, self.n_heads, self.d_key, self.d_value, dtype=state_dtype(weight.dtype))

    def split_heads(self, u: Tensor) -> Tensor:
        """(b, l, ·) to (b, l, heads, ·)."""
        return u.reshape(*u.shape[:-1], self.n_heads, -1)

    def gated_output(self, o: Tensor, gate: Tensor) -> Tensor:
        """Each head's reading o (b, l, heads, value) normalised, times silu(gate), projected to (b, l, m)."""
        mixed = self.norm(o) * F.silu(self.split_heads(gate))
        return self.project_out(mixed.flatten(-2).to(o.dtype))  # type: ignore[no-any-return]


def divided(name: str, width: float, heads: int) -> int:
    """The width of one head, after checking that the heads divide the whole."""
    whole = round(width)
    if heads < 1 or abs(width - whole) > 1e-9 * width or whole < heads or whole % heads != 0:
        raise ValueError(f"{name} must be a positive multiple of n_heads = {heads}, but is {width:g}")
    return whole // heads
