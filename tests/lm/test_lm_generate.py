"""`naju lm generate`: the model's own tokens as text, in one go or stopped and continued."""

from pathlib import Path
from typing import Any

import pytest
import torch

from naju import LanguageModel, ModelConfig, cli
from naju.lm import generate as module
from naju.lm.folder import save_model
from naju.lm.generate import GenerateConfig, Pause, Sampling, Writer
from naju.lm.tokenizer import Tokenizer, load_tokenizer

GREEDY = Sampling(temperature=0.0)
PROMPT = "To be, or né"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


def build(mixer: str | list[str] = "naju", vocabulary: int = 257, d_model: int = 16) -> LanguageModel:
    """Its logits are far apart, so that rounding changes no token, and it does not repeat itself at once."""
    config = ModelConfig(vocabulary, d_model, 2, mixer, tie_embeddings=False, embedding_std=1.0)
    return LanguageModel(config).eval()


def scripted(monkeypatch: pytest.MonkeyPatch, tokens: list[int]) -> None:
    """The model's choice from now on."""
    script = iter(tokens)
    monkeypatch.setattr(module, "next_token", lambda *arguments: torch.tensor([next(script)]))


def written_ids(writer: Writer, count: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens behind the text."""
    ids: list[int] = []
    with monkeypatch.context() as patch:
        honest = module.next_token

        def noted(*arguments: object) -> torch.Tensor:
            token = honest(*arguments)  # type: ignore[arg-type]
            ids.append(int(token))
            return token

        patch.setattr(module, "next_token", noted)
        list(writer.write(count, GREEDY))
    return ids


@pytest.mark.parametrize("mixer", ["naju", "mamba2", ["naju", "transformer"]], ids=str)
def test_the_tokens_are_those_of_the_models_own_generation(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, mixer: str | list[str]
) -> None:
    model = build(mixer)
    prompt = torch.tensor([tokenizer.encode(PROMPT)])
    expected = model.generate(prompt, 40, eos_token=256)[0, prompt.shape[1] :].tolist()
    writer = Writer(model, tokenizer)
    assert writer.read(PROMPT) == PROMPT
    assert written_ids(writer, 40, monkeypatch) == expected
    assert len(set(expected)) > 3


@pytest.mark.parametrize("mixer", ["naju", ["naju", "transformer"]], ids=str)
@pytest.mark.parametrize("cut", [0, 1, 7])
def test_a_text_that_was_stopped_goes_on_as_if_it_had_not(
    tokenizer: Tokenizer, tmp_path: Path, mixer: str | list[str], cut: int
) -> None:
    model = build(mixer)
    whole = Writer(model, tokenizer)
    expected = whole.read(PROMPT) + "".join(whole.write(30, GREEDY)) + whole.finish()
    first = Writer(model, tokenizer)
    text = first.read(PROMPT) + "".join(first.write(cut, GREEDY))
    first.pause().save(tmp_path / "state")
    second = Writer(model, tokenizer, Pause.load(tmp_path / "state"))
    assert text + "".join(second.write(30 - cut, GREEDY)) + second.finish() == expected


def test_a_prompt_may_be_read_in_two_sittings(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    whole, first = Writer(model, tokenizer), Writer(model, tokenizer)
    whole.read(PROMPT)
    first.read(PROMPT[:5])
    second = Writer(model, tokenizer, first.pause())
    second.read(PROMPT[5:])
    assert written_ids(second, 20, monkeypatch) == written_ids(whole, 20, monkeypatch)


def test_half_a_character_waits_for_the_next_sitting(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    scripted(monkeypatch, list("a\u20acb".encode()))
    first = Writer(model, tokenizer)
    assert list(first.write(3, GREEDY)) == ["a", "", ""]
    first.pause().save(tmp_path / "state")
    second = Writer(model, tokenizer, Pause.load(tmp_path / "state"))
    assert list(second.write(2, GREEDY)) == ["\u20ac", "b"]
    third = Writer(model, tokenizer, Pause.load(tmp_path / "state"))
    assert third.read("new") == "\ufffdnew"


def test_an_end_of_text_ends_it_and_a_new_document_begins_after_one(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, end = build(), tokenizer.vocabulary.end_of_text
    expected = model.generate(torch.tensor([[end]]), 10, eos_token=end)[0, 1:].tolist()
    assert written_ids(Writer(model, tokenizer), 10, monkeypatch) == expected
    scripted(monkeypatch, [97, end, 98])
    writer = Writer(model, tokenizer)
    assert list(writer.write(10, GREEDY)) == ["a"]
    assert writer.pause().last.tolist() == [end]


def test_a_seed_repeats_and_another_differs(tokenizer: Tokenizer) -> None:
    model = build()

    def text(seed: int) -> str:
        return "".join(Writer(model, tokenizer).write(60, Sampling(temperature=2.0, seed=seed)))

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_ids_that_the_tokenizer_does_not_have_are_never_drawn(tokenizer: Tokenizer) -> None:
    model = build(vocabulary=300)
    assert model.head is not None
    with torch.no_grad():
        model.head.weight[257:] = 100 * model.head.weight[:43].abs().max() * torch.randn(43, 16).sign()
    ids = []
    writer = Writer(model, tokenizer)
    for _ in range(20):
        list(writer.write(1, GREEDY))
        ids.append(int(writer.pause().last))
    assert max(ids) <= 256


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"mixer": "transformer"}, "state must have the model's layers, .*, but has NajuState, NajuState"),
        ({"d_model": 32}, "state does not fit this mixer"),
    ],
    ids=["mixer", "width"],
)
def test_the_state_of_another_model_is_refused(tokenizer: Tokenizer, other: dict[str, Any], told: str) -> None:
    writer = Writer(build(), tokenizer)
    with pytest.raises(ValueError, match=told):
        list(Writer(build(**other), tokenizer, writer.pause()).write(1, GREEDY))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="'bytes' must fit the model's vocabulary of 256, but has 257 tokens"):
        Writer(build(vocabulary=256), tokenizer)


def test_bad_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="temperature must be 0"):
        Sampling(temperature=-1)
    with pytest.raises(ValueError, match="max_new_tokens must not be negative, but is -1"):
        GenerateConfig(model=tmp_path, max_new_tokens=-1)
    with pytest.raises(ValueError, match="save_state must lie in a folder that exists, but is "):
        GenerateConfig(model=tmp_path, save_state=tmp_path / "nowhere" / "state")


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    save_model(build(), tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    return tmp_path / "model"


def generate(folder: Path, *options: object) -> None:
    cli.main(["lm", "generate", str(folder), "--temperature", "0", "--device", "cpu", *map(str, options)])


def test_the_command_continues_from_its_state(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate(folder, "--prompt", PROMPT, "--max-new-tokens", 24)
    whole = capsys.readouterr().out
    state = folder / "state"
    generate(folder, "--prompt", PROMPT, "--max-new-tokens", 11, "--save-state", state)
    first = capsys.readouterr().out.removesuffix("\n")
    generate(folder, "--max-new-tokens", 13, "--state", state)
    assert first + capsys.readouterr().out == whole
    assert whole.startswith(PROMPT)


def test_the_command_shows_each_piece_as_it_comes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def chosen(*arguments: object) -> torch.Tensor:
        shown.append("a token is drawn")
        return torch.tensor([97])

    monkeypatch.setattr(module, "next_token", chosen)
    monkeypatch.setattr(module, "_show", shown.append)
    generate(folder, "--prompt", "go", "--max-new-tokens", 2)
    assert shown == ["go", "a token is drawn", "a", "a token is drawn", "a", "", "\n"]


def test_an_interrupted_command_saves_its_state(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = iter([97, 98])

    def chosen(*arguments: object) -> torch.Tensor:
        try:
            return torch.tensor([next(drawn)])
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(module, "next_token", chosen)
    with pytest.raises(SystemExit) as stop:
        generate(folder, "--prompt", "x", "--save-state", folder / "state")
    assert stop.value.code == 130
    assert capsys.readouterr().out == "xab\n"
    assert Pause.load(folder / "state").last.tolist() == [98]


def test_a_model_without_a_tokenizer_says_what_to_give(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SystemExit) as stop:
        generate(folder)
    assert stop.value.code == 2
    assert "has no tokenizer.json; say with --tokenizer which one to use" in capsys.readouterr().err
    generate(folder, "--tokenizer", "bytes", "--max-new-tokens", 1)


def test_words_keep_the_blank_that_a_decoder_takes_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("tokenizers")
    vocabulary = {"<eos>": 0, "▁the": 1, "▁king": 2, "▁and": 3, "▁queen": 4}
    engine = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token="<eos>"))
    engine.pre_tokenizer, engine.decoder = library.pre_tokenizers.Metaspace(), library.decoders.Metaspace()
    tokenizer = Tokenizer(engine, "words")
    writer = Writer(build(vocabulary=5), tokenizer)
    scripted(monkeypatch, [3, 1, 4])
    assert writer.read("the king") + "".join(writer.write(1, GREEDY)) == "the king and"
    assert "".join(Writer(build(vocabulary=5), tokenizer, writer.pause()).write(2, GREEDY)) == " the queen"


def test_a_model_knows_the_end_of_text_it_learned_with(tmp_path: Path, tokenizer: Tokenizer) -> None:
    other = Tokenizer(tokenizer._engine, "bytes", 7)
    other.save_with_model(tmp_path)
    assert load_tokenizer(tmp_path).vocabulary.end_of_text == 7
    (tmp_path / "end_of_text.json").write_text("[]")
    with pytest.raises(ValueError, match="does not tell the end of text"):
        load_tokenizer(tmp_path)
