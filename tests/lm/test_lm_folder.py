"""A plain model folder: what was saved is loaded, and nothing half-written or foreign is taken for a model."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from naju import LanguageModel, ModelConfig
from naju.lm import folder as model_folder
from naju.lm.folder import CONFIG, WEIGHTS, load_model, save_model
from naju.mixers import MIXERS


def small(mixer="naju", **options):
    return LanguageModel(ModelConfig(11, 16, 2, mixer=mixer, **options))


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("mixer", [*MIXERS, ("naju", "attention")], ids=str)
def test_a_loaded_model_is_the_saved_one(mixer, tmp_path):
    model = small(mixer)
    save_model(model, tmp_path / "deep" / "folder")
    loaded = load_model(tmp_path / "deep" / "folder")
    assert_same(weights(loaded), weights(model))
    assert loaded.config.mixers == model.config.mixers
    assert all(parameter.requires_grad and not parameter.is_meta for parameter in loaded.parameters())
    tokens = torch.arange(6).unsqueeze(0)
    assert torch.allclose(loaded(tokens)[0], model(tokens)[0], rtol=1e-5, atol=1e-6)


def test_the_folder_of_a_run_is_none_but_says_where_its_model_is(tmp_path):
    save_model(small(), tmp_path / "best")
    with pytest.raises(FileNotFoundError, match=r"holds no language model: it has no config\.json; its best one is in"):
        load_model(tmp_path)


def test_every_field_of_the_config_and_the_precision_survive(tmp_path):
    config = ModelConfig(
        11,
        16,
        2,
        ["naju", "coupled"],
        {"naju": {"d_state": 3}},
        tie_embeddings=False,
        norm_eps=1e-4,
        embedding_std=0.5,
        pooling="mean",
        checkpoint_blocks=True,
    )
    model = LanguageModel(config).bfloat16()
    save_model(model, tmp_path)
    assert load_model(tmp_path).config == config
    assert_same(weights(load_model(tmp_path)), weights(model))


def test_a_tied_embedding_is_on_disk_once(tmp_path):
    save_model(small(), tmp_path)
    assert sum(tensor.shape == (11, 16) for tensor in load_file(tmp_path / WEIGHTS).values()) == 1


def test_loading_draws_no_random_number(tmp_path):
    save_model(small(), tmp_path)
    before = torch.get_rng_state()
    load_model(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("killed_at", [WEIGHTS, CONFIG])
@pytest.mark.parametrize("options", [{}, {"norm_eps": 1e-4}], ids=["same config", "other config"])
def test_killed_while_replacing_a_model_it_is_the_old_the_new_or_none(killed_at, options, tmp_path, monkeypatch):
    old, new = small(), small(**options)
    save_model(old, tmp_path)
    write = model_folder.write_whole

    def write_until(path, content):
        if path.name == killed_at:
            raise KeyboardInterrupt
        write(path, content)

    monkeypatch.setattr(model_folder, "write_whole", write_until)
    with pytest.raises(KeyboardInterrupt):
        save_model(new, tmp_path)
    if options:
        with pytest.raises(FileNotFoundError, match=f"no {CONFIG}"):
            load_model(tmp_path)
    else:
        assert_same(weights(load_model(tmp_path)), weights(old if killed_at == WEIGHTS else new))


def test_a_new_model_in_place_of_another_or_of_a_damaged_one(tmp_path):
    save_model(small("mamba"), tmp_path)
    (tmp_path / CONFIG).write_text("{")
    model = small()
    save_model(model, tmp_path)
    assert_same(weights(load_model(tmp_path)), weights(model))


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        (CONFIG, b"{", "is not a readable JSON file"),
        (CONFIG, b"\xff\xfe", "is not a readable JSON file"),
        (CONFIG, b"[1]", "does not hold the fields of a ModelConfig"),
        (CONFIG, b'{"vocab_size": 7}', "does not hold the fields of a ModelConfig"),
        (CONFIG, b'{"model_type": "gpt2"}', "naju lm export --to plain"),
        (WEIGHTS, b"", "is not a readable safetensors file"),
        (WEIGHTS, b"\x08" + bytes(50), "is not a readable safetensors file"),
    ],
)
def test_damaged_and_foreign_files_are_refused_by_name(file, content, told, tmp_path):
    save_model(small(), tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=told) as refused:
        load_model(tmp_path)
    assert file in str(refused.value)


def test_truncated_weights_are_refused(tmp_path):
    save_model(small(), tmp_path)
    whole = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        load_model(tmp_path)


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path):
    save_model(small(), tmp_path)
    described = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(described | {"n_layers": 3}))
    with pytest.raises(ValueError, match=f"(?s)does not fit its {CONFIG}.*blocks.2"):
        load_model(tmp_path)


def test_a_folder_without_a_model_says_what_it_lacks(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no {CONFIG}"):
        load_model(tmp_path / "nowhere")
