"""Files that are damaged, of another kind, empty, or claim too much: one sentence that names them, and exit code 2."""

import json
import shutil
from typing import get_args

import numpy as np
import pytest
import torch
from parser_targets import TARGETS, model
from safetensors.torch import save_file

from naju import cli
from naju.bench.compare import check_sizes
from naju.lab.diagnostic_run import load_run_model
from naju.lm.folder import load_model, save_model
from naju.lm.generate import Pause, Writer
from naju.lm.token_files import MANIFEST, open_split, read_manifest
from naju.lm.tokenizer import load_tokenizer
from naju.mixers.state import FORMAT, State
from naju.models import LanguageModel, ModelConfig, ModelState


def refused(capsys, *arguments):
    """What `naju arguments` says when it exits with 2."""
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    told = capsys.readouterr().err
    assert stop.value.code == 2
    assert told.startswith("naju: ")
    assert told.count("\n") == 1
    return told


@pytest.fixture
def tokens(tmp_path):
    folder = tmp_path / "tokens"
    folder.mkdir()
    TARGETS["token-files"].write(folder)
    return folder


@pytest.fixture
def trained(tmp_path):
    save_model(model(), tmp_path / "model")
    return tmp_path / "model"


def rewrite(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


MANIFESTS = (
    {"splits": []},
    {"splits": None},
    {"splits": {"train": 7}},
    {"splits": {"train": {"tokens": -1, "documents": 3}}},
    {"splits": {"train": {"tokens": 40, "documents": 2}}},
    {"files": {}},
    {"files": {"train.tokens": 3, "train.documents": 3}},
    {"dtype": "O"},
    {"dtype": "<f8"},
    {"vocab_size": "17"},
    {"vocab_size": 10**30},
    {"vocab_size": 0},
    {"end_of_text": 99},
    {"tokenizer": {"bytes": 1}},
)


@pytest.mark.parametrize("changes", MANIFESTS, ids=str)
def test_a_manifest_that_says_something_else_is_refused(changes, tokens):
    rewrite(tokens / MANIFEST, **changes)
    with pytest.raises(ValueError, match="is damaged"):
        open_split(tokens, "train")


@pytest.mark.parametrize("name", ["../train", "a/b", "/etc/passwd", "a\\b", "", "a\x00b"])
def test_a_manifest_cannot_name_a_file_elsewhere(name, tokens):
    rewrite(tokens / MANIFEST, splits={name: {"tokens": 1, "documents": 1}})
    with pytest.raises(ValueError, match="plain name"):
        read_manifest(tokens)


def test_documents_that_do_not_rise_are_refused(tokens):
    np.array([0, 30, 7, 40], "<u8").tofile(tokens / "train.documents")
    with pytest.raises(ValueError, match=r"train\.documents is damaged: its offsets"):
        open_split(tokens, "train")


@pytest.mark.parametrize("kind", ["<u2", "<u4"])
def test_a_token_outside_the_vocabulary_is_named_before_it_goes_anywhere(kind, tokens, trained, capsys):
    largest = 2**16 - 1 if kind == "<u2" else 2**32 - 1
    if kind == "<u4":
        wide = np.fromfile(tokens / "train.tokens", "<u2").astype(kind)
        wide.tofile(tokens / "train.tokens")
        manifest = json.loads((tokens / MANIFEST).read_text())
        manifest["files"]["train.tokens"]["bytes"] *= 2
        rewrite(tokens / MANIFEST, dtype=kind, vocab_size=2**17, files=manifest["files"])
        save_model(LanguageModel(ModelConfig(2**17, 8, 1, mixer_options={"d_state": 2})), trained)
    stored = np.fromfile(tokens / "train.tokens", kind)
    stored[11] = largest
    stored.tofile(tokens / "train.tokens")
    told = refused(capsys, "lm", "eval", str(trained), "--data", str(tokens), "--split", "train")
    assert f"but one is {largest:,}: the token files are damaged" in told


CONFIGS = (
    ({"n_layers": 10**12}, "too few for 1000000000000 layers"),
    ({"d_model": 10**15}, "overflowed"),
    ({"mixer": None}, "mixer must be a name"),
    ({"mixer": "x"}, "unknown mixer 'x'"),
    ({"mixer_options": {"d_state": "4"}}, "d_state must be an int, but is str"),
    ({"mixer_options": {"d_state": 8}}, "size mismatch"),
    ({"norm_eps": "x"}, "norm_eps"),
    ({"bogus": 1}, "bogus"),
    ({"bidirectional": True}, "bidirectional"),
)


@pytest.mark.parametrize(("changes", "told"), CONFIGS, ids=lambda value: str(value)[:40])
def test_a_models_config_that_says_something_else_is_refused(changes, told, trained, tokens, capsys):
    rewrite(trained / "config.json", **changes)
    assert told in refused(capsys, "lm", "eval", str(trained), "--data", str(tokens))


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"3", b"\xff\xfe\x00", b'{"a": NaN'])
def test_json_that_is_none_is_refused(content, trained, tokens, capsys):
    for path, folder in ((trained / "config.json", trained), (tokens / MANIFEST, tokens)):
        good = path.read_bytes()
        path.write_bytes(content)
        assert folder.name in refused(capsys, "lm", "eval", str(trained), "--data", str(tokens))
        path.write_bytes(good)


