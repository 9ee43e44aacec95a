"""Two mixers over one sequence, one in each direction."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from naju.layers.layout import PackedLayout, PaddedLayout, layout_of
from naju.mixers.base import Mixer


class BidirectionalMixer(Mixer):
    """`ahead(u) + back(mirrored u), mirrored again`; each sequence is mirrored within its own padding or boundaries."""

    def __init__(self, ahead: Mixer, back: Mixer) -> None:
        super().__init__()
        if ahead.d_model != back.d_model:
            raise ValueError(f"both directions need one d_model, but have {ahead.d_model} and {back.d_model}")
        self.d_model = ahead.d_model
        self.ahead, self.back = ahead, back
        self.worth_compiling = ahead.worth_compiling and back.worth_compiling

    def forward(
        self,
        u: Tensor,
        state: None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        if state is not None:
            self._refuse()
        mirror = _mirror(u, attention_mask, cu_seqlens).unsqueeze(-1).expand_as(u)
        ahead, _ = self.ahead(u, None, attention_mask, cu_seqlens)
        back, _ = self.back(u.gather(1, mirror), None, attention_mask, cu_seqlens)
        return ahead + back.gather(1, mirror), None

    def step(self, u: Tensor, state: None) -> NoReturn:
        self._refuse()

    def init_state(self, batch: int) -> NoReturn:
        self._refuse()

    @property
    def state_size(self) -> int | None:
        sizes = (self.ahead.state_size, self.back.state_size)
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def _refuse(self) -> NoReturn:
        raise TypeError("a bidirectional mixer reads the whole sequence at once: it has no state and cannot stream")


def _mirror(u: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """(b, l): where the token comes from that stands here in the mirrored sequence. Its own inverse."""
    layout = layout_of(u, attention_mask, cu_seqlens)
    place = torch.arange(u.shape[1], device=u.device)
    if isinstance(layout, PackedLayout):
        return (layout.starts + layout.ends - 1)[layout.sequence].sub(place).unsqueeze(0)
    if isinstance(layout, PaddedLayout):
        # The k-th real token trades places with the k-th from the end; padding stays where it is.
        rank = layout.mask.cumsum(1) - 1
        partner = (layout.lengths.unsqueeze(1) - 1 - rank).clamp_min(0)
        return torch.where(layout.mask, layout.order.gather(1, partner), place)
    return place.flip(0).expand(u.shape[0], -1)
