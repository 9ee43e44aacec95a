"""Training language models: what is learned, what is saved, and that a killed run ends as if nothing had happened."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from processes import CONTEXT
from tiny_language import END, PLACE, prepare, run, split
from torch.nn import functional as F

from naju.cli import main
from naju.layers.diagonal_scan import diagonal_scan
from naju.lm.config import Execution, ModelSettings, Protocol
from naju.lm.distributed import joined
from naju.lm.folder import load_model
from naju.lm.train import Reader, build_learner, check_run, train_language_model
from naju.models import LanguageModel
from naju.training import Reporter, StoppedError
from naju.training.checkpoint import BEFORE, NEWEST
from naju.training.metrics import METRICS, read_metrics

WAYS = {
    "windows": {},
    "documents": {"documents": "reset"},
    "lanes": {"carry_state": True},
    "lanes of documents": {"carry_state": True, "documents": "reset"},
    "transformer": {"mixer": "transformer", "options": ("n_heads=2",)},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("data"))


def go(settings, folder, *, stop_after=None, notes=None, place=PLACE):
    folder.mkdir(exist_ok=True)
    seen = []
    reporter = Reporter(
        progress=lambda step, loss: seen.append(step),
        note=(lambda sentence: None) if notes is None else notes.append,
        stop=lambda: stop_after is not None and bool(seen) and seen[-1] >= stop_after,
    )
    return train_language_model(settings, folder, place, reporter)


def ending(folder):
    best = load_model(folder / "best").state_dict()
    return (folder / METRICS).read_bytes(), {name: tensor.numpy().tobytes() for name, tensor in best.items()}


@pytest.fixture(scope="module", params=WAYS)
def whole(request, data, tmp_path_factory):
    """A run that nobody disturbed: its settings, its ending and its result."""
    folder, settings = tmp_path_factory.mktemp("whole"), run(data, **WAYS[request.param])
    result = go(settings, folder)
    return settings, ending(folder), result


def test_it_learns(whole):
    _, (metrics, _), result = whole
    rows = [json.loads(line) for line in metrics.decode().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["step"] for row in rows if row["validation_loss"] is not None] == [4, 8, 12]
    assert rows[-1]["tokens"] == 12 * 128
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.2
    assert result["validation_loss"] == min(row["validation_loss"] or math.inf for row in rows)
    assert result["test_perplexity"] == math.exp(result["test_loss"])


@pytest.mark.parametrize("stops", [[1], [4], [3, 5, 11]])
def test_stopped_it_goes_on_to_the_same_end(whole, tmp_path, stops):
    settings, expected, result = whole
    for step in stops:
        with pytest.raises(StoppedError, match=f"stopped after update {step} of 12"):
            go(settings, tmp_path, stop_after=step)
    again = go(settings, tmp_path)
    assert ending(tmp_path) == expected
    assert again["test_loss"] == result["test_loss"]


def test_a_damaged_checkpoint_is_reported_and_the_one_before_used(data, tmp_path):
    settings, notes = run(data), []
    go(settings, tmp_path / "whole")
    with pytest.raises(StoppedError):
        go(settings, tmp_path / "hurt", stop_after=7)
    newest = tmp_path / "hurt" / NEWEST
    newest.write_bytes(newest.read_bytes()[:-9])
    assert (tmp_path / "hurt" / BEFORE).exists()
    go(settings, tmp_path / "hurt", notes=notes)
    assert [f"checkpoint {NEWEST} is damaged" in note for note in notes] == [True]
    assert ending(tmp_path / "hurt") == ending(tmp_path / "whole")


def test_as_many_checkpoints_are_kept_as_asked_for(data, tmp_path):
    go(run(data, execution={"keep": 4}), tmp_path)
    assert len(list(tmp_path.glob("checkpoint*.safetensors"))) == 4


def test_a_model_lost_between_its_checkpoint_and_best_is_saved_again(data, tmp_path):
    settings = run(data)
    with pytest.raises(StoppedError):
        go(settings, tmp_path, stop_after=4)
    lost = tmp_path / "best" / "model.safetensors"
    content = lost.read_bytes()
    lost.unlink()
    with pytest.raises(StoppedError):
        go(settings, tmp_path, stop_after=5)
    assert lost.read_bytes() == content


def test_the_tokenizer_goes_with_the_best_model(tmp_path):
    folder = prepare(tmp_path / "data")
    (folder / "tokenizer.json").write_text("{}")
    go(run(folder), tmp_path / "run")
    assert (tmp_path / "run" / "best" / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "run" / "best" / "end_of_text.json").read_text()) == {"end_of_text": END}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_with_other_metrics_than_it_had_a_run_begins_again(data, tmp_path, parallel):
    settings, notes = run(data, execution={"parallel": parallel}), []
    with joined(settings.execution) as place:
        go(settings, tmp_path / "whole", place=place)
        with pytest.raises(StoppedError):
            go(settings, tmp_path / "hurt", stop_after=7, place=place)
        metrics = tmp_path / "hurt" / METRICS
        metrics.write_bytes(metrics.read_bytes()[:50])
        with pytest.raises(StoppedError):
            go(settings, tmp_path / "hurt", notes=notes, stop_after=3, place=place)
        go(settings, tmp_path / "hurt", notes=notes, place=place)
    assert len(notes) == 1
    assert notes[0].endswith("at the checkpoint of step 7; the run begins again")
    assert ending(tmp_path / "hurt") == ending(tmp_path / "whole")


def test_micro_batches_add_up_to_the_update(data, tmp_path):
    for name, tokens in (("at once", 1000), ("in eight", 16)):
        go(run(data, execution={"micro_tokens": tokens}), tmp_path / name)
    first, second = ([row["loss"] for row in read_metrics(tmp_path / name)] for name in ("at once", "in eight"))
    np.testing.assert_allclose(first, second, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.torch.jit.script.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("mixer", ["naju", "mamba"])
def test_compiled_it_learns_the_same_and_leaves_public_kernels_alone(data, tmp_path, monkeypatch, mixer):
    """Traced as on a GPU, but run by torch's own operations; Mamba's scan stands for one with a public kernel."""
    compile_module, scans = torch.nn.Module.compile, []

    def alone(*arguments, **options):
        scans.append(torch.compiler.is_compiling())
        return diagonal_scan(*arguments, **options)

    alone.__name__ = "diagonal_scan"
    monkeypatch.setattr("naju.training.compiled.scans_outside", lambda: [alone])
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compile_module(module, backend="aot_eager"))
    plain = go(run(data, mixer=mixer), tmp_path / "plain")
    torch.compiler.reset()
    compiled = go(run(data, mixer=mixer, execution={"compile": True}), tmp_path / "compiled")
    assert compiled["validation_loss"] == pytest.approx(plain["validation_loss"], rel=1e-4)
    assert any(scans) is False
    assert (len(scans) > 0) == (mixer == "mamba")


def test_a_text_of_less_than_an_update_is_read_again_and_again(tmp_path):
    short = prepare(tmp_path / "data", train=80, validation=40)
    assert math.isfinite(go(run(short), tmp_path / "run")["validation_loss"])


def test_mixers_read_the_same_tokens(data):
    first, second = (Reader(run(data, mixer=mixer), PLACE) for mixer in ("naju", "hgrn"))
    starts = np.arange(8) * 50
    for one, other in zip(first.update(split(data), starts), second.update(split(data), starts), strict=True):
        assert torch.equal(one.tokens, other.tokens)


def test_a_split_is_measured_whole(data):
    """Every token but the first counts once, the last short window included."""
    settings = run(data)
    learner, text = build_learner(settings, 17, PLACE), split(data, "validation")
    tokens = torch.tensor(text.tokens[:].astype(np.int64))
    losses = []
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, 16):
            window = tokens[start : start + 17]
            logits, _ = learner.model(window[None, :-1])
            losses.append(F.cross_entropy(logits[0], window[1:], reduction="sum"))
    expected = float(sum(losses)) / (len(tokens) - 1)
    assert Reader(settings, PLACE).loss(learner, text) == pytest.approx(expected, rel=1e-6)


def test_the_carried_state_is_that_of_the_text_before(data):
    """Two updates with carried state end in the state of one reading over both, if nothing is learned between them."""
    settings = run(data, carry_state=True, lr=1e-30, weight_decay=0.0)
    learner, reader, text = build_learner(settings, 17, PLACE), Reader(settings, PLACE), split(data)
    starts = np.arange(8) * 200
    learner.update(reader.update(text, starts + 64), reader.micro_steps)
    learner.forget()
    for step in range(2):
        learner.update(reader.update(text, starts + 16 * step), reader.micro_steps)
    rows = torch.tensor(text.tokens[starts[:, None] + np.arange(32)].astype(np.int64))
    _, state = learner.model.backbone(rows)
    for name, tensor in state.tensors().items():
        torch.testing.assert_close(learner.carried.tensors()[name], tensor)


def test_which_parameters_decay(data):
    groups = build_learner(run(data, weight_decay=0.1), 17, PLACE).optimizer.param_groups
    learner = build_learner(run(data, weight_decay=0.1, mixer="mamba"), 17, PLACE)
    decayed = {id(p) for group in learner.optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, p in learner.model.named_parameters() if id(p) in decayed}
    assert "backbone.embedding.weight" in names
    assert not [name for name in names if name.endswith((".bias", ".D", "A_log", "norm.weight"))]
    assert {group["weight_decay"] for group in groups} == {0.0, 0.1}
    for mixer, free in {"rwkv": (".bias", "norm.weight", ".bonus", ".mix"), "mlstm": (".bias", "norm.weight")}.items():
        learner = build_learner(run(data, weight_decay=0.1, mixer=mixer, options=("n_heads=2",)), 17, PLACE)
        decayed = {id(p) for group in learner.optimizer.param_groups if group["weight_decay"] for p in group["params"]}
        assert not [n for n, p in learner.model.named_parameters() if id(p) in decayed and n.endswith(free)]
    everything = build_learner(run(data, weight_decay=0.1, decay_all=True), 17, PLACE).optimizer.param_groups
    assert {group["weight_decay"] for group in everything} == {0.1}


def test_the_papers_models_have_the_papers_sizes():
    sizes = {("naju",): 18.8, ("naju", "gate_rank=64"): 16.5, ("naju", "gate_rank=32"): 16.1, ("transformer",): 17.6}
    sizes |= {("mamba", "d_state=64"): 15.9, ("mamba2", "d_state=64"): 15.5}
    for (mixer, *options), millions in sizes.items():
        with torch.device("meta"):
            model = LanguageModel(ModelSettings(mixer=mixer, options=tuple(options)).config(50_257))
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.06), mixer


def test_the_defaults_are_the_papers():
    protocol = Protocol()
    assert (protocol.rows, protocol.updates) == (32, 1_200_000_000 // 32_768)
    assert (protocol.warmup_ratio, protocol.clip) == (0.05, 1.0)
    assert ModelSettings(mixer="transformer").mixer_options() == {"positions": "rotary"}
    assert not Execution().uses_bf16(torch.device("cpu"))
    assert Execution().uses_bf16(torch.device("cuda"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tokens_per_update": 100}, "tokens_per_update must be a positive multiple of the length 16, but is 100"),
        ({"tokens": 5}, "tokens must allow one update of 128 tokens, but is 5"),
        ({"betas": (0.9, 1.0)}, r"betas must lie in \[0, 1\), but are 0.9, 1.0"),
        ({"options": ("f_bias=-Infinity",)}, "options must be finite, but f_bias is -Infinity"),
        ({"options": ("d_state",)}, "options must look like name=value, but one is 'd_state'"),
        ({"execution": {"keep": 1}}, "keep must be at least 2, so that one is good if another is not, but is 1"),
        ({"execution": {"log_every": 0}}, "log_every must be a positive integer, but is 0"),
        ({"execution": {"parallel": "fsdp", "context_ranks": 2}}, "context_ranks must be 1 with parallel 'fsdp'"),
        ({"carry_state": True, "execution": {"context_ranks": 2}}, "carry_state must be off with context_ranks 2"),
        ({"carry_state": True, **WAYS["transformer"]}, "carry_state must be off with mixer 'transformer'"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(data, tmp_path, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        go(run(data, **changes), tmp_path)


OPTIONS = ["--d-model", "16", "--n-layers", "2", "--options", "d_state=4", "--length", "16", "--device", "cpu"]
OPTIONS += ["--tokens-per-update", "128", "--log-every", "1", "--validations", "5", "--save-seconds", "0.1"]


def command(data, out, updates):
    return ["lm", "train", *OPTIONS, "--data", str(data), "--out", str(out), "--tokens", str(128 * updates)]


def wait_for_a_line(out, before, is_alive):
    """Until the run has said more than it had."""
    deadline = time.monotonic() + 30
    while is_alive() and len(read_metrics(out)) <= before and time.monotonic() < deadline:
        time.sleep(0.005)


def in_a_process(settings, folder):
    """A run in a process that is forked from one that has imported everything."""
    process = CONTEXT.Process(target=go_alone, args=(settings, folder))
    process.start()
    return process


def go_alone(settings, folder):
    torch.set_num_threads(1)
    result = go(settings, folder)
    (folder / "result.json").write_text(json.dumps(result))


def test_killed_at_random_moments_five_times_it_ends_the_same(data, tmp_path):
    """Twice while it starts or soon after, three times while it learns, with lines said since the last checkpoint."""
    settings = run(data, tokens=80 * 128, execution={"validations": 5, "save_seconds": 0.1})
    moments, killed = random.Random(0), tmp_path / "killed"
    expected = go(settings, tmp_path / "whole")
    for learns in (True, False, True, False, True):
        before = len(read_metrics(killed))
        process = in_a_process(settings, killed)
        if learns:
            wait_for_a_line(killed, before, process.is_alive)
        time.sleep(moments.uniform(0, 0.1 if learns else 0.5))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    in_a_process(settings, killed).join(30)
    assert ending(killed) == ending(tmp_path / "whole")
    assert json.loads((killed / "result.json").read_text())["test_loss"] == expected["test_loss"]


def test_sigterm_saves_and_exits_with_143(data, tmp_path):
    full = [sys.executable, "-m", "naju.cli", *command(data, tmp_path / "run", 100_000)]
    process = subprocess.Popen(full, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    wait_for_a_line(tmp_path / "run", 0, lambda: process.poll() is None)
    process.terminate()
    _, told = process.communicate(timeout=30)
    assert process.returncode == 143
    assert b"the same command goes on from there" in told
    assert (tmp_path / "run" / NEWEST).exists()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--options", "d_stat=4"], "mixer 'naju' has no option d_stat"),
        (["--mixer", "nonsense"], "unknown mixer 'nonsense'"),
        (["--length", "2048", "--tokens-per-update", "4096", "--tokens", "4096"], "the training split must hold"),
    ],
)
def test_what_is_refused_leaves_no_folder(data, tmp_path, capsys, wrong, told):
    """Else the corrected command would be another run than the one begun."""
    with pytest.raises(SystemExit) as stop:
        main([*command(data, tmp_path / "run", 2), *wrong])
    assert stop.value.code == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_every_validation_is_a_line_and_so_is_going_on(data, tmp_path, capsys):
    arguments = command(data, tmp_path / "run", 10)
    main([*arguments, "--clip", "None"])
    told = capsys.readouterr().err
    rows = [row for row in read_metrics(tmp_path / "run") if row["validation_loss"] is not None]
    assert len(rows) == 5
    for row in rows:
        assert f"update {row['step']} of 10: loss {row['loss']:.3f}, validation perplexity" in told
    (tmp_path / "run" / "result.json").unlink()
    main([*arguments, "--clip", "None"])
    assert "goes on after update 10" in capsys.readouterr().err


def test_another_config_in_the_same_folder_is_refused(data, tmp_path, capsys):
    arguments = command(data, tmp_path / "run", 2)
    main(arguments)
    assert "validation perplexity" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--lr", "0.5"])
    assert stop.value.code == 2
    assert f"was begun with another lr; remove its folder {tmp_path / 'run'}, or" in capsys.readouterr().err


def test_validations_are_as_many_as_asked_for_or_fewer(data, tmp_path):
    go(run(data, tokens=11 * 128, execution={"validations": 6}), tmp_path)
    assert [row["step"] for row in read_metrics(tmp_path) if row["validation_loss"] is not None] == [2, 4, 6, 8, 10, 11]


def test_a_split_of_one_token_is_refused_before_anything_is_trained(tmp_path):
    folder = prepare(tmp_path / "data", train=3000, validation=1)
    with pytest.raises(ValueError, match="the validation split must have two tokens at least, but has 1"):
        check_run(run(folder), PLACE)
