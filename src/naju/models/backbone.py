"""Token embedding, a stack of blocks and a final norm: what every model here shares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from naju.layers.layout import checked_mask
from naju.mixers.base import Mixer
from naju.mixers.registry import build_mixer
from naju.mixers.state import State
from naju.models.bidirectional import BidirectionalMixer
from naju.models.block import Block
from naju.models.config import ModelConfig


@dataclass(frozen=True)
class ModelState(State):
    """The recurrent state of a whole model: its layers' states, first to last."""

    layers: tuple[State, ...]


torch.export.register_dataclass(ModelState, serialized_type_name="naju.ModelState")


PIECE = 4096


class Backbone(nn.Module):
    """Tokens (b, l) to normalised features (b, l, m)."""

    def __init__(self, config: ModelConfig, embedding_std: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        nn.init.normal_(self.embedding.weight, std=embedding_std)
        self.blocks = nn.ModuleList(Block(_mixer(config, name), config.norm_eps) for name in config.mixers)
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self._streams = not config.bidirectional
        self._checkpoints = config.checkpoint_blocks

    def forward(
        self,
        tokens: Tensor,
        state: ModelState | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, ModelState]:
        self.check_tokens(tokens, 2)
        if attention_mask is not None:
            attention_mask = checked_mask(attention_mask, *tokens.shape)
        if self._streams and cu_seqlens is None and _only_reading() and tokens.shape[1] > PIECE:
            return self._read(tokens, state, attention_mask)
        before = [None] * len(self.blocks) if state is None else self._layers_of(state)
        u, after = self._embedded(tokens), []
        for block, layer in zip(self.blocks, before, strict=True):
            u, layer = self._run(block, u, layer, attention_mask, cu_seqlens)
            after.append(layer)
        return self.norm(u), ModelState(tuple(after))

    def _run(self, block: nn.Module, *inputs: Any) -> Any:
        if not self._checkpoints or not torch.is_grad_enabled():
            return block(*inputs)
        # Nothing in a block is left to chance, and reading a random state would keep a GPU from recording the step.
        return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)

    def _read(
        self, tokens: Tensor, state: ModelState | None, attention_mask: Tensor | None
    ) -> tuple[Tensor, ModelState]:
        """A long input in pieces that stay in the cache, with the state carried: the same result, less memory."""
        features = []
        for start in range(0, tokens.shape[1], PIECE):
            piece = slice(start, start + PIECE)
            mask = None if attention_mask is None else attention_mask[:, piece]
            part, state = self.forward(tokens[:, piece], state, mask)
            features.append(part)
        assert state is not None
        return torch.cat(features, dim=1), state

    def step(self, token: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """One token a sequence, (b,), to features (b, m)."""
        self.check_tokens(token, 1)
        u, after = self._embedded(token), []
        for block, layer in zip(self.blocks, self._layers_of(state), strict=True):
            u, layer = block.step(u, layer)  # type: ignore[operator]
            after.append(layer)
        return self.norm(u), ModelState(tuple(after))

    def _embedded(self, tokens: Tensor) -> Tensor:
        """The lookup itself checks every token, on a GPU too, where a stranger stops the kernel by an assertion;
        looking at the values here would wait for the device. There it may read only 32 bits of a token, so that one
        far outside is first brought to where it is still seen to be outside."""
        if tokens.is_cuda:
            tokens = tokens.clamp(-1, self.embedding.num_embeddings)
        try:
            return self.embedding(tokens)  # type: ignore[no-any-return]
        except IndexError as error:
            raise ValueError(
                f"tokens must lie in [0, {self.embedding.num_embeddings}), but lie in "
                f"[{int(tokens.min())}, {int(tokens.max())}]"
            ) from error

    def init_state(self, batch: int) -> ModelState:
        return ModelState(tuple(block.mixer.init_state(batch) for block in self.blocks))  # type: ignore[union-attr, operator]

    def _layers_of(self, state: ModelState) -> tuple[State, ...]:
        if not isinstance(state, ModelState):
            raise TypeError(f"state must be a ModelState, but is a {type(state).__name__}")
        if len(state.layers) != len(self.blocks):
            raise ValueError(f"state has {len(state.layers)} layers, but the model has {len(self.blocks)}")
        if None in state.layers:
            raise TypeError("a bidirectional model reads the whole sequence at once: it has no state and cannot stream")
        return state.layers

    def check_tokens(self, tokens: Tensor, axes: int) -> None:
        expected = "(batch, length)" if axes == 2 else "(batch,)"
        if not isinstance(tokens, Tensor):
            raise TypeError(f"tokens must be a tensor, but are a {type(tokens).__name__}")
        if tokens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"tokens must be int32 or int64, but are {str(tokens.dtype).removeprefix('torch.')}")
        if tokens.dim() != axes or 0 in tokens.shape:
            raise ValueError(
                f"tokens must have shape {expected} and not be empty, but have shape {tuple(tokens.shape)}"
            )


_unbroken = ContextVar("unbroken", default=False)


@contextmanager
def unbroken() -> Iterator[None]:
    """Within it long inputs are read at once, so that a hook on a layer sees all of them."""
    token = _unbroken.set(True)
    try:
        yield
    finally:
        _unbroken.reset(token)


def _only_reading() -> bool:
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling() and not _unbroken.get()


def _mixer(config: ModelConfig, name: str) -> Mixer:
    directions = [build_mixer(name, config.d_model, **config.options_of(name)) for _ in range(1 + config.bidirectional)]
    return BidirectionalMixer(*directions) if config.bidirectional else directions[0]
