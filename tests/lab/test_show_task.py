"""An example of a task as the command prints it."""

from __future__ import annotations

import re

import pytest
import torch

from naju import cli
from naju.lab.show_task import ShowTask, show_task
from naju.tasks import IGNORE, TASKS, build_task


def printed(capsys, *arguments):
    cli.main(["tasks", *arguments])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", TASKS)
def test_the_printed_words_are_the_sequence(name, capsys):
    *lines, answer, group = printed(capsys, "show", name, "--length", "192", "--seed", "3")
    task = build_task(name)
    batch = task.sample(1, 192, torch.Generator().manual_seed(3))
    words = []
    for line in lines:
        place, *text = line.split()
        assert int(place) == len(words)
        words += ["PAD"] * int(text[2]) if text[:2] == ["PAD", "×"] else text
    assert words == task.describe(batch.tokens[0])
    answers = [int(target) for target in batch.targets.flatten() if target != IGNORE]
    assert re.findall(r"v\d+", answer) == [task.answer_name(target) for target in answers]
    assert answer.endswith(f", one of {task.n_classes}")
    assert group.startswith(f"group   {task.groups[batch.group.item()]}, one of ")


def test_every_event_has_a_line_of_its_own(capsys):
    *lines, _, _ = printed(capsys, "show", "T4", "--length", "192")
    events = [line.split()[1:] for line in lines if "LATER" in line]
    assert len(events) == 32
    assert all(len(event) == 5 and event[-1] == "SEP" for event in events)
    assert lines[-1].split()[1::2] == ["QUES", "NOW"]


def test_options_of_the_task_can_be_given(capsys):
    show_task(ShowTask(name="T4", length=64, options=("n_events=6", "growing_from=40")))
    assert capsys.readouterr().out.count("LATER") == 9


def test_switches_are_options_like_any_other(capsys):
    usual = printed(capsys, "show", "T1", "--seed", "1")
    assert printed(capsys, "show", "T1", "--seed", "1", "--options", "anywhere=true") != usual
    assert printed(capsys, "show", "T1", "--seed", "1", "--options", "anywhere=false") == usual


def test_the_list_names_every_task_with_its_defaults(capsys):
    told = "\n".join(printed(capsys, "ls"))
    assert all(f"\n{name}  " in f"\n{told}" for name in TASKS)
    assert "n_entities 512, n_values 32, min_updates 3, max_updates 6, n_events 32, growing_from None" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "T9"), "unknown task 'T9'; expected one of T1"),
        (("show", "T4", "--length", "10"), "length must be at least 164"),
        (("show", "T4", "--options", "colour=1"), "task 'T4' has no option colour"),
        (("show", "T4", "--options", "n_events", "8"), "options must look like name=value, but one is 'n_events'"),
        (("show", "T2", "--options", "n_facts=3.5"), "n_facts must be an int, but is 3.5 in the options of task 'T2'"),
        (("show", "T1", "--options", "anywhere=1"), "anywhere must be a bool, but is 1 in the options of task 'T1'"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["tasks", *arguments])
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
