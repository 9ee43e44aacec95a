"""A text through a language model: what it expects next, and what it would expect without each of the tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from naju.lab.inspect.events import OTHER, ROWS_AT_ONCE, Event, Reply
from naju.lab.inspect.layers import gate_scale, gated_layers, view_layer
from naju.lab.pages import render
from naju.lm.folder import load_model
from naju.lm.generate import check_vocabulary, chosen_tokenizer
from naju.lm.tokenizer import Tokenizer
from naju.models import LanguageModel

MOST_TOKENS = 1024  # each is left out once


@dataclass(frozen=True)
class TokenRemoval:
    """A token of a text: how unexpected it was, None for the first, and what is expected after the text without it."""

    event: Event
    bits: float | None
    reply: Reply


def text_page(
    folder: Path, text: str, tokenizer_name: str | None, layers: Sequence[int], channels: Sequence[int]
) -> str:
    model = load_model(folder).eval()
    gated = gated_layers(model, layers)
    tokenizer = chosen_tokenizer(folder, tokenizer_name)
    check_vocabulary(model, tokenizer)
    tokens = _tokens(tokenizer, text)
    events = [Event(place, (shown(tokenizer, token),), OTHER) for place, token in enumerate(tokens.tolist())]
    now, removals = without_each_token(model, tokenizer, tokens, events)
    colours, ticks = gate_scale()
    return render(
        "inspect_text.html",
        name=_name(folder.resolve()),
        mixers=model.config.mixers,
        width=model.config.d_model,
        text=text,
        length=len(tokens),
        events=events,
        reply_now=now,
        removals=removals,
        layers=[view_layer(model, number, mixer, tokens, events, channels) for number, mixer in gated.items()],
        gate_colours=colours,
        gate_ticks=ticks,
    )


def shown(tokenizer: Tokenizer, token: int) -> str:
    """A token by its text, spaces and ends of lines as signs of their own."""
    return tokenizer.decode([token]).translate({ord(" "): "␣", ord("\n"): "↵", ord("\t"): "⇥"})


def _name(folder: Path) -> str:
    """A run keeps its best model in a folder of that name, which says too little."""
    return f"{folder.parent.name}/{folder.name}" if folder.name == "best" else folder.name


def _tokens(tokenizer: Tokenizer, text: str) -> Tensor:
    tokens = torch.tensor(tokenizer.encode(text), dtype=torch.int64)
    if not 2 <= len(tokens) <= MOST_TOKENS:
        raise ValueError(f"text must have 2 to {MOST_TOKENS:,} tokens, but has {len(tokens):,}")
    return tokens


@torch.no_grad()
def without_each_token(
    model: LanguageModel, tokenizer: Tokenizer, tokens: Tensor, events: Sequence[Event]
) -> tuple[Reply, list[TokenRemoval]]:
    """What is expected after the tokens (l,), and after all but one of them, which every memory passes over."""
    logits = model(tokens.unsqueeze(0))[0][0].double()
    bits = -logits[:-1].log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1) / math.log(2)
    after = logits[-1, : tokenizer.vocabulary.size]
    expected = int(after.argmax())
    kept = 1 - torch.eye(len(tokens), dtype=torch.int64)
    found = [
        model.prefill(tokens.expand(len(part), -1), part)[0].double()[:, : tokenizer.vocabulary.size]
        for part in kept.split(ROWS_AT_ONCE)
    ]
    replies = [_reply(tokenizer, row, expected) for row in torch.cat(found)]
    removals = [TokenRemoval(*parts) for parts in zip(events, [None, *bits.tolist()], replies, strict=True)]
    return _reply(tokenizer, after, expected), removals


def _reply(tokenizer: Tokenizer, logits: Tensor, expected: int) -> Reply:
    return Reply(shown(tokenizer, int(logits.argmax())), float(logits[expected]), float(logits.softmax(0)[expected]))
