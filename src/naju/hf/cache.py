"""A model's recurrent state in the clothes of a Hugging Face cache."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor
from transformers import Cache

from naju.models import ModelState


class NajuCache(Cache):
    """What the model knows of the tokens so far, and how many places they took, padding included.

    The object is updated by every forward pass that gets it, as all caches here are; `clone` keeps a moment. Nothing in
    a recurrent state can be taken back, so `crop` refuses.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, state: ModelState | None = None, seen: int = 0) -> None:
        super().__init__(layers=[])
        self.state, self.seen = state, seen

    def advance(self, state: ModelState, tokens: int) -> None:
        self.state, self.seen = state, self.seen + tokens

    def clone(self) -> NajuCache:
        return NajuCache(None if self.state is None else self.state.clone(), self.seen)

    def __len__(self) -> int:
        return 0 if self.state is None else len(self.state.layers)

    def __repr__(self) -> str:
        return f"NajuCache(seen={self.seen}, layers={len(self)})"

    @property
    def is_initialized(self) -> bool:
        return self.state is not None

    @property
    def batch_size(self) -> int:
        return -1 if self.state is None else self.state.batch

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # there is none

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = self.state.map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state[indices]

    def reset(self) -> None:
        self.state, self.seen = None, 0

    def crop(self, *_: int) -> NoReturn:
        raise NotImplementedError("a NajuCache cannot be cropped: a recurrent state does not give tokens back")
