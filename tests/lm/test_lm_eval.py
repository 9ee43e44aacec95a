"""`naju lm eval`: the losses of plain forward passes, whatever the length, the batch and the pieces."""

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_language import VOCABULARY, prepare
from torch.nn import functional as F

from naju import LanguageModel, ModelConfig, cli
from naju.lm import evaluate as module
from naju.lm.evaluate import EvaluateConfig, Evaluation, evaluate
from naju.lm.folder import save_model
from naju.lm.prepare import PrepareConfig, run_prepare
from naju.lm.token_files import TokenSplit, open_split
from naju.lm.tokenizer import TOKENIZER, load_tokenizer

TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("data"), train=100, validation=207)


@pytest.fixture
def split(folder: Path) -> TokenSplit:
    return open_split(folder, "validation")


def build(mixer: str | list[str] = "naju", vocabulary: int = VOCABULARY) -> LanguageModel:
    config = ModelConfig(vocabulary, 16, 2, mixer, embedding_std=1.0)  # confident, so that losses differ
    return LanguageModel(config).eval()


@torch.no_grad()
def losses_of(model: LanguageModel, tokens: np.ndarray) -> np.ndarray:
    """Of every token but the first, in one forward pass."""
    read = torch.from_numpy(tokens.astype(np.int64))
    logits, _ = model(read[None, :-1])
    return F.cross_entropy(logits[0].double(), read[1:], reduction="none").numpy()


@pytest.mark.parametrize("mixer", ["naju", "mamba2", ["naju", "transformer"]], ids=str)
@pytest.mark.parametrize("length", [1, 32, 206, 1000, None])
@pytest.mark.parametrize("piece", [5, 1024])
def test_losses_are_those_of_whole_windows(
    split: TokenSplit, monkeypatch: pytest.MonkeyPatch, mixer: str | list[str], length: int | None, piece: int
) -> None:
    monkeypatch.setattr(module, "PIECE", piece)
    model, size = build(mixer), min(length or 206, 206)
    windows = [losses_of(model, split.tokens[start : start + size + 1]) for start in range(0, 206, size)]
    result = evaluate(model, split, length=length, batch=3)
    assert result.tokens == 206
    assert result.counts.tolist() == [sum(len(window) > k for window in windows) for k in range(size)]
    sums = [sum(window[k] for window in windows if len(window) > k) for k in range(size)]
    np.testing.assert_allclose(result.sums, sums, **TOLERANCE)
    assert result.loss == pytest.approx(np.concatenate(windows).mean(), rel=2e-5)
    assert result.perplexity == pytest.approx(math.exp(result.loss))


@pytest.mark.parametrize("piece", [5, 1024])
def test_reset_reads_every_document_from_an_empty_state(
    split: TokenSplit, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """The first token of a document is predicted by the end of the one before."""
    monkeypatch.setattr(module, "PIECE", piece)
    model = build()
    bounds = split.documents.astype(int)
    expected = [
        losses_of(model, split.tokens[start : min(stop + 1, len(split.tokens))]) for start, stop in pairwise(bounds)
    ]
    result = evaluate(model, split, reset=True)
    np.testing.assert_allclose(result.sums, np.concatenate(expected), **TOLERANCE)
    assert abs(result.loss - evaluate(model, split).loss) > 1e-3


def test_few_logits_at_a_time_give_the_same(split: TokenSplit, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    whole = evaluate(model, split, length=64)
    monkeypatch.setattr(module, "CHUNK_LOGITS", 5 * VOCABULARY)
    np.testing.assert_allclose(evaluate(model, split, length=64).sums, whole.sums, **TOLERANCE)


def test_a_larger_vocabulary_than_that_of_the_data_is_fine_and_a_smaller_one_refused(split: TokenSplit) -> None:
    assert evaluate(build(vocabulary=VOCABULARY + 7), split).tokens == 206
    with pytest.raises(ValueError, match="must know the 17 tokens of the data, but its vocabulary has 16"):
        evaluate(build(vocabulary=16), split)


def test_one_token_predicts_nothing(split: TokenSplit) -> None:
    alone = TokenSplit(split.tokens[:1], split.documents[:1], VOCABULARY, split.end_of_text)
    with pytest.raises(ValueError, match="at least two tokens"):
        evaluate(build(), alone)


@pytest.mark.parametrize("length", [1, 2, 3, 8, 100])
def test_ranges_of_positions_double_and_cover_all(length: int) -> None:
    ranges = list(Evaluation(np.ones(length), np.ones(length, np.int64)).doubling())
    assert [k for start, stop in ranges for k in range(start, stop)] == list(range(length))
    assert all(stop == 2**n for n, (_, stop) in enumerate(ranges[:-1]))


def test_the_command_prints_and_writes_what_it_measured(
    folder: Path, split: TokenSplit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build()
    save_model(model, tmp_path / "model")
    options = ["--data", str(folder), "--length", "64", "--out", str(tmp_path / "result.json")]
    cli.main(["lm", "eval", str(tmp_path / "model"), *options])
    expected = evaluate(model, split, length=64)
    told = capsys.readouterr().out.splitlines()
    assert told[-1] == (f"validation: perplexity {expected.perplexity:.3f}, loss {expected.loss:.4f} over 206 tokens")
    assert [line.split()[0] for line in told[1:-1]] == ["1", "2", "3-4", "5-8", "9-16", "17-32", "33-64"]
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["perplexity"] == pytest.approx(expected.perplexity)
    np.testing.assert_allclose(written["loss_by_position"], expected.sums / expected.counts, rtol=1e-6)


def test_data_of_another_tokenizer_than_the_models_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of the model may be written otherwise, as transformers does."""
    data, model = tmp_path / "data", tmp_path / "model"
    run_prepare(PrepareConfig(source="sample", out=data, tokenizer="sample", processes=1))
    save_model(build(vocabulary=1024), model)
    own = json.loads((data / TOKENIZER).read_text())
    (model / TOKENIZER).write_text(json.dumps(own, indent=3))
    cli.main(["lm", "eval", str(model), "--data", str(data)])
    assert "validation: perplexity" in capsys.readouterr().out
    load_tokenizer("bytes").save(model)
    with pytest.raises(SystemExit):
        cli.main(["lm", "eval", str(model), "--data", str(data)])
    assert "data must have the tokens of the model" in capsys.readouterr().err


def test_bad_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="length must be positive, or 0 for the whole split, but is -1"):
        EvaluateConfig(model=tmp_path, length=-1)
    with pytest.raises(ValueError, match="batch must be at least 1, but is 0"):
        EvaluateConfig(model=tmp_path, batch=0)
    with pytest.raises(ValueError, match=r"out must lie in a folder that exists, but is .*nowhere"):
        EvaluateConfig(model=tmp_path, out=tmp_path / "nowhere" / "losses.json")
