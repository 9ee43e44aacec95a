"""`naju reproduce --list`: every table of the paper, its cost, and how much of it is filled."""

import json
from dataclasses import replace

from tiny_runs import tiny_run

from naju import cli
from naju.lab.catalogue import COMMANDS, SPEED, Cost, ListExperiments, cost
from naju.lab.paper import paper_tables
from naju.lab.reproduce import EXPERIMENTS, Diagnostics


def listed(capsys, *arguments):
    cli.main(["reproduce", "--list", *map(str, arguments)])
    lines = capsys.readouterr().out.splitlines()
    return {line.split()[0]: line for line in lines if line.startswith("tab:") and "naju " in line[:60]}


def test_every_table_of_the_paper_is_there_with_its_command(tmp_path, capsys):
    told = listed(capsys, "--runs", tmp_path, "--results", tmp_path)
    assert list(told) == list(paper_tables()) == list(COMMANDS)
    for label, line in told.items():
        assert f"naju {COMMANDS[label]} " in line
        assert paper_tables()[label].title in line
    known = {f"reproduce {experiment.command}" for experiment in EXPERIMENTS.values()} | {"reproduce throughput"}
    assert set(COMMANDS.values()) <= known


def test_cells_and_steps_are_those_of_the_grids(tmp_path, capsys):
    told = listed(capsys, "--runs", tmp_path, "--results", tmp_path)
    assert " 0 of 60 " in told["tab:bf_sweep"]
    assert f" {5 * 6 * (46_860 + 46_875):,} steps " in told["tab:bf_sweep"]
    assert f" {6 * (1500 + 2500):,} steps " in told["tab:bf_sweep"]
    assert " 0 of 55 " in told["tab:sthard"]
    assert " none " in told["tab:main"]  # the quick suite has no T1


def test_finished_cells_count_and_give_the_time(tmp_path, capsys):
    for seed, seconds in ((1, 10.0), (2, 30.0), (3, 20.0)):
        copy = {"experiment": "diagnostics", "steps": 100, "seconds": seconds}
        (tmp_path / f"naju-T4-f_bias6-s{seed}.json").write_text(json.dumps(copy))
    told = listed(capsys, "--runs", tmp_path / "runs", "--results", tmp_path)
    steps = 60 * (46_860 + 46_875) // 2
    assert " 3 of 60 " in told["tab:bf_sweep"]
    assert f"{steps:,} steps, about {steps * 0.2 / 3600:.1f} h" in told["tab:bf_sweep"]
    assert " 0 of 40 " in told["tab:bi_sweep"]


def test_each_experiments_copies_may_have_a_folder_of_their_own(tmp_path, capsys):
    for experiment, name in (("diagnostics", "naju-T4-f_bias6-s1"), ("mqar", "naju-d128-n64-lr0.001-s1")):
        (tmp_path / experiment).mkdir()
        (tmp_path / experiment / f"{name}.json").write_text(json.dumps({"experiment": experiment}))
    told = listed(capsys, "--runs", tmp_path / "runs", "--results", tmp_path)
    assert " 1 of 60 " in told["tab:bf_sweep"]
    assert " 1 of 152 " in told["tab:mqar"]
    assert " 0 of 45 " in told["tab:lra"]


def test_a_cost_in_words(tmp_path):
    assert str(Cost(0, 0, 0, None)) == "none"
    assert str(Cost(2, 0, 2000, None)) == "2,000 steps"
    assert str(Cost(2, 1, 2000, 0.25)) == "2,000 steps, about 15 min"
    cells = [replace(tiny_run(), variant=str(number)) for number in range(3)]
    assert cost(EXPERIMENTS[Diagnostics], cells, ListExperiments(results=tmp_path)) == (3, 0, 36, None)


def test_measured_numbers_are_counted(tmp_path, capsys):
    row = {"bench": "forward", "batch": 8, "n_layers": 4, "model": "naju", "d_model": 256, "mode": "eager"}
    row |= {"length": 512, "median_s": 0.003, "peak_bytes": None, "machine": {"accelerator": "a GPU"}}
    row |= {"dtype": "bfloat16", "d_state": 64}
    (tmp_path / "forward.jsonl").write_text(json.dumps(row) + "\n")
    told = listed(capsys, "--runs", tmp_path, "--rows", tmp_path)
    rows = paper_tables()["tab:throughput"].rows
    numbers = sum(value is not None for line in rows for column, value in line.items() if column[0] == "L")
    assert f" 1 of {numbers} " in told["tab:throughput"]
    assert set(SPEED) == {"tab:throughput"}


def test_language_models_count_on_the_whole_of_wikitext(tmp_path, capsys):
    copy = {"experiment": "language", "steps": 36_621, "seconds": 3600.0}
    (tmp_path / "naju-d256-l1024-lr0.004-1200M-wikitext-103-s1.json").write_text(json.dumps(copy))
    (tmp_path / "naju-d256-l1024-lr0.004-1200M-enwiki-long-s1.json").write_text(json.dumps(copy))
    told = listed(capsys, "--runs", tmp_path / "runs", "--results", tmp_path)
    for label, cells in (("tab:wt103", 45), ("tab:wt103_width", 36), ("tab:gate_rank", 9)):
        assert f" 1 of {cells} " in told[label]
        assert f"about {cells}.0 h" in told[label]
    assert " 0 of 20 " in told["tab:wt103_lr"]
