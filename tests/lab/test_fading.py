"""`naju runs fading`: tokens that hold and write nothing might not be there, and the measures are those of a hand."""

from __future__ import annotations

import math

import pytest
import torch
from test_inspect import LENGTH, OPTIONS, saved_run

from naju import cli, naju_scan
from naju.lab.diagnostic_run import load_run_model
from naju.lab.inspect.fading import IDLE, WAYS, accuracy, changed, made_to, measure, padding, watch
from naju.mixers.naju import ScanArguments
from naju.tasks import build_task
from naju.tasks.events import EVENT_LENGTH, PAD, QUERY_LENGTH, SPECIAL

BOTH = WAYS["both"]


def opened(folder, mixer="naju", rows=3, length=LENGTH):
    """The run is as it began, so d_conv = 1 makes a token's gates its own."""
    model, task = load_run_model(saved_run(folder, mixer=mixer, d_conv=1))
    return model, task.sample(rows, length, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mixer", ["naju", "coupled"])
def test_left_as_it_is_the_answers_are_the_models_own(mixer, tmp_path):
    model, batch = opened(tmp_path, mixer)
    with torch.no_grad():
        own = model(batch.tokens)
    torch.testing.assert_close(changed(model, batch.tokens, lambda _, given: given), own)
    untouched = made_to(BOTH, padding(batch.tokens), layers=())
    torch.testing.assert_close(changed(model, batch.tokens, untouched), own)


@pytest.mark.parametrize("at", IDLE)
@pytest.mark.parametrize("mixer", ["naju", "coupled"])
def test_what_holds_and_writes_nothing_might_as_well_not_be_there(mixer, at, tmp_path):
    model, batch = opened(tmp_path, mixer)
    places = IDLE[at](batch.tokens)
    steered = changed(model, batch.tokens, made_to(BOTH, places, layers=(0, 1)))
    with torch.no_grad():
        kept = [row[~there] for row, there in zip(batch.tokens, places, strict=True)]
        without = torch.cat([model(row.unsqueeze(0)) for row in kept])
        assert not torch.allclose(model(batch.tokens), without, rtol=0, atol=1e-4)
    torch.testing.assert_close(steered, without, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["T1", "T2", "T3", "T4"])
def test_others_are_all_but_the_query_and_the_events_of_its_entity(name):
    task = build_task(name, **OPTIONS[name])
    tokens = task.sample(20, 200, torch.Generator().manual_seed(0)).tokens
    idle = IDLE["others"](tokens)
    for row, places in zip(tokens.tolist(), idle.tolist(), strict=True):
        (asked,) = [token for token in row[-QUERY_LENGTH:] if token >= len(SPECIAL)]
        counts = [False] * (len(row) - QUERY_LENGTH) + [True] * QUERY_LENGTH
        for place in range(len(row) - QUERY_LENGTH):
            if row[place] == asked:  # the second token of its event
                counts[place - 1 : place - 1 + EVENT_LENGTH] = [True] * EVENT_LENGTH
        assert places == [not one for one in counts]


@pytest.mark.parametrize("way", WAYS.values())
def test_only_padding_and_only_the_chosen_layer_are_changed(way):
    tokens = torch.tensor([[3, PAD, 4, PAD]])
    given = ScanArguments(*torch.randn(6, 1, 4, 2))
    change = made_to(way, padding(tokens), layers=(1,))
    assert change(0, given) is given
    after = change(1, given)
    f_there, i_there = after.f_logit[0, [1, 3]], after.i_logit[0, [1, 3]]
    assert torch.equal(f_there, torch.full((2, 2), math.inf)) == way.holds
    assert torch.equal(i_there, torch.full((2, 2), -math.inf)) == way.writes_nothing
    for before, part in zip(given, after, strict=True):
        assert torch.equal(before[0, [0, 2]], part[0, [0, 2]])


def test_the_measures_of_a_layer_made_by_hand():
    """One channel, one entry: an event writes 1, two paddings keep a half each and write 1/4 of 1."""
    places = torch.tensor([[False, True, True, *[False] * QUERY_LENGTH]])
    f = torch.tensor([0.5, 0.5, 0.5, *[0.9] * QUERY_LENGTH])
    i = torch.tensor([1.0, 0.25, 0.25, *[0.9] * QUERY_LENGTH])
    ones = torch.ones(1, len(f), 1)
    given = ScanArguments(ones, *(gate.logit().view(1, -1, 1) for gate in (f, i)), ones, ones, ones)
    fading, write, share = measure(given, places)
    assert fading.item() == pytest.approx(2 * math.log(2))
    assert write.item() == pytest.approx(0.25)
    event, paddings = 0.25, 0.125 + 0.25
    assert share.item() == pytest.approx(paddings**2 / (paddings**2 + event**2))


def test_what_is_measured_is_what_the_layers_scan(tmp_path, monkeypatch):
    """In pieces of one sequence, too; and the two parts of a memory are all of it."""
    model, batch = opened(tmp_path)
    seen = []
    changed(model, batch.tokens, lambda _, given: seen.append(given) or given)
    want = [measure(given, batch.tokens == PAD) for given in seen]
    monkeypatch.setattr("naju.lab.inspect.fading.TOKENS_AT_ONCE", 1)
    found = watch(model, batch.tokens, padding, layers=(1,))
    assert list(found) == [1]
    for one, other in zip(found[1], want[1], strict=True):
        torch.testing.assert_close(one, other)
    *drive, _ = seen[1]
    shut = [
        drive[2].masked_fill(there.unsqueeze(-1), -math.inf) for there in (batch.tokens == PAD, batch.tokens != PAD)
    ]
    parts = [naju_scan(*drive[:2], i_logit, *drive[3:])[1] for i_logit in shut]
    torch.testing.assert_close(sum(parts), naju_scan(*drive)[1])


def test_the_accuracy_is_the_share_of_right_answers(tmp_path):
    model, batch = opened(tmp_path, rows=4)
    said = changed(model, batch.tokens, made_to(BOTH, padding(batch.tokens), (0, 1))).argmax(-1)
    targets = torch.cat([said[:3], said[3:] + 1])
    assert accuracy(model, batch.tokens, targets, padding, BOTH, (0, 1)) == 0.75


def test_without_padding_nothing_fades(tmp_path):
    shortest = build_task("T4", **OPTIONS["T4"]).minimum_length()
    model, batch = opened(tmp_path, length=shortest)
    for idling in watch(model, batch.tokens, padding, (0, 1)).values():
        assert not any(part.any() for part in idling)


def fading(path, *options):
    cli.main(["runs", "fading", path.name, "--runs", str(path.parent.parent), *options])


def test_the_command_prints_both_tables(tmp_path, capsys):
    path = saved_run(tmp_path / "diagnostics")
    fading(path, "--sequences", "6", "--device", "cpu")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    gap = rows.index([])
    assert [row[0] for row in rows[1:gap]] == ["64", "128"]
    assert all(len(row) == 1 + len(WAYS) and 0 <= float(cell) <= 1 for row in rows[1:gap] for cell in row[1:])
    assert [row[:2] for row in rows[gap + 2 :]] == [["64", "0"], ["64", "1"], ["128", "0"], ["128", "1"]]
    fading(path, "--sequences", "6", "--device", "cpu", "--lengths", "64", "--layers", "1")
    again = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert again[1][1] == rows[1][1]
    assert again[-1] == rows[gap + 3]
    assert len(again) == 5


@pytest.mark.parametrize(
    ("task", "mixer", "options", "message"),
    [
        ("T4", "retnet", (), "run must be of a model with forget and write gates, but its layers are of RetNetMixer"),
        ("T4", "naju", ("--lengths", "10"), "length must be at least 44"),
        ("T4", "naju", ("--layers", "2"), "layers must name some of 0, 1, but holds 2"),
        ("T4", "naju", ("--sequences", "0"), "count must be a positive integer, but is 0"),
        ("MQAR", "naju", (), "run must be of one of the event tasks T1 to T4, but is of 'MQAR'"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_sentence(task, mixer, options, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(OPTIONS, "MQAR", {})
    path = saved_run(tmp_path / "diagnostics", task, mixer)
    with pytest.raises(SystemExit) as stop:
        fading(path, "--device", "cpu", *options)
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
