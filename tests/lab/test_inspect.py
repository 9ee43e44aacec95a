"""`naju inspect`: the writes it finds, what it takes away, what it shows of the gates, and what it refuses."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from importlib.resources import files

import pytest
import torch
from opened_pages import needs_chromium, opened, pixels, tables, width_needed

from naju import LanguageModel, ModelConfig, cli
from naju.analysis import layer_input, observe_layer
from naju.lab.diagnostic_run import DiagnosticRun, Examination, ModelSettings, load_run_model, run_diagnostic
from naju.lab.diagnostics import TASKS
from naju.lab.inspect import InspectConfig, build_page, run_inspect
from naju.lab.inspect.events import ANSWER, OTHER, STALE, find_events, remove_each
from naju.lab.inspect.layers import CHANNELS_SHOWN, STYLES, view_layer
from naju.lab.inspect.text import shown
from naju.lab.pages.chart import colour, outline
from naju.lab.report import write_report
from naju.lab.runs import RunFolder
from naju.lm.folder import save_model
from naju.lm.tokenizer import load_tokenizer
from naju.tasks import build_task
from naju.tasks.events import EVENT_LENGTH
from naju.training import Reporter, TrainConfig
from naju.training.checkpoint import Checkpoints

SIZES = {"n_entities": 16, "n_values": 8}
OPTIONS = {
    "T1": {**SIZES, "min_facts": 3, "max_facts": 6},
    "T2": {**SIZES, "n_facts": 6},
    "T3": SIZES,
    "T4": {**SIZES, "n_events": 8, "min_updates": 2, "max_updates": 4},
}
LENGTH = 64


def small_run(task="T4", mixer="naju", **options):
    return DiagnosticRun(
        task=task,
        task_options=OPTIONS[task],
        model=ModelSettings(mixer=mixer, mixer_options=options, d_model=16, n_layers=2),
        training=TrainConfig(steps=4, length=LENGTH, batch_size=4, sequences=16, seed=1),
        examination=Examination(test_lengths=(64, 128), test_sequences=8, validation_sequences=8),
    )


def saved_run(folder, task="T4", mixer="naju", **options):
    """A run folder with the model as it begins."""
    run = small_run(task, mixer, **options)
    path = folder / run.name
    RunFolder(path).begin(run.to_json())
    weights = run.model.build(run.build_task(), 1).state_dict()
    Checkpoints(path).save({f"model.{name}": weight for name, weight in weights.items()}, {})
    return path


def example(task, seed=0):
    batch = task.sample(1, LENGTH, torch.Generator().manual_seed(seed))
    return batch.tokens[0], int(batch.targets[0])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", TASKS)
def test_every_write_is_found_with_its_role(name, seed):
    task = build_task(name, **OPTIONS[name])
    tokens, target = example(task, seed)
    words = task.describe(tokens)
    events = find_events(task, tokens)
    assert [place for event in events for place in range(event.start, event.start + EVENT_LENGTH)] == [
        place for place, word in enumerate(words[:-4]) if word != "PAD"
    ]
    assert all(words[event.places] == list(event.words) for event in events)
    asked = next(word for word in words[-4:] if word.startswith("e"))
    about = [event for event in events if asked in event.words]
    assert [event.role for event in about] == [STALE] * (len(about) - 1) + [ANSWER]
    assert about[-1].value == task.answer_name(target)
    assert all(event.role == OTHER for event in events if asked not in event.words)


@pytest.mark.parametrize("name", TASKS)
def test_taking_a_write_away_is_what_a_hand_would_do(name, tmp_path):
    model, task = load_run_model(saved_run(tmp_path, name))
    tokens, target = example(task)
    events = find_events(task, tokens)
    for removal in remove_each(model, task, tokens, target, events):
        start, end = removal.event.start, removal.event.start + EVENT_LENGTH
        padded, shorter = tokens.clone(), torch.cat([tokens[:start], tokens[end:]])
        padded[start:end] = 0
        for reply, sequence in ((removal.padded, padded), (removal.held, shorter)):
            with torch.no_grad():
                logits = model(sequence.unsqueeze(0))[0]
            assert reply.answer == task.answer_name(int(logits.argmax()))
            assert reply.right_logit == pytest.approx(logits[target].item(), abs=1e-5)
            assert reply.right_probability == pytest.approx(logits.softmax(0)[target].item(), abs=1e-5)


def test_without_the_answer_the_value_before_it_is_due(tmp_path):
    model, task = load_run_model(saved_run(tmp_path))
    tokens, target = example(task)
    events = find_events(task, tokens)
    about = [event for event in events if event.role != OTHER]
    due = {removal.event: removal.due for removal in remove_each(model, task, tokens, target, events)}
    assert due[about[-1]] == about[-2].value
    assert {due[event] for event in events if event != about[-1]} == {about[-1].value}


def test_without_the_only_write_nothing_is_due(tmp_path):
    model, task = load_run_model(saved_run(tmp_path, "T2"))
    tokens, target = example(task)
    (answer,) = (event for event in find_events(task, tokens) if event.role == ANSWER)
    (removal,) = remove_each(model, task, tokens, target, [answer])
    assert removal.due is None


def decoded(image):
    from matplotlib.image import imread

    return torch.from_numpy(imread(io.BytesIO(base64.b64decode(image.partition(",")[2]))).copy())[..., :3]


def observed(model, number, tokens):
    mixer = model.backbone.blocks[number].mixer
    return mixer, observe_layer(mixer, layer_input(model, mixer, tokens.unsqueeze(0)))


@pytest.mark.parametrize("mixer_name", ["naju", "coupled"])
def test_a_strip_has_a_row_a_channel_and_a_column_a_token(mixer_name, tmp_path):
    model, task = load_run_model(saved_run(tmp_path, mixer=mixer_name))
    tokens, _ = example(task)
    mixer, run = observed(model, 1, tokens)
    view = view_layer(model, 1, mixer, tokens, find_events(task, tokens), [3, 5, 8])
    assert sorted(view.channels) == [3, 5, 8]
    keeps = [run.select([channel]).f.log().mean().item() for channel in view.channels]
    assert keeps == sorted(keeps)
    for image, gate in ((view.forget, run.f_logit), (view.write, run.i_logit)):
        picture = decoded(image)
        assert picture.shape == (3, LENGTH, 3)
        # viridis grows brighter with its value, so brightness orders the pixels as the gates are ordered
        brightness = picture @ torch.tensor([0.2126, 0.7152, 0.0722])
        shown = gate[list(view.channels)]
        assert brightness.flatten()[shown.argmax()] == brightness.max()
        assert brightness.flatten()[shown.argmin()] == brightness.min()


def test_retention_is_the_product_of_the_later_gates(tmp_path):
    model, task = load_run_model(saved_run(tmp_path))
    tokens, _ = example(task)
    mixer, run = observed(model, 0, tokens)
    events = find_events(task, tokens)
    view = view_layer(model, 0, mixer, tokens, events, [])
    for event, (place, kept) in zip(events, view.kept.lines[0].points, strict=True):
        assert place == event.start + EVENT_LENGTH - 1
        want = run.f[:, place + 1 :].prod(1)
        assert kept == pytest.approx(want.quantile(0.5).item(), rel=1e-9)
    marked = {point.x: point.label for point in view.kept.points}
    assert marked == {event.last: event.value for event in events if event.role != OTHER}


def test_the_histogram_counts_every_channel_once(tmp_path):
    model, task = load_run_model(saved_run(tmp_path))
    tokens, _ = example(task)
    mixer, run = observed(model, 0, tokens)
    view = view_layer(model, 0, mixer, tokens, find_events(task, tokens), [])
    assert sum(view.memory.bars.heights) == len(run.channels)
    assert len(view.channels) == min(CHANNELS_SHOWN, len(run.channels))


def test_the_page_says_what_the_model_says(tmp_path):
    path = saved_run(tmp_path)
    model, task = load_run_model(path)
    tokens, target = example(task, seed=3)
    page = build_page(InspectConfig(run=path, task="T4", seed=3))
    with torch.no_grad():
        answer = task.answer_name(int(model(tokens.unsqueeze(0))[0].argmax()))
    assert f"The model says <strong>{answer}</strong>" in page
    assert f"right: <strong>v{target}</strong>" in page
    rows = tables(page)["removals"][2:]
    assert [int(row[0]) for row in rows] == [event.start for event in find_events(task, tokens)]
    assert page.count('<figure class="strip">') == 3 * 2


def test_layers_and_channels_can_be_chosen_and_the_checkpoint_named(tmp_path):
    path = saved_run(tmp_path)
    page = build_page(InspectConfig(run=path / "checkpoint.safetensors", layers=(1,), channels=(2, 7), length=96))
    assert re.findall(r"<h3>Layer (\d)</h3>", page) == ["1"]
    assert re.search(r"Channels (2, 7|7, 2)\.", page)
    assert "96 tokens" in page


def test_another_task_uses_the_vocabulary_of_the_training(tmp_path):
    path = saved_run(tmp_path, "T4")
    page = build_page(InspectConfig(run=path, task="T3", seed=3))
    task = build_task("T3", **SIZES)
    assert " ".join(task.describe(example(task, seed=3)[0][-4:])) in page


TEXT = "to be, or né"


def saved_language_model(folder, mixer="naju", n_layers=2):
    """One that reads bytes, with logits that are far apart."""
    torch.manual_seed(0)
    config = ModelConfig(257, 16, n_layers, mixer, tie_embeddings=False, embedding_std=1.0)
    model = LanguageModel(config).eval()
    save_model(model, folder)
    load_tokenizer("bytes").save_with_model(folder)
    return model


@torch.no_grad()
def test_a_text_is_read_token_by_token(tmp_path):
    model, tokens = saved_language_model(tmp_path), list(TEXT.encode())
    page = build_page(InspectConfig(run=tmp_path, text=TEXT, layers=(1,)))
    assert re.findall(r"<h3>Layer (\d)</h3>", page) == ["1"]
    assert page.count('<figure class="strip">') == 3
    rows = tables(page)["removals"][1:]
    surprise = -model(torch.tensor([tokens]))[0][0].double().log_softmax(-1) / math.log(2)
    assert [row[2] for row in rows[1:]] == [f"{surprise[place, token]:.2f}" for place, token in enumerate(tokens[1:])]
    after = model(torch.tensor([tokens]))[0][0, -1].double()
    expected = int(after.argmax())
    for place, row in enumerate(rows):
        left = model(torch.tensor([tokens[:place] + tokens[place + 1 :]]))[0][0, -1].double()
        assert row[0] == str(place)
        assert row[3] == shown(load_tokenizer("bytes"), int(left.argmax())).strip()
        assert row[5] == f"{left.softmax(0)[expected]:.3f}"


def test_of_a_language_run_the_best_model_is_read_and_of_a_hybrid_the_gated_layers(tmp_path):
    saved_language_model(tmp_path / "best", mixer=["retnet", "naju"])
    page = build_page(InspectConfig(run=tmp_path, text=TEXT))
    assert re.findall(r"<h3>Layer (\d)</h3>", page) == ["1"]


def test_tokens_that_print_nothing_are_shown(tmp_path):
    saved_language_model(tmp_path / "best")
    page = build_page(InspectConfig(run=tmp_path, text="a \n\tb"))
    assert [row[1] for row in tables(page)["removals"][1:]] == ["a", "␣", "↵", "⇥", "b"]
    assert f"What {tmp_path.name}/best does with a text" in page


@pytest.mark.parametrize("text", ["", "a", "a" * 1025])
def test_a_text_of_no_use_is_refused(tmp_path, capsys, text):
    saved_language_model(tmp_path)
    told = refusal(capsys, tmp_path / "model.safetensors", "--text", text)
    assert f"text must have 2 to 1,024 tokens, but has {len(text):,}" in told


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(["inspect", *map(str, arguments)])
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    return told


def test_a_mixer_without_gates_is_refused_in_a_sentence(tmp_path, capsys):
    path = saved_run(tmp_path, mixer="retnet")
    told = refusal(capsys, path, "--task", "T4")
    assert "run must be of a model with forget and write gates, but its layers are of RetNetMixer" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layers", "2"), "layers must name some of 0, 1, but holds 2"),
        (("--channels", "99"), "channels must name some of"),
        (("--task", "T9"), "task must be one of the event tasks T1 to T4, but is 'T9'"),
        (("--task", "MQAR"), "task must be one of the event tasks T1 to T4, but is 'MQAR'"),
        (("--length", "10"), "length must be at least"),
        (("--task", "T2"), "task must fit the vocabulary that the run was trained on, but T2 does not: n_entities"),
    ],
)
def test_bad_options_are_one_sentence(arguments, message, tmp_path, capsys):
    assert message in refusal(capsys, saved_run(tmp_path), *arguments)


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert "is no run: it has no readable config.json" in refusal(capsys, tmp_path)
    (tmp_path / "notes.txt").touch()
    assert "run must be the folder of a run" in refusal(capsys, tmp_path / "notes.txt")
    (tmp_path / "config.json").write_text(json.dumps({}))
    (tmp_path / "model.safetensors").touch()
    assert "is a language model: give it something to read with --text" in refusal(capsys, tmp_path)
    assert "run must be a language model for --text" in refusal(capsys, saved_run(tmp_path / "runs"), "--text", "a")


def test_a_real_run_is_reported_and_inspected(tmp_path):
    run = small_run("T4", d_state=8)
    folder = RunFolder(tmp_path / "runs" / "diagnostics" / run.name)
    result = run_diagnostic(run, folder, Reporter())
    page = write_report(tmp_path / "runs", tmp_path / "report").read_text()
    row = next(row for row in tables(page)["T4"] if row[0] == "Naju")
    assert row[1:4] == ["1", "0", f"{result['train_accuracy']:.3f} / {result['best_validation']:.3f}"]
    assert row[4:6] == [f"{result['accuracy'][length]['all']:.3f}" for length in ("64", "128")]
    assert run_inspect(InspectConfig(run=folder.path, output=tmp_path / "inspect.html")).exists()


@needs_chromium
@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_fits_a_narrow_screen(width, tmp_path):
    path = run_inspect(InspectConfig(run=saved_run(tmp_path), output=tmp_path / "inspect.html"))
    assert width_needed(path, width) <= width


def test_marks_in_the_charts_have_the_colours_of_the_strips():
    style = (files("naju.lab.pages") / "templates" / "style.css").read_text()
    for role, number in STYLES.items():
        (colour_below,) = re.findall(rf"\.ruler \.{role},[^{{]*{{ fill: var\(--(\w+)\)", style)
        assert colour_below == f"c{colour(number)}"
    assert len({outline(number) for number in STYLES.values()}) == len(STYLES)


@needs_chromium
def test_the_browser_shows_the_page(tmp_path):
    path = run_inspect(InspectConfig(run=saved_run(tmp_path), output=tmp_path / "inspect.html"))
    assert tables(opened(path)) == tables(path.read_text())
    light, dark = pixels(path), pixels(path, dark=True)
    assert light[5, 5].min() > 0.98
    assert dark[5, 5].max() < 0.15
    strips = light[300:900]  # coloured wherever a gate is shown, while the page itself is grey
    assert ((strips.max(-1) - strips.min(-1)) > 0.2).mean() > 0.2
