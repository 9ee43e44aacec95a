"""`naju reproduce --list`: every table of the paper, its cost, and how much of it is filled."""

import json

import pytest

from naju import cli
from naju.lab.ablations import BiasF
from naju.lab.catalogue import COMMANDS, SPEED, Cost
from naju.lab.lra import Lra
from naju.lab.mqar import Mqar
from naju.lab.options import GridOptions
from naju.lab.paper import paper_tables
from naju.lab.reproduce import EXPERIMENTS
from naju.lab.runs import CELL
from naju.lab.wikitext import WikitextContext
from naju.lab.wikitext_run import WIKITEXT, Text


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


def finished(cell, seconds_a_step):
    """The name and result of a run of this cell."""
    config = cell.to_json()
    about = {name: config[name] for name in ("experiment", *CELL)}
    return cell.name, {**about, "config": config, "steps": cell.steps, "seconds": seconds_a_step * cell.steps}


def store(folder, *results):
    folder.mkdir(parents=True, exist_ok=True)
    for name, result in results:
        (folder / f"{name}.json").write_text(json.dumps(result))


CPU = GridOptions(device="cpu")


def test_finished_cells_count_and_runs_of_their_kind_give_the_time(tmp_path, capsys):
    alike = [cell for cell in BiasF(grid=CPU).cells() if cell.to_json()["mixer_options"]["d_state"] == 64]
    cells = [cell for cell in alike if cell.to_json()["mixer_options"].get("f_bias") == 6]
    store(tmp_path, *(finished(cell, seconds) for cell, seconds in zip(cells, (0.1, 0.3, 0.2), strict=False)))
    told = listed(capsys, "--runs", tmp_path / "runs", "--results", tmp_path)
    steps = 60 * (46_860 + 46_875) // 2
    assert " 3 of 60 " in told["tab:bf_sweep"]
    assert f"{steps:,} steps, about {steps * 0.2 / 3600:.1f} h ({len(alike)} of 60)" in told["tab:bf_sweep"]
    assert " 0 of 40 " in told["tab:bi_sweep"]


def test_a_step_takes_as_long_as_in_runs_of_the_same_mixer_and_sizes(tmp_path, capsys):
    def hours(told):
        return float(told["tab:mqar"].partition("about ")[2].partition(" h")[0])

    cells = Mqar(mixers=("naju",), widths=(64,), states=(16,), reparam="without", grid=CPU).cells()
    other = Mqar(mixers=("mamba",), widths=(64,), states=(16,), grid=CPU).cells()
    short = Mqar(mixers=("naju",), widths=(64,), states=(16,), reparam="without", epochs=4, bf16=True, grid=CPU).cells()
    steps = cells[0].steps
    store(tmp_path / "a" / "mqar", finished(short[0], 0.5))
    first = listed(capsys, "--runs", tmp_path, "--results", tmp_path / "a")
    assert " 0 of 152 " in first["tab:mqar"]
    assert "(8 of 152)" in first["tab:mqar"]  # four rates, with and without the reparameterisation
    assert hours(first) == pytest.approx(152 * steps * 0.5 / 3600, abs=0.06)
    store(tmp_path / "a" / "mqar", finished(other[0], 1.5))
    second = listed(capsys, "--runs", tmp_path, "--results", tmp_path / "a")
    assert "(12 of 152)" in second["tab:mqar"]  # the median of twelve is that of the eight
    assert hours(second) == pytest.approx((4 * 1.5 + 148 * 0.5) * steps / 3600, abs=0.06)


def test_a_step_on_pairs_of_texts_takes_longer_than_one_on_texts(tmp_path, capsys):
    (text,) = Lra(task=("text",), mixers=("naju",), seeds=("1",), grid=CPU).cells()
    store(tmp_path / "lra", finished(text, 1.0))
    told = listed(capsys, "--runs", tmp_path, "--results", tmp_path)
    same = [cell for cell in Lra(mixers=("naju",), grid=CPU).cells() if cell.to_json()["length"] == 4000]
    assert {cell.task for cell in same} == {"text", "retrieval"}
    assert "(3 of 45)" in told["tab:lra"]


@pytest.mark.parametrize("lack", [{"steps": 0}, {"seconds": None}, {"steps": "many"}])
def test_runs_that_were_not_timed_count_and_tell_no_time(lack, tmp_path, capsys):
    name, result = finished(BiasF(grid=CPU).cells()[0], 1.0)
    store(tmp_path, (name, result | lack))
    told = listed(capsys, "--runs", tmp_path / "runs", "--results", tmp_path)["tab:bf_sweep"]
    assert " 1 of 60 " in told
    assert "about" not in told


def test_each_experiments_copies_may_have_a_folder_of_their_own(tmp_path, capsys):
    bias = next(cell for cell in BiasF(grid=CPU).cells() if cell.name == "naju-T4-f_bias6-s1")
    store(tmp_path / "diagnostics", finished(bias, 1.0))
    store(tmp_path / "mqar", finished(Mqar(grid=CPU).cells()[0], 1.0), ("naju-d256-n64-lr0.001-s1", {"a": 1}))
    told = listed(capsys, "--runs", tmp_path / "runs", "--results", tmp_path)
    assert " 1 of 60 " in told["tab:bf_sweep"]
    assert " 1 of 152 " in told["tab:mqar"]
    assert " 0 of 45 " in told["tab:lra"]


def test_a_cost_in_words():
    assert str(Cost(0, 0, 0, 0, 0.0)) == "none"
    assert str(Cost(2, 0, 2000, 0, 0.0)) == "2,000 steps"
    assert str(Cost(2, 1, 2000, 2, 0.25)) == "2,000 steps, about 15 min"
    assert str(Cost(2, 1, 2000, 1, 2.5)) == "2,000 steps, about 2.5 h (1 of 2)"


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
    def rated(text, seconds):
        (cell,) = WikitextContext(mixers=("naju",), lengths=(1024,), seeds=("1",), grid=CPU).cells_on(Text(text, {}))
        return finished(cell, seconds)

    store(tmp_path, rated(WIKITEXT, 0.1), rated("enwiki-long", 0.3))
    told = listed(capsys, "--runs", tmp_path / "runs", "--results", tmp_path)
    for label, cells in (("tab:wt103", 45), ("tab:wt103_width", 36), ("tab:gate_rank", 9)):
        assert f" 1 of {cells} " in told[label]
        assert f"about {cells * 36_621 * 0.2 / 3600:.1f} h (3 of {cells})" in told[label]  # on whichever text
    assert " 0 of 20 " in told["tab:wt103_lr"]
