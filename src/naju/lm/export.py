"""`naju lm export`: a model folder for Hugging Face, back to a plain one, or the decoding step for an ONNX runtime."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from safetensors import SafetensorError

from naju.lm.folder import CONFIG, is_huggingface, load_model, save_model
from naju.lm.tokenizer import TOKENIZER, Tokenizer, load_tokenizer
from naju.models import LanguageModel

if TYPE_CHECKING:
    from naju.hf import NajuForCausalLM


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a model in another form. Weights stay as they are, bit for bit."""

    model: Path
    """Folder of the model, plain or Hugging Face's."""
    out: Path
    """Folder to make; it must not be there yet."""
    to: Literal["hf", "plain", "onnx"] = "hf"
    """onnx makes step.onnx and, in state.safetensors, the state before the first token."""
    tokenizer: str | None = None
    """As for `naju lm generate`, to go with the model; by default the tokenizer.json in the model's folder, if any."""


def run_export(config: ExportConfig) -> None:
    if os.path.lexists(config.out):
        raise FileExistsError(f"out must be a new folder, but {config.out} is there already")
    model, tokenizer = read_model(config.model), _tokenizer(config)
    if tokenizer is not None and tokenizer.vocabulary.size > model.config.vocab_size:
        raise ValueError(
            f"tokenizer {tokenizer.name!r} must fit the model's vocabulary of {model.config.vocab_size:,}, but has "
            f"{tokenizer.vocabulary.size:,} tokens"
        )
    config.out.parent.mkdir(parents=True, exist_ok=True)
    writers = {"hf": save_huggingface, "plain": save_plain, "onnx": save_step}
    with tempfile.TemporaryDirectory(dir=config.out.parent, prefix=f".{config.out.name}.") as beside:
        whole = Path(beside) / config.out.name
        whole.mkdir()
        writers[config.to](model, tokenizer, whole)
        whole.rename(config.out)
    print(f"wrote {config.out}: {', '.join(sorted(file.name for file in config.out.iterdir()))}")


def read_model(folder: Path) -> LanguageModel:
    """The model of a plain folder or of one from Hugging Face."""
    if not is_huggingface(folder / CONFIG):
        return load_model(folder)
    try:
        with _without_bars():
            return _wrapper().from_pretrained(folder, use_safetensors=True, local_files_only=True).to_plain()
    except (SafetensorError, RuntimeError) as error:
        told = " ".join(str(error).split())[:500]
        raise ValueError(f"{folder} does not hold a whole model: {told}") from error


def save_huggingface(model: LanguageModel, tokenizer: Tokenizer | None, folder: Path) -> None:
    wrapper, ids = _wrapper(), {}
    if tokenizer is not None:
        from transformers import PreTrainedTokenizerFast

        ids["eos_token_id"] = ids["bos_token_id"] = end = tokenizer.vocabulary.end_of_text
        tokenizer.save(folder)
        fast = PreTrainedTokenizerFast(tokenizer_file=str(folder / TOKENIZER))
        fast.eos_token = fast.bos_token = fast.convert_ids_to_tokens(end)
        fast.save_pretrained(folder)
    with _without_bars():
        wrapper.from_plain(model, **ids).save_pretrained(folder)


def save_plain(model: LanguageModel, tokenizer: Tokenizer | None, folder: Path) -> None:
    save_model(model, folder)
    if tokenizer is not None:
        tokenizer.save_with_model(folder)


def save_step(model: LanguageModel, tokenizer: Tokenizer | None, folder: Path) -> None:
    from naju.lm.step import save_onnx

    save_onnx(model, folder / "step.onnx")
    model.init_state(1).save(folder / "state.safetensors")
    if tokenizer is not None:
        tokenizer.save(folder)


def _wrapper() -> type[NajuForCausalLM]:
    try:
        from naju.hf import NajuForCausalLM
    except ImportError as error:
        raise ImportError("Hugging Face folders need transformers; install it with: pip install 'naju[hf]'") from error
    return NajuForCausalLM


@contextmanager
def _without_bars() -> Iterator[None]:
    """Those of transformers go into logs, too."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _tokenizer(config: ExportConfig) -> Tokenizer | None:
    if config.tokenizer is not None:
        return load_tokenizer(config.tokenizer)
    return load_tokenizer(config.model) if (config.model / TOKENIZER).is_file() else None
