"""Language-model experiments as grids: their cells, names and learning rates, and small ones filled for real."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_wikitext import command, make_tiny

from naju import cli
from naju.lab.options import GridOptions
from naju.lab.runs import Results, RunFolder, RunStore
from naju.lab.wikitext import LanguageGateRank, LrPilot, WikitextContext, WikitextEfficiency, WikitextWidth
from naju.lab.wikitext_models import CONTENDERS, PAPER, PILOTS, Shape, paper_pilot, paper_rate
from naju.lab.wikitext_rates import chosen_rate, ladder
from naju.lab.wikitext_run import PILOT, WIKITEXT, Text, WikitextRun, run_wikitext, text_label
from naju.models import LanguageModel
from naju.training import Reporter, StoppedError

WHOLE = Text(WIKITEXT, {})


def on_cpu(tmp_path=Path("nowhere")):
    return GridOptions(device="cpu", jobs=1, runs=tmp_path / "runs")


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    return make_tiny(tmp_path, monkeypatch)


def reproduce(folder, name, *arguments):
    """The exit code of `naju reproduce` on the small text."""
    with pytest.raises(SystemExit) as stop:
        cli.main(command(folder, name, *arguments))
    return stop.value.code


def pilot(rate, perplexity, *, contender="naju", text=WIKITEXT, tokens=250_000_000, seed=1):
    config = {"lr": rate, "tokens": tokens}
    return {"mixer": contender, "task": text, "seed": seed, "config": config, "validation_perplexity": perplexity}


def test_cells_are_the_papers_rows_by_its_protocol():
    seeds = ("1-3",)
    made = {
        WikitextContext: {shape for shape in PAPER if shape.d_model == 256 and "rank" not in shape.contender},
        WikitextWidth: {shape for shape in PAPER if shape.length == 1024} - {Shape("mamba-16", 256, 1024)},
        LanguageGateRank: {shape for shape in PAPER if "naju" in shape.contender and shape[1:] == (256, 1024)},
    }
    made[WikitextWidth] -= {shape for shape in made[WikitextWidth] if "rank" in shape.contender}
    for grid, shapes in made.items():
        cells = grid(seeds=seeds, grid=on_cpu()).cells_on(WHOLE)
        assert len(cells) == 3 * len(shapes) == len({cell.name for cell in cells})
        for cell in cells:
            model, protocol = cell.language.model, cell.language.protocol
            assert Shape(cell.contender, model.d_model, protocol.length) in shapes
            assert (protocol.tokens, protocol.tokens_per_update, model.n_layers) == (1_200_000_000, 32_768, 6)
            assert protocol.lr == PAPER[Shape(cell.contender, model.d_model, protocol.length)]["lr"]


def test_a_run_that_two_tables_share_is_one():
    grid = on_cpu()
    context, width, rank = (c(grid=grid).cells_on(WHOLE) for c in (WikitextContext, WikitextWidth, LanguageGateRank))
    first = next(cell for cell in context if cell.contender == "naju")
    assert first.name == "naju-d256-l1024-lr0.004-1200M-wikitext-103-s1"
    assert first in width
    assert first in rank


def test_options_reach_the_model():
    cells = {cell.contender: cell for cell in LanguageGateRank(grid=on_cpu()).cells_on(WHOLE)}
    assert cells["naju-rank32"].to_json()["options"] == {"d_state": 64, "gate_rank": 32}
    context = WikitextContext(mixers=("transformer", "gla", "naju-reparam"), budget=10**6, grid=on_cpu()).cells_on(
        WHOLE
    )
    options = {cell.contender: cell.to_json()["options"] for cell in context}
    assert options == {
        "transformer": {"positions": "rotary"},
        "gla": {},
        "naju-reparam": {"d_state": 64, "gate_reparam": True},
    }
    assert {cell.language.protocol.tokens for cell in context} == {10**6}
    assert context[0].name == "transformer-d256-l1024-lr0.002-1M-wikitext-103-s1"


@pytest.mark.parametrize("contender", sorted(CONTENDERS))
def test_every_contender_can_be_built_and_has_the_papers_size(contender):
    (cell,) = WikitextContext(mixers=(contender,), seeds=("1",), lengths=(1024,), grid=on_cpu()).cells_on(WHOLE)
    with torch.device("meta"):
        model = LanguageModel(cell.language.model.config(50_257))
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    paper = PAPER.get(Shape(contender, 256, 1024))
    assert millions == pytest.approx(paper["params_m"], abs=0.06) if paper else 13 < millions < 25


def test_timed_runs_measure_what_the_papers_did():
    assert len(WikitextEfficiency(grid=on_cpu()).cells_on(WHOLE)) == 3 * 2 * 8
    cells = WikitextEfficiency(grid=on_cpu(), modes=("eager", "compiled", "graph")).cells_on(WHOLE)
    assert len({cell.name for cell in cells}) == len(cells) == 3 * 3 * 8
    larger = WikitextEfficiency(grid=on_cpu(), micro_tokens=32_768).cells_on(WHOLE)
    assert {cell.name for cell in larger}.isdisjoint(cell.name for cell in cells)
    for cell in cells:
        execution = cell.language.execution
        assert (execution.micro_tokens, execution.log_every, cell.steps) == (8192, 13, 63)
        assert (execution.compile, execution.cuda_graph == "on") == ("compiled" in cell.name, "graph" in cell.name)
        assert cell.to_json().get("cuda_graph", False) == ("graph" in cell.name)
        assert cell.to_json()["attention"] == ("math" if cell.contender == "transformer-math" else "auto")


@pytest.mark.parametrize(
    ("name", "tokens", "vocabulary", "label"),
    [
        ("wikitext-103", 117_900_000, 50_257, "wikitext-103"),
        ("wikitext-103-raw", 117_920_140, 50_257, "wikitext-103"),
        ("wikitext-103", 75_000_000, 50_257, "part-of-wikitext-103"),
        ("wikitext-103", 117_900_000, 1000, "part-of-wikitext-103"),
        ("enwiki-long", 117_900_000, 50_257, "enwiki-long"),
    ],
)
def test_only_the_whole_of_wikitext_is_called_so(name, tokens, vocabulary, label):
    manifest = {"source": {"name": name}, "splits": {"train": {"tokens": tokens}}, "vocab_size": vocabulary}
    assert text_label(manifest, "a-folder") == label
    assert text_label({**manifest, "source": {}}, name) == label


def test_the_ladder_goes_up_while_its_top_is_the_best():
    losses = {0.001: 9.0, 0.002: 8.0, 0.003: 7.0, 0.004: 6.0, 0.005: 5.0, 0.006: 5.5}

    def outcome(known):
        return lambda rate: {"validation_perplexity": known[rate]} if rate in known else None

    first = (0.001, 0.002, 0.003, 0.004)
    assert ladder(first, outcome({})) == [*first]
    assert ladder(first, outcome({k: v for k, v in losses.items() if k != 0.002})) == [*first]
    assert ladder(first, outcome({k: v for k, v in losses.items() if k < 0.0045})) == [*first, 0.005]
    assert ladder(first, outcome(losses)) == [*first, 0.005, 0.006]
    assert ladder(first, outcome({**losses, 0.004: 7.5})) == [*first]
    assert ladder(first, outcome({**losses, 0.005: None})) == [*first, 0.005]
    assert ladder((0.001,), outcome(losses)) == [0.001, 0.002, 0.003, 0.004, 0.005, 0.006]


def test_a_rate_is_that_of_the_longest_pilots_that_have_ended():
    short = [pilot(rate, loss, tokens=10**6) for rate, loss in ((0.001, 9), (0.002, 8), (0.003, 8.5))]
    long = [pilot(rate, loss) for rate, loss in ((0.002, 7), (0.003, 6), (0.004, None))]
    climbing = [pilot(rate, loss, tokens=10**9) for rate, loss in ((0.002, 7), (0.003, 6))]
    assert chosen_rate("naju", WIKITEXT, short) == (0.002, "the best of 3 pilots of 1M tokens")
    assert chosen_rate("naju", WIKITEXT, [*short, *long, *climbing]) == (0.003, "the best of 3 pilots of 250M tokens")
    assert chosen_rate("naju-rank64", WIKITEXT, short).value == 0.002
    for other in ("mamba", "transformer"):
        assert chosen_rate(other, WIKITEXT, short) == (paper_rate(other), "the paper's; it has no pilots")
    assert chosen_rate("naju", "enwiki-long", short) == (0.004, "the paper's; it has no pilots")
    assert chosen_rate("naju", WIKITEXT, climbing) == (0.004, "the paper's; its pilots have not ended")
    assert chosen_rate("gla", WIKITEXT, []).origin == "the paper's for naju; it has no pilots"
    lost = [pilot(rate, None) for rate in (0.001, 0.002)]
    assert chosen_rate("naju", WIKITEXT, lost) == (0.004, "the paper's; its pilots have not ended")
    elsewhere = chosen_rate("naju", WIKITEXT, short, "0123abcd")
    assert elsewhere == (0.002, "the best of 3 pilots of 1M tokens, on other files of that name")


def test_a_rate_is_the_best_on_average_over_seeds():
    pilots = [pilot(rate, loss, seed=1) for rate, loss in ((0.001, 5), (0.002, 6), (0.003, 8))]
    pilots += [pilot(rate, loss, seed=2) for rate, loss in ((0.001, 9), (0.002, 6), (0.003, 8))]
    assert chosen_rate("naju", WIKITEXT, pilots).value == 0.002


def test_the_papers_pilots():
    assert paper_pilot("naju", 0.004) == 30.83
    assert paper_pilot("mamba", 0.001) is None
    assert paper_pilot("mamba", 0.0075) is None
    assert paper_rate("naju-rank32") == paper_rate("gla") == 0.004
    assert set(PILOTS) == {"transformer", "mamba-16", "mamba", "mamba2", "naju"}


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("wikitext-context", ("--mixers", "najuu"), "mixers must be different ones of naju, naju-rank64"),
        ("wikitext-context", ("--lengths", "16", "16"), "must name at least one run and none twice"),
        ("lr-pilot", ("--rates", "0.1", "0.1"), "rates must be different positive numbers, but are 0.1, 0.1"),
        ("lr-pilot", ("--budget", "5"), "tokens must allow one update of 128 tokens, but is 5"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(command, options, message, tiny, capsys):
    assert reproduce(tiny, command, *options) == 2
    assert message in capsys.readouterr().err


def test_no_data_are_refused_in_a_sentence(tmp_path, capsys):
    assert reproduce(tmp_path, "wikitext-context") == 2
    assert "has no manifest.json" in capsys.readouterr().err


def test_a_plan_can_do_without_data(tmp_path, capsys):
    assert (
        reproduce(tmp_path, "wikitext-context", "--mixers", "naju", "--lengths", "1024", "--seeds", "1", "--plan") == 0
    )
    told = capsys.readouterr()
    assert "naju-d256-l1024-lr0.004-1200M-wikitext-103-s1" in told.out
    assert "made-up has no manifest.json: this is the plan for wikitext-103" in told.err


def tiny_cell(folder, **options) -> WikitextRun:
    where = {"data": folder / "made-up", "grid": on_cpu(folder)}
    return LrPilot(**where, mixers=("naju",), rates=(0.01,), **options).cells()[0]


def test_a_run_and_its_result(tiny):
    run = tiny_cell(tiny)
    folder = RunFolder(tiny / "runs" / run.name)
    result = run_wikitext(run, folder, Reporter())
    assert folder.result() == result
    assert (result["experiment"], result["mixer"], result["task"], result["seed"]) == (PILOT, "naju", "made-up", 1)
    assert result["config"] == folder.config()
    assert result["steps"] == 3
    assert result["validation_perplexity"] > 1
    assert result["test_perplexity"] > 1
    assert not list(folder.path.glob("checkpoint*"))
    assert (folder.path / "best" / "model.safetensors").exists()
    assert run_wikitext(run, folder, Reporter(begin=lambda step: pytest.fail("trained"))) == result


def test_a_stopped_run_goes_on_with_the_same_metrics(tiny):
    execution = {"log_every": 1, "save_seconds": 0.0}
    run = tiny_cell(tiny)
    run = replace(run, language=replace(run.language, execution=replace(run.language.execution, **execution)))
    whole, halved, steps = RunFolder(tiny / "whole"), RunFolder(tiny / "halved"), []
    result = run_wikitext(run, whole, Reporter())
    with pytest.raises(StoppedError):
        run_wikitext(run, halved, Reporter(progress=lambda step, _: steps.append(step), stop=lambda: 1 in steps))
    again = run_wikitext(run, halved, Reporter())
    assert again["validation_perplexity"] == result["validation_perplexity"]
    assert (halved.path / "metrics.jsonl").read_bytes() == (whole.path / "metrics.jsonl").read_bytes()


def test_a_rate_that_diverges_is_a_result(tiny, monkeypatch):
    def explodes(*given, **named):
        raise FloatingPointError("the loss became infinite or NaN at step 2")

    monkeypatch.setattr("naju.lm.train.train_language_model", explodes)
    result = run_wikitext(tiny_cell(tiny), RunFolder(tiny / "run"), Reporter())
    assert result["diverged"].startswith("the loss became infinite")
    assert result["validation_perplexity"] is None


def test_pilots_climb_and_the_longer_runs_take_their_rate(tiny, capsys):
    """Rates far too low improve upwards: the grid adds cells until one is worse, and does none of them twice."""
    pilots = ("lr-pilot", "--mixers", "naju", "--rates", "0.1", "0.4")
    assert reproduce(tiny, *pilots) == 0
    told = capsys.readouterr().out
    results = Results(RunStore(tiny / "runs"), PILOT)
    names = sorted(path.name for path in (tiny / "runs" / PILOT).iterdir())
    found = {result["config"]["lr"]: result["validation_perplexity"] for result in map(results.get, names)}
    best = min(found, key=lambda rate: found[rate])
    assert best < max(found)
    assert sorted(found) == sorted({0.1, 0.4, *(round(0.1 + 0.3 * k, 6) for k in range(len(found)))})
    assert f"{found[best]:.2f}*" in told
    assert reproduce(tiny, *pilots) == 0
    assert "; 0 to do on cpu" in capsys.readouterr().out

    longer = ("wikitext-context", "--mixers", "naju", "transformer", "--lengths", "16", "--seeds", "1")
    assert reproduce(tiny, *longer) == 0
    told = capsys.readouterr().out
    assert f"naju on made-up: learning rate {best:g}, the best of {len(found)} pilots of 0.000384M tokens" in told
    assert "transformer on made-up: learning rate 0.002, the paper's; it has no pilots" in told
    assert (tiny / "runs" / "language" / f"naju-d16-l16-lr{best:g}-0.000768M-made-up-s1" / "result.json").exists()
    assert "made-up, 0.000768M tokens; the paper's: wikitext-103, 1200M tokens" in told


def test_training_is_timed(tiny, capsys):
    options = ("--mixers", "naju", "--lengths", "16", "--modes", "eager")
    assert reproduce(tiny, "wikitext-efficiency", *options) == 0
    told = capsys.readouterr().out
    (folder,) = (tiny / "runs" / "language-speed").iterdir()
    result = RunFolder(folder).result()
    assert result["tokens_per_second"] > 0
    assert "Training, thousand tokens/s" in told
    assert "on made-up" in told


def test_every_command_has_its_options(capsys):
    for name in ("wikitext-context", "wikitext-width", "wikitext-efficiency", "gate-rank", "lr-pilot"):
        with pytest.raises(SystemExit) as stop:
            cli.main(["reproduce", name, "--help"])
        assert stop.value.code == 0
        told = capsys.readouterr().out
        assert all(option in told for option in ("--data", "--budget", "--mixers", "--seeds", "--on", "--partition"))
