"""The language model: a backbone and next-token logits, with streaming and generation in constant memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from naju.layers.layout import checked_mask
from naju.models.backbone import Backbone, ModelState
from naju.models.config import ModelConfig
from naju.models.graphs import decoder_for
from naju.models.sampling import check_sampling, check_seed, next_token

PREFILL_CHUNK = 1024


class LanguageModel(nn.Module):
    """Tokens (b, l) to next-token logits (b, l, vocabulary); the embedding makes the logits unless untied."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.bidirectional:
            raise ValueError("a language model predicts the next token and cannot be bidirectional")
        self.config = config
        default_std = 0.02 if config.tie_embeddings else 1.0
        self.backbone = Backbone(config, default_std if config.embedding_std is None else config.embedding_std)
        self.head = None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(
        self,
        tokens: Tensor,
        state: ModelState | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, ModelState]:
        features, state = self.backbone(tokens, state, attention_mask, cu_seqlens)
        return self.logits(features), state

    def logits(self, features: Tensor) -> Tensor:
        if self.head is None:
            return F.linear(features, self.backbone.embedding.weight)
        return self.head(features)  # type: ignore[no-any-return]

    def step(self, token: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """One token a sequence, (b,), to logits (b, vocabulary)."""
        features, state = self.backbone.step(token, state)
        return self.logits(features), state

    def init_state(self, batch: int) -> ModelState:
        return self.backbone.init_state(batch)

    @torch.no_grad()
    def prefill(
        self, tokens: Tensor, attention_mask: Tensor | None = None, state: ModelState | None = None
    ) -> tuple[Tensor, ModelState]:
        """Read a prompt of any length in chunks; returns logits (b, vocabulary) after each row's last real token."""
        self.backbone.check_tokens(tokens, 2)
        if attention_mask is not None:
            attention_mask = checked_mask(attention_mask, *tokens.shape)
        state = state or self.init_state(tokens.shape[0])
        last = tokens.new_zeros(tokens.shape[0], self.config.d_model, dtype=self.backbone.norm.weight.dtype)
        for start in range(0, tokens.shape[1], PREFILL_CHUNK):
            piece = slice(start, start + PREFILL_CHUNK)
            mask = None if attention_mask is None else attention_mask[:, piece]
            features, state = self.backbone(tokens[:, piece], state, mask)
            last = features[:, -1] if mask is None else _last_real(features, mask, last)
        return self.logits(last), state

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        attention_mask: Tensor | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token: int | None = None,
        pad_token: int | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Continue prompts (b, l) by up to `max_new_tokens`; returns prompt and continuation, (b, l + new).

        Prompts of different lengths come padded on either side, with an `attention_mask`. Greedy unless `temperature`
        is positive; `top_k` and `top_p` narrow the draw, `seed` fixes it. A row that has produced `eos_token` goes on
        with `pad_token` (by default eos again), and generation ends when every row has. Memory does not grow with the
        context, attention layers of a hybrid excepted.
        """
        self.backbone.check_tokens(tokens, 2)
        if attention_mask is not None:
            attention_mask = checked_mask(attention_mask, *tokens.shape)
        check_sampling(temperature, top_k, top_p)
        check_seed(seed)
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must not be negative, but is {max_new_tokens}")
        if pad_token is not None and not 0 <= pad_token < self.config.vocab_size:
            raise ValueError(f"pad_token must lie in [0, {self.config.vocab_size}), but is {pad_token}")
        if attention_mask is not None and not attention_mask.any(dim=1).all():
            raise ValueError("attention_mask leaves a prompt without any real token; every prompt needs at least one")
        generator = None if seed is None else torch.Generator(tokens.device).manual_seed(seed)
        logits, state = self.prefill(tokens, attention_mask)
        decode = decoder_for(self, self.step, tokens[:, 0], state, max_new_tokens - 1)
        del state  # the decoder has its own; a prompt's cache of keys and values can be large
        produced, done = [tokens], torch.zeros_like(tokens[:, 0], dtype=torch.bool)
        for position in range(max_new_tokens):
            if position > 0:
                logits = decode(produced[-1].squeeze(1))
            token = next_token(logits, temperature, top_k, top_p, generator).to(tokens.dtype)
            if eos_token is not None:
                token = token.masked_fill(done, eos_token if pad_token is None else pad_token)
                done = done | (token == eos_token)
            produced.append(token.unsqueeze(1))
            if eos_token is not None and bool(done.all()):
                break
        return torch.cat(produced, dim=1)


def _last_real(features: Tensor, mask: Tensor, otherwise: Tensor) -> Tensor:
    """Features at each row's last real token; a row without one in this piece keeps what it had."""
    place = torch.arange(mask.shape[1], device=mask.device).mul(mask).argmax(1)
    found = features[torch.arange(len(features), device=mask.device), place]
    return torch.where(mask.any(1, keepdim=True), found, otherwise.to(found.dtype))
