"""`naju lm export`: there and back, what goes with a model, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from naju import LanguageModel, ModelConfig, cli
from naju.lm.export import ExportConfig, run_export
from naju.lm.folder import load_model, save_model
from naju.lm.tokenizer import load_tokenizer


@pytest.fixture
def plain(tmp_path) -> Path:
    """The folder of a small hybrid over bytes, in bfloat16, with its tokenizer."""
    tokenizer = load_tokenizer("bytes")
    model = LanguageModel(ModelConfig(tokenizer.vocabulary.size, 16, 2, ["naju", "attention"], embedding_std=1.0))
    save_model(model.bfloat16(), tmp_path / "plain")
    tokenizer.save(tmp_path / "plain")
    return tmp_path / "plain"


def test_to_hugging_face_and_back_is_the_same_files(plain, tmp_path, capsys):
    cli.main(["lm", "export", str(plain), str(tmp_path / "hf")])
    cli.main(["lm", "export", str(tmp_path / "hf"), str(tmp_path / "back"), "--to", "plain"])
    told = capsys.readouterr()
    assert f"wrote {tmp_path / 'back'}" in told.out
    assert told.err == ""  # no progress bars of transformers
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (plain / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "plain"]  # nothing left beside


def test_an_exported_model_writes_what_the_plain_one_writes(plain, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import naju.hf  # noqa: F401 (registers the model)

    run_export(ExportConfig(model=plain, out=tmp_path / "hf"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    tokenizer, own = AutoTokenizer.from_pretrained(tmp_path / "hf"), load_tokenizer("bytes")
    prompt = tokenizer("naïve", return_tensors="pt")
    assert prompt.input_ids[0].tolist() == own.encode("naïve")
    assert tokenizer.eos_token_id == model.config.eos_token_id == own.vocabulary.end_of_text
    out = model.generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    want = load_model(plain).double().generate(prompt.input_ids, 8, eos_token=own.vocabulary.end_of_text)
    assert torch.equal(out, want)


def test_a_tokenizer_can_be_named_and_must_fit(plain, tmp_path):
    (plain / "tokenizer.json").unlink()
    run_export(ExportConfig(model=plain, out=tmp_path / "without", to="plain"))
    assert not (tmp_path / "without" / "tokenizer.json").exists()
    run_export(ExportConfig(model=plain, out=tmp_path / "with", to="plain", tokenizer="bytes"))
    assert load_tokenizer(tmp_path / "with" / "tokenizer.json").encode("a") == [97]
    with pytest.raises(ValueError, match=r"tokenizer 'sample' must fit the model's vocabulary of 257"):
        run_export(ExportConfig(model=plain, out=tmp_path / "misfit", tokenizer="sample"))
    assert not (tmp_path / "misfit").exists()


def test_what_is_there_is_not_overwritten(plain, tmp_path):
    before = (plain / "config.json").read_bytes()
    with pytest.raises(FileExistsError, match="out must be a new folder"):
        run_export(ExportConfig(model=plain, out=plain))
    assert (plain / "config.json").read_bytes() == before


def test_a_failed_export_leaves_nothing(plain, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("naju.lm.export.save_model", full)
    with pytest.raises(OSError, match="no space"):
        run_export(ExportConfig(model=plain, out=tmp_path / "out", to="plain"))
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_a_missing_model_is_one_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["lm", "export", str(tmp_path / "nowhere"), str(tmp_path / "out")])
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert "holds no language model" in told
    assert told.count("\n") == 1
