"""The report's other pages: each experiment's numbers beside the paper's, and what their budget was."""

import json
import math
import re
from statistics import fmean, stdev

import pytest
from opened_pages import needs_chromium, opened, tables
from test_mqar_grid import written as recall
from written_results import result, write

from naju.lab.ablations import SWEEPS
from naju.lab.lra import Lra
from naju.lab.mqar import FULL, PAPER, RATES
from naju.lab.mqar_run import slice_name
from naju.lab.options import GridOptions
from naju.lab.report import write_report
from naju.lab.throughput import speed_tables
from naju.tasks.mqar import TEST

FULL_STEPS = 707  # of an epoch


def pages(tmp_path, *results, rows=()):
    folder = write(tmp_path / "results", *results)
    benchmarks = tmp_path / "benchmarks"
    benchmarks.mkdir(parents=True)
    (benchmarks / "forward.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    index = write_report(folder, tmp_path / "report", benchmarks)
    return {path.stem: path.read_text() for path in index.parent.glob("*.html")}


def swept(task, seed, **changes):
    config = {"mixer_options": {"d_state": 64, "f_bias": 6}, **changes}
    return result("naju", task, seed, variant="f_bias6", config=config)


def row(page, table, label):
    return next(row for row in tables(page)[table] if row[0] == label)[1:]


def test_there_is_a_page_for_each_and_the_index_links_to_it(tmp_path):
    made = pages(tmp_path, result("naju", "T2", 1))
    language = {"wikitext-context", "wikitext-width", "wikitext-efficiency", "gate-rank", "lr-pilot"}
    assert set(made) == {"index", "mqar", "lra", "throughput", *SWEEPS, *language}
    for name in set(made) - {"index"}:
        assert f'<a href="{name}.html">' in made["index"]
        assert '<a href="index.html">' in made[name]


def test_a_sweeps_numbers_stand_beside_the_papers_with_their_interval(tmp_path):
    results = [swept(task, seed) for task in ("T2", "T4") for seed in (1, 2, 3)]
    made = pages(tmp_path, *results)
    seeds, t2, near, far, passed = row(made["bias-f"], "bias-f-1", "naju d128 N64 f_bias 6")
    values = [drawn["accuracy"]["2048"]["all"] for drawn in results if drawn["task"] == "T4"]
    assert seeds == "3"
    assert far.startswith(f"{fmean(values):.3f} ± {stdev(values):.3f} worst {min(values):.3f} paper 0.60±0.27 (0.15) ")
    assert far.count("[") == t2.count("[") == near.count("[") == 1
    above = sum(drawn["best_validation"] > 0.9 for drawn in results if drawn["task"] == "T4")
    assert passed == f"{above}/3 paper 3/5"
    assert "54 of 60 runs with 5 seeds on T2 and T4 are missing" in made["bias-f"]
    assert row(made["readout"], "readout-1", "naju d128 N64 f_bias 6")[3] == far
    assert row(made["bias-i"], "bias-i-1", "naju d128 N64 i_bias -3")[0] == "0"


def test_swept_options_stay_off_the_main_page(tmp_path):
    made = pages(tmp_path, result("naju", "T2", 1), swept("T2", 1))
    assert [line[0] for line in tables(made["index"])["T2"]][1] == "Naju"
    assert "f_bias6" not in made["index"]


def test_a_reduced_budget_is_told(tmp_path):
    made = pages(tmp_path, swept("T4", 1, epochs=15), recall(1e-3, 1, 0.8, 0.7, 0.5, epochs=8))
    assert "Epochs: 50 in the paper; here 15 (T4)." in made["bias-f"]
    assert "T4 on 100,000 sequences for 15 epochs" in made["bias-f"]
    assert re.search(r"Reduced or changed \(each key bound once, [^)]*\): 8 epochs instead of 32\.", made["mqar"])
    assert "at most 8 epochs" in made["mqar"]
    assert "Fewer than 4 rates finished" in made["mqar"]
    assert "0 of 152 runs at the paper&#39;s budget, 1 in all" in made["mqar"]


def test_the_decay_of_biases_is_told_and_its_absence_stands_apart(tmp_path):
    made = pages(tmp_path, recall(1e-3, 1, 0.8, 0.7, 0.5, decay_all=False))["mqar"]
    factors = [sum(0.1 * rate * FULL_STEPS * (1 + math.cos(math.pi * e / 32)) / 2 for e in range(32)) for rate in RATES]
    left = ", ".join(f"{5 * math.exp(-factor):.2f} at {rate:g}" for rate, factor in zip(RATES, factors, strict=True))
    assert f"by learning rate: {left}." in made
    assert "weight decay on matrices alone instead of on everything." in made
    assert "0 of 152 runs at the paper&#39;s budget, 1 in all" in made


def test_recall_with_keys_bound_again_tells_what_needs_no_key(tmp_path):
    made = pages(tmp_path, recall(1e-3, 1, 0.8, 0.7, 0.5, rewriting=True))["mqar"]
    assert "A model that ignores the key and always answers the value of the last pair" in made


def test_a_sweep_says_in_which_precision_its_runs_were(tmp_path):
    half, whole = swept("T4", 1, bf16=True), swept("T2", 1)
    mixed = pages(tmp_path / "mixed", half, whole)["bias-f"]
    assert "1 of these runs computed under bfloat16 autocast, as the paper&#39;s did, 1 in float32." in mixed
    assert "as the paper&#39;s did." in pages(tmp_path / "half", half)["bias-f"]
    assert "autocast" not in pages(tmp_path / "none")["bias-f"]


def test_the_first_page_knows_of_runs_of_other_experiments(tmp_path):
    assert (
        "of this suite here, only of the experiments above." in pages(tmp_path, recall(1e-3, 1, 0.8, 0.7, 0.5))["index"]
    )


def test_recall_stands_beside_the_papers(tmp_path):
    made = pages(tmp_path, recall(1e-3, 1, 0.8, 0.9, 0.5), recall(1e-2, 1, 0.9, 0.95, 0.7))
    cells = next(row[1:] for row in tables(made["mqar"])["mqar-1"] if row[:2] == ["naju N64", "512"])
    assert cells[:4] == ["512", "1", "2", "0.01"]
    assert cells[4] == "0.950 paper 0.887 +0.063"
    assert cells[5] == "0.700 paper 0.384 +0.316"
    heading, *slices = tables(made["mqar"])["mqar-2"]
    assert heading[2:] == [slice_name(segment) for segment in TEST]
    assert slices == [["naju N64", "512", *["0.950"] * 6, "0.700"]]


def test_the_papers_recall_is_there_without_ours(tmp_path):
    papers = sum(row[f"acc_d{width}"] is not None for row in PAPER.values() for width in FULL.widths)
    heading, *rows = tables(pages(tmp_path)["mqar"])["mqar-1"]
    assert len(rows) == papers
    assert ["naju N64", "128", "0", "0", "–", "– paper 0.831", "–"] in rows
    assert heading[-1] == "256 pairs in 1024"


def test_unequal_chances_are_told(tmp_path):
    results = [
        recall(1e-3, 1, 0.8, 0.9, 0.5),
        recall(1e-2, 1, 0.9, 0.95, 0.7),
        recall(1e-2, 1, 0.9, 0.9, 0.7, width=64),
    ]
    told = "Models with more rates had better chances than those with fewer."
    assert told in pages(tmp_path / "unequal", *results)["mqar"]
    assert told not in pages(tmp_path / "equal", *results[:2])["mqar"]


def test_other_test_segments_have_a_table_of_their_own(tmp_path):
    usual, other = recall(1e-3, 1, 0.8, 0.9, 0.5), recall(1e-2, 1, 0.9, 0.95, 0.7)
    other["config"]["test_segments"] = [[64, 4, 10]]
    made = tables(pages(tmp_path, usual, other)["mqar"])
    assert [made[f"mqar-{place}"][0][-1] for place in (1, 3)] == ["256 pairs in 1024", "4 pairs in 64"]


def test_a_page_tells_how_to_read_it(tmp_path):
    made = pages(tmp_path, swept("T4", 1), result("naju", "T4", 1, variant="quick-f_bias6"))
    assert "T4 asks for the latest of several values" in made["bias-f"]
    assert "Difference of the means, ours minus the paper" in made["bias-f"]
    assert "Difference of the means" not in made["bias-i"]  # nothing is coloured there
    assert "1 of 60 runs, 1 quick" in made["index"]
    assert "<code>naju reproduce gate-rank</code> trains" in made["gate-rank-recall"]


def arena(mixer, task, seed, share, **changes):
    (run,) = Lra(task=(task,), mixers=(mixer,), seeds=(str(seed),), grid=GridOptions(device="cpu"), **changes).cells()
    facts = {"experiment": "lra", "mixer": mixer, "task": task, "variant": run.variant, "seed": seed}
    curve = [[100, 2.0, None], [200, 1.5, 0.1], [400, 1.2, share]]
    return {**facts, "config": run.to_json(), "test_accuracy": share, "outcome": "finished", "curve": curve}


def test_running_out_of_memory_is_told_beside_the_papers(tmp_path):
    ran_out = arena("mlstm", "image", 1, None) | {"outcome": "out of memory", "reason": "no room", "curve": []}
    assert row(pages(tmp_path, ran_out)["lra"], "lra-1", "mlstm")[3] == "out of memory paper 0.461"


def test_the_arena_has_its_curves_and_says_what_its_budget_was(tmp_path):
    results = [arena("naju", "image", seed, 0.5, budget=0.2) for seed in (1, 2)] + [arena("mamba", "image", 1, 0.25)]
    page = pages(tmp_path, *results)["lra"]
    image = row(page, "lra-1", "naju (budget0.2)")[3]
    assert image.startswith("0.500 ± 0.000 2 seeds worst 0.500 paper 0.561±0.005 −0.061 [")
    assert row(page, "lra-1", "mamba")[3] == "0.250 1 seed paper 0.513±0.002 −0.263"
    assert row(page, "lra-1", "mamba")[0] == "– paper 0.464±0.010"
    assert "1 of 45 runs at the paper&#39;s budget, 3 in all" in page
    assert "Reduced or changed here: budget0.2, image: 10 of 50 epochs, 45,000 of 45,000 examples" in page
    assert page.count("<figure") == 1
    for title in ("naju (budget0.2), seed 1", "naju (budget0.2), seed 2", "mamba, seed 1"):
        assert f"<title>{title}</title>" in page


@pytest.mark.parametrize("curve", [[[1, 2.0]], [["x", 1.0, None]], 5, [[10**400, 1.0, 0.5]], [[1, 1.0, "high"]]])
def test_an_arena_result_with_a_broken_curve_is_named(curve, tmp_path):
    made = pages(tmp_path, arena("naju", "image", 1, 0.5) | {"curve": curve})
    assert "0.json cannot be read as a result" in made["index"]


def measured(model, length, seconds, **changes):
    facts = {"bench": "forward", "model": model, "mode": "eager", "batch": 8, "n_layers": 4, "d_model": 256}
    machine = {"dtype": "bfloat16", "d_state": 64, "machine": {"accelerator": "a GPU"}}
    return {**facts, "length": length, "median_s": seconds, "peak_bytes": 5_000_000, **machine, **changes}


def test_speed_is_told_as_ratios_and_the_newest_row_counts(tmp_path):
    rows = [measured("naju", 512, 0.009), measured("naju", 512, 0.002), measured("mamba2", 512, 0.004)]
    rows += [measured("naju", 512, 1.0, batch=1), measured("naju", 512, 1.0, machine={"accelerator": None})]
    rows += [measured("naju", 512, 1.0, d_state=16), measured("naju", 512, 1.0, dtype="float32")]
    rows += [measured("gla", 512, 1.0) | {"reason": "the package fla is not installed"}]
    made = pages(tmp_path, rows=rows)
    assert row(made["throughput"], "throughput-1", "naju d256 eager")[0] == "2 (0.50) paper 2.9 (1.61)"
    assert row(made["throughput"], "throughput-1", "gla d256 eager")[0] == "– paper 2.7 (1.50)"
    assert "ours: a GPU" in made["throughput"]
    assert [table.machines for table in speed_tables(tmp_path / "nowhere")] == [()] * 4


def test_what_ran_out_of_memory_is_told_as_that(tmp_path):
    ran_out = measured("transformer-math", 8192, None, reason="out of memory") | {"peak_bytes": None}
    missing = measured("gla", 8192, None, reason="the package fla is not installed")
    page = pages(tmp_path, rows=[ran_out, missing, measured("mamba2", 8192, 0.004)])["throughput"]
    eight_thousand = tables(page)["throughput-1"][0].index("8192") - 1
    told = {
        name: row(page, "throughput-1", f"{name} d256 eager")[eight_thousand] for name in ("transformer-math", "gla")
    }
    assert told == {"transformer-math": "out of memory paper out of memory", "gla": "– paper 7.6 (0.72)"}
    assert row(page, "throughput-1", "mlstm d256 eager")[eight_thousand] == "– paper out of memory"
    assert "2 of the paper&#39;s 200 numbers" in page  # time and memory of mamba2


def test_training_is_told_of_the_papers_step_alone(tmp_path):
    step = {"n_layers": 6, "vocab_size": 50257, "length": 1024, "tokens_per_s": 3e5}
    rows = [measured("naju", seconds=0.03, **step, batch=batch) for batch in (8, 16)]
    (tmp_path / "training.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    throughput = speed_tables(tmp_path)[2]
    assert [cell.ours for cell in throughput.rows[0].cells] == [300.0, None, None]
    (tmp_path / "training.jsonl").write_text(json.dumps(rows[1]) + "\n")
    assert all(cell.ours is None for made in speed_tables(tmp_path)[2].rows for cell in made.cells)


def test_a_ratio_is_to_the_rival_of_the_same_run(tmp_path):
    rows = [measured("naju", 512, 0.002, when="morning"), measured("mamba2", 512, 0.004, when="morning")]
    rows += [measured("mamba2", 512, 0.008, when="evening"), measured("gla", 512, 0.004, when="evening")]
    rows += [measured("hgrn", 512, 0.004, when="night")]
    page = pages(tmp_path, rows=rows)["throughput"]
    named = {name: row(page, "throughput-1", f"{name} d256 eager")[0] for name in ("naju", "gla", "hgrn")}
    told = {name: cell.split(" paper")[0] for name, cell in named.items()}
    assert told == {"naju": "2 (0.50)", "gla": "4 (0.50)", "hgrn": "4"}


def test_a_recall_result_that_cannot_be_shown_is_named(tmp_path):
    broken = recall(1e-3, 1, 0.8, 0.9, 0.5)
    del broken["config"]["mixer_options"]
    made = pages(tmp_path, broken, {"experiment": "alchemy"})
    assert "0.json cannot be read as a result: its experiment cannot show it" in made["index"]
    assert "1.json cannot be read as a result: no experiment is called &#39;alchemy&#39;" in made["index"]


def test_a_seed_that_is_no_number_is_named(tmp_path):
    made = pages(tmp_path, recall(1e-3, 1, 0.8, 0.9, 0.5), recall(1e-2, 1, 0.8, 0.9, 0.5) | {"seed": "1"})
    assert "1.json cannot be read as a result: seed must be an integer, but is &#39;1&#39;" in made["index"]


@pytest.mark.parametrize("name", ["mixer", "task", "variant", "seed"])
def test_a_result_that_does_not_say_which_run_it_is_of_is_named(name, tmp_path):
    nameless = recall(1e-2, 1, 0.8, 0.9, 0.5)
    del nameless[name]
    made = pages(tmp_path, nameless)
    assert f"0.json cannot be read as a result: &#39;{name}&#39; is missing" in made["index"]


def test_a_sweep_leaves_out_what_was_not_measured(tmp_path):
    half, whole = swept("T4", 1), swept("T4", 2)
    del half["accuracy"]["512"]["all"]
    half["accuracy"]["2048"] = None
    numbers = row(pages(tmp_path, half, whole)["bias-f"], "bias-f-1", "naju d128 N64 f_bias 6")
    assert numbers[0] == "0 T2, 1 T4"
    assert numbers[2].startswith(f"{whole['accuracy']['512']['all']:.3f} paper")
    assert numbers[4].endswith("/2 paper 3/5")


def test_copies_in_a_folder_each_are_found(tmp_path):
    write(tmp_path / "results" / "diagnostics", result("naju", "T2", 1))
    write(tmp_path / "results" / "mqar", recall(1e-3, 1, 0.8, 0.9, 0.5))
    index = write_report(tmp_path / "results", tmp_path / "report", tmp_path)
    assert row(index.read_text(), "T2", "Naju")[0] == "1"
    assert "naju N64" in (index.parent / "mqar.html").read_text()


@needs_chromium
@pytest.mark.parametrize("name", ["mqar", "bias-f", "lra", "throughput"])
def test_the_browser_shows_the_same_tables(name, tmp_path):
    made = pages(tmp_path, swept("T4", 1), recall(1e-3, 1, 0.8, 0.9, 0.5))
    assert tables(opened(tmp_path / "report" / f"{name}.html")) == tables(made[name])