def test_weights_that_are_not_finite_end_an_evaluation_and_a_text(trained, tokens, capsys):
    damaged = load_model(trained)
    torch.nn.init.constant_(damaged.backbone.embedding.weight, float("nan"))
    save_model(damaged, trained)
    assert "no finite perplexity" in refused(capsys, "lm", "eval", str(trained), "--data", str(tokens))
    for temperature in ("0", "1"):
        arguments = ("--tokenizer", "bytes", "--temperature", temperature, "--prompt", "a")
        with pytest.raises(SystemExit, match="2"):
            cli.main(("lm", "generate", str(trained), *arguments))
        assert "logits are not finite" in capsys.readouterr().err


def write_state(path, kind, **tensors):
    save_file(tensors, path, metadata={"format": FORMAT, "kind": json.dumps(kind)})


X = torch.zeros(1, 2)
STATES = (
    ("text", {}),
    (3, {}),
    ({"class": "HGRNState", "fields": [None]}, {"x": X}),
    ({"class": "HGRNState", "fields": {"x": {"class": "HGRNState", "fields": {"x": None}}}}, {"x.x": X}),
    ({"class": "HGRNState", "fields": {"x": []}}, {}),
    ({"class": "HGRNState", "fields": {"x": None}}, {"x": torch.tensor(1.0)}),
    ({"class": "Nobody", "fields": {}}, {}),
    ({"class": "ModelState", "fields": {"layers": []}}, {}),
    ({"class": "ModelState", "fields": {"layers": [None]}}, {"layers.0": X}),
    ({"class": "MambaState", "fields": {"x": None, "u_tail": None}}, {"x": X, "u_tail": torch.zeros(3, 2)}),
)


@pytest.mark.parametrize(("kind", "tensors"), STATES, ids=lambda value: str(value)[:60])
def test_a_state_file_of_another_make_is_refused(kind, tensors, tmp_path):
    write_state(tmp_path / "state", kind, **tensors)
    with pytest.raises(ValueError, match="does not hold a complete state"):
        State.load(tmp_path / "state")


def test_a_state_of_unsigned_numbers_is_refused(tmp_path):
    """Torch cannot add them to positions, and would say so in words of its own."""
    write_state(
        tmp_path / "state", {"class": "HGRNState", "fields": {"x": None}}, x=torch.zeros(1, 2, dtype=torch.uint64)
    )
    with pytest.raises(ValueError, match=r"no state holds .*uint64"):
        State.load(tmp_path / "state")


def test_a_state_nested_without_end_is_refused(tmp_path):
    save_file({"x": X}, tmp_path / "state", metadata={"format": FORMAT, "kind": "[" * 100_000})
    with pytest.raises(ValueError, match="does not hold a complete state"):
        State.load(tmp_path / "state")


