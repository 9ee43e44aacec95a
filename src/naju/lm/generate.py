"""`naju lm generate`: text from a model as it comes, and a state file from which it can go on later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from naju.lm.folder import load_model
from naju.lm.tokenizer import TOKENIZER, TextStream, Tokenizer, load_tokenizer
from naju.mixers.state import State
from naju.models import LanguageModel, ModelState
from naju.models.device import usable_device
from naju.models.sampling import check_sampling, check_seed, next_token


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 0.8
    """0 always takes the most likely token."""
    top_k: int | None = None
    """Draw from so many of the likeliest tokens only."""
    top_p: float | None = None
    """Draw from the likeliest tokens that have this much probability together."""
    seed: int | None = None
    """The same seed draws the same text."""

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.top_p)
        check_seed(self.seed)

    def on(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """A function from logits (b, vocabulary) to tokens (b,), whose draws go on from call to call."""
        generator = None if self.seed is None else torch.Generator(device).manual_seed(self.seed)
        return lambda logits: next_token(logits, self.temperature, self.top_k, self.top_p, generator)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Continue a text. The model only goes on with what it reads; it does not answer."""

    model: Path
    """Folder with config.json and model.safetensors."""
    prompt: str = ""
    """What to continue; without it, and without a state, a new document."""
    tokenizer: str | None = None
    """As for `naju lm prepare`, or a folder that it wrote; by default the tokenizer.json in the model's folder."""
    max_new_tokens: int = 200
    """How many tokens at most; an end of text stops it earlier."""
    sampling: Sampling = Sampling()
    state: Path | None = None
    """Go on from this file, which --save-state has written."""
    save_state: Path | None = None
    """File for the state at the end, also after Ctrl-C."""
    device: str = "auto"
    """auto is the GPU where there is one."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must not be negative, but is {self.max_new_tokens}")
        if self.save_state is not None and not self.save_state.parent.is_dir():
            raise ValueError(f"save_state must lie in a folder that exists, but is {self.save_state}")


@dataclass(frozen=True)
class Pause(State):
    """Where a text stopped: what the model has read, and the last token, which it has not.

    `held` are the tokens of a character that is not complete yet, (1, k).
    """

    model: ModelState
    last: Tensor
    held: Tensor


class Writer:
    """A text that a model reads and continues."""

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, pause: Pause | None = None) -> None:
        check_vocabulary(model, tokenizer)
        self._model, self._tokenizer, self._text = model, tokenizer, TextStream(tokenizer)
        self._state, self._unread = model.init_state(1), []
        if pause is not None:
            _check_pause(pause, self._state, tokenizer.vocabulary.size)
            self._state, self._unread, self._text.held = pause.model, pause.last.tolist(), pause.held[0].tolist()
            if not self._text.held:
                self._text.follow(self._unread)

    def read(self, prompt: str) -> str:
        """Returns the prompt, after what was held back before it."""
        tokens = self._tokenizer.encode(prompt)
        if not tokens:
            return ""
        self._unread += tokens
        shown = self.finish() + prompt
        self._text.follow(tokens)
        return shown

    def write(self, count: int, sampling: Sampling) -> Iterator[str]:
        """Up to `count` tokens as text, piece by piece; an end of text ends it and is not shown."""
        draw, end = sampling.on(self._device), self._tokenizer.vocabulary.end_of_text
        last = self._read_all_but_one()
        for _ in range(count):
            with torch.no_grad():
                logits, state = self._model.step(last, self._state)
            if not logits.isfinite().all():
                raise FloatingPointError("the model's logits are not finite: its weights or the state are damaged")
            last = draw(logits[:, : self._tokenizer.vocabulary.size])
            self._state, self._unread = state, last.tolist()
            if self._unread == [end]:
                break
            yield self._text.add(self._unread[0])

    def finish(self) -> str:
        """What is shown of a character that did not become complete."""
        return self._text.finish()

    def pause(self) -> Pause:
        last = self._read_all_but_one()
        return Pause(self._state, last, self._tensor([self._text.held]))

    def _read_all_but_one(self) -> Tensor:
        """The last token, (1,). At the very start it is an end of text: a new document follows."""
        *before, last = self._unread or [self._tokenizer.vocabulary.end_of_text]
        if before:
            _, self._state = self._model.prefill(self._tensor([before]), state=self._state)
        self._unread = [last]
        return self._tensor([last])

    @property
    def _device(self) -> torch.device:
        return self._model.backbone.embedding.weight.device

    def _tensor(self, tokens: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.long, device=self._device)


def check_vocabulary(model: LanguageModel, tokenizer: Tokenizer) -> None:
    if tokenizer.vocabulary.size > model.config.vocab_size:
        raise ValueError(
            f"tokenizer {tokenizer.name!r} must fit the model's vocabulary of {model.config.vocab_size:,}, but has "
            f"{tokenizer.vocabulary.size:,} tokens"
        )


def _check_pause(saved: Pause, own: ModelState, vocab_size: int) -> None:
    kinds, expected = ([type(layer).__name__ for layer in state.layers] for state in (saved.model, own))
    if kinds != expected:
        raise ValueError(f"state must have the model's layers, {', '.join(expected)}, but has {', '.join(kinds)}")
    if saved.batch != 1:
        raise ValueError(f"state must be of one text, but is of {saved.batch}")
    for name, tokens, axes in (("last", saved.last, 1), ("held", saved.held, 2)):
        known = (
            tokens.dtype == torch.long and tokens.dim() == axes and bool(((tokens >= 0) & (tokens < vocab_size)).all())
        )
        if not known:
            raise ValueError(f"state must have the tokenizer's tokens as its {name}, but has {tokens.tolist()}")


def run_generate(config: GenerateConfig) -> None:
    device = usable_device(config.device)
    model = load_model(config.model, device).eval()
    pause = None if config.state is None else Pause.load(config.state, device)
    writer = Writer(model, chosen_tokenizer(config.model, config.tokenizer), pause)
    try:
        _show(writer.read(config.prompt))
        for text in writer.write(config.max_new_tokens, config.sampling):
            _show(text)
    finally:
        if config.save_state is not None:
            writer.pause().save(config.save_state)
        else:
            _show(writer.finish())
        _show("\n")


def _show(text: str) -> None:
    print(text, end="", flush=True)


def chosen_tokenizer(model: Path, name: str | None) -> Tokenizer:
    """The named one, or that in the model's folder."""
    if name is not None:
        return load_tokenizer(name)
    if not (model / TOKENIZER).exists():
        raise FileNotFoundError(f"model folder {model} has no {TOKENIZER}; say with --tokenizer which one to use")
    return load_tokenizer(model)