@pytest.mark.parametrize(
    ("last", "held", "told"),
    [
        (torch.tensor([99_999]), torch.zeros(1, 0, dtype=torch.long), "last"),
        (torch.tensor([-1]), torch.zeros(1, 0, dtype=torch.long), "last"),
        (torch.tensor([1.5]), torch.zeros(1, 0, dtype=torch.long), "last"),
        (torch.tensor([1]), torch.tensor([[10**6]]), "held"),
        (torch.tensor([1, 2]), torch.zeros(2, 0, dtype=torch.long), "one text"),
    ],
)
def test_a_pause_with_tokens_that_nobody_knows_is_refused(last, held, told):
    paused = Pause(model().init_state(len(last)), last, held)
    with pytest.raises(ValueError, match=told):
        Writer(model(), load_tokenizer("bytes"), paused)


def test_a_state_of_another_models_size_is_refused(trained, tmp_path, capsys):
    wide = LanguageModel(ModelConfig(257, 16, 1, mixer_options={"d_state": 2}))
    Pause(wide.init_state(1), torch.tensor([1]), torch.zeros(1, 0, dtype=torch.long)).save(tmp_path / "state")
    with pytest.raises(SystemExit, match="2"):
        cli.main(("lm", "generate", str(trained), "--tokenizer", "bytes", "--state", str(tmp_path / "state")))
    assert "does not fit this mixer" in capsys.readouterr().err
    assert isinstance(Pause.load(tmp_path / "state").model, ModelState)


def test_a_run_whose_config_lost_a_field_makes_no_model(tmp_path):
    TARGETS["run-store"].write(tmp_path)
    with pytest.raises(ValueError, match="its config and checkpoint make no model"):
        load_run_model(tmp_path / "runs" / "diagnostics" / "one")


def test_too_large_a_size_is_a_sentence_about_memory(capsys):
    told = refused(capsys, "tasks", "show", "T1", "--length", str(10**14))
    assert "not enough memory for these sizes" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("bench", "scan", "--device", "nonsense"), "device must be a name"),
        (("bench", "scan", "--device", "meta"), "only knows shapes"),
        (("bench", "scan", "--length", "-3"), "length must be at least 1, but is -3"),
        (("bench", "forward", "--lengths", "0"), "lengths must be at least 1, but is 0"),
        (("bench", "training", "--lengths", "4", "--tokens", "0"), "tokens must be at least 1, but is 0"),
        (("reproduce", "diagnostics", "--plan", "--seeds", "1-99999999999"), "seeds must be at most 1,000 a range"),
        (("runs", "rm"), "names must name at least one run"),
    ],
)
def test_an_option_that_makes_no_sense_is_a_sentence(arguments, told, capsys):
    assert told in refused(capsys, *arguments)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"caf\xe9", b"\x80" * 10])
def test_text_in_another_encoding_is_refused_with_its_place(content, tmp_path, capsys):
    (tmp_path / "text.txt").write_bytes(b"good \n" + content)
    out = str(tmp_path / "out")
    arguments = ("lm", "prepare", "--source", str(tmp_path / "text.txt"), "--out", out, "--tokenizer", "bytes")
    assert "must be UTF-8, but byte" in refused(capsys, *arguments, "--processes", "1")
    assert not (tmp_path / "out" / MANIFEST).exists()
    shutil.rmtree(out)


def test_a_tokenizer_that_cannot_encode_is_refused(tmp_path):
    load_tokenizer("bytes").save(tmp_path)
    path = tmp_path / "tokenizer.json"
    described = json.loads(path.read_text())
    described["model"] |= {"unk_token": "", "vocab": {}}
    path.write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"tokenizer 'tokenizer\.json' cannot encode the text"):
        load_tokenizer(path).encode("some text")


@pytest.mark.parametrize("command", get_args(cli.Benches), ids=lambda command: get_args(command)[0].__name__)
def test_the_sizes_that_a_bench_has_by_default_make_sense(command):
    check_sizes(get_args(command)[0]())
