"""Language models in the report: ours beside the paper's, by text and budget, with where their rates come from."""

import re

import pytest
from opened_pages import tables
from written_results import write

from naju.lab.report import write_report
from naju.lab.wikitext_tables import cost_tables, perplexity_tables, pilot_tables, told_perplexities, told_pilots

SIZES = {"d_model": 256, "length": 1024, "tokens": 1_200_000_000, "lr": 0.004}


def language(contender="naju", seed=1, validation=26.0, test=26.5, text="wikitext-103", part="language", **config):
    return {
        "experiment": part,
        "mixer": contender,
        "task": text,
        "variant": "-".join(map(str, config.values())),
        "seed": seed,
        "config": {**SIZES, **config},
        "validation_perplexity": validation,
        "test_perplexity": test,
        "parameters": 18_800_000,
        "tokens_per_second": 250_000.0,
        "peak_memory_gib": 2.0,
        "seconds": 60.0,
        "steps": 100,
        "machine": {"accelerator": "a GPU", "processor": "x"},
    }


def pages(tmp_path, *results):
    index = write_report(write(tmp_path / "results", *results), tmp_path / "report", tmp_path)
    return {path.stem: path.read_text() for path in index.parent.iterdir()}


def row(page, table, label):
    return next(row for row in tables(page)[table] if row[0] == label)[1:]


def test_perplexities_stand_beside_the_papers(tmp_path):
    results = [language(seed=1, validation=26.0), language(seed=2, validation=26.2)]
    results += [language("mamba2", validation=28.71, lr=0.003)]
    made = pages(tmp_path, *results)
    seeds, rate, validation, test, ratio, parameters, peak = row(
        made["wikitext-context"], "wikitext-context-1", "naju d256 L1024"
    )
    assert (seeds, rate, ratio) == ("2", "0.004", "1.000 paper 1.000")
    assert validation.startswith("26.10±0.14 paper 26.06±0.10 +0.04 [")
    assert test.startswith("26.50±0.00 paper 26.20±0.17 +0.30 [")
    assert (parameters, peak) == ("18,800,000", "2.00")
    rival = row(made["wikitext-context"], "wikitext-context-1", "mamba2 d256 L1024")
    assert rival[2] == "28.71 paper 28.15±0.14 +0.56"
    assert rival[4] == "1.100 paper 1.080"
    assert "3 of 45 runs on wikitext-103, 3 on all texts" in made["wikitext-context"]
    assert row(made["gate-rank"], "gate-rank-1", "naju d256 L1024")[2] == validation
    assert row(made["gate-rank"], "gate-rank-1", "naju-rank64 d256 L1024")[:3] == ["0", "–", "– paper 26.63±0.08"]
    assert len(tables(made["wikitext-width"])["wikitext-width-1"]) == 1 + 12


@pytest.mark.parametrize("broken", [{"d_model": "wide"}, {"length": None}, {"lr": "high"}])
def test_a_size_that_is_no_number_spoils_no_other_result(broken, tmp_path):
    made = pages(tmp_path, language(), language("mamba2", **broken))
    assert "1.json cannot be read as a result" in made["index"]
    assert row(made["wikitext-context"], "wikitext-context-1", "naju d256 L1024")[0] == "1"


def test_another_text_is_named_and_has_no_difference(tmp_path):
    made = pages(tmp_path, language(text="enwiki-long", validation=40.0, test=None, tokens=100_000_000))
    page = made["wikitext-context"]
    assert "<h2>enwiki-long, 100M tokens</h2>" in page
    assert row(page, "wikitext-context-1", "naju d256 L1024")[2:4] == ["40.00 paper 26.06±0.10", "– paper 26.20±0.17"]
    assert "0 of 45 runs on wikitext-103, 1 on all texts" in page
    assert row(page, "wikitext-context-2", "naju d256 L1024")[2] == "– paper 26.06±0.10"


def test_shapes_go_to_the_pages_they_belong_to(tmp_path):
    made = pages(tmp_path, language(d_model=512), language(length=4096), language("naju-rank32"))
    assert row(made["wikitext-width"], "wikitext-width-1", "naju d512 L1024")[0] == "1"
    assert row(made["wikitext-context"], "wikitext-context-1", "naju d256 L4096")[0] == "1"
    assert "naju d512" not in made["wikitext-context"]
    assert row(made["gate-rank"], "gate-rank-1", "naju-rank32 d256 L1024")[0] == "1"
    assert "L4096" not in made["gate-rank"]


def test_every_learning_rate_has_a_row_and_ratios_are_to_the_best_of_najus(tmp_path):
    runs = [language(lr=0.003, validation=20.0), language(lr=0.004, validation=30.0)]
    page = pages(tmp_path, *runs, language("mamba2", lr=0.003, validation=25.0))["wikitext-context"]
    shown = [cells for cells in tables(page)["wikitext-context-1"] if cells[0] == "naju d256 L1024"]
    assert [cells[1:3] for cells in shown] == [["1", "0.003"], ["1", "0.004"]]
    assert [cells[3].split()[0] for cells in shown] == ["20.00", "30.00"]
    assert row(page, "wikitext-context-1", "mamba2 d256 L1024")[4].startswith("1.250")


def test_a_seed_that_diverged_is_told(tmp_path):
    runs = [language(seed=1, validation=20.0), language(seed=2, validation=22.0), language(seed=3, validation=None)]
    page = pages(tmp_path, *runs)["wikitext-context"]
    assert row(page, "wikitext-context-1", "naju d256 L1024")[0] == "2 of 3, 1 diverged"


def test_other_files_of_one_name_have_a_table_of_their_own(tmp_path):
    runs = [language(text="notes"), language("mamba2", text="notes")]
    for run, content in zip(runs, ("aa", "bb"), strict=True):
        run["config"]["text"] = {"train.tokens": content}
    page = pages(tmp_path, *runs)["wikitext-context"]
    assert len(re.findall(r"<h2>notes \(files [0-9a-f]{8}\), ", page)) == 2


def pilots(*losses, contender="naju", **changes):
    return [
        language(contender, validation=loss, part="lr-pilot", lr=rate, tokens=15_000_000, **changes)
        for rate, loss in losses
    ]


def test_pilots_and_the_rates_they_chose(tmp_path):
    ended = pilots((0.003, 31.0), (0.004, 30.0), (0.005, None), text="enwiki-long")
    climbing = pilots((0.003, 31.0), (0.004, 30.0), contender="mamba", text="enwiki-long")
    runs = [language(text="enwiki-long", lr=0.004), language("mamba", text="enwiki-long", lr=0.003)]
    made = pages(tmp_path, *ended, *climbing, *runs)
    _, *rates = tables(made["lr-pilot"])["lr-pilot-1"][0]
    cells = dict(zip(rates, row(made["lr-pilot"], "lr-pilot-1", "naju"), strict=True))
    assert cells["0.003"] == "31.00 paper 31.10"
    assert cells["0.004"] == "30.00* paper 30.83"
    assert cells["0.005"] == "diverged paper 31.56"
    assert "a higher one may be better: mamba on enwiki-long." in made["lr-pilot"]
    told = made["wikitext-context"].replace("&#39;", "'")
    assert "naju on enwiki-long: learning rate 0.004, the best of 3 pilots of 15M tokens." in told
    assert "mamba on enwiki-long: learning rate 0.003, not the 0.004 that is the paper's; its pilots have not" in told


def test_costs_are_ratios_beside_the_papers(tmp_path):
    timed = {"part": "language-speed", "tokens": 2_064_384}
    naju = language(**timed) | {"tokens_per_second": 400_000.0}
    rival = language("mamba2", **timed) | {"tokens_per_second": 800_000.0}
    flash = language("transformer", **timed)
    compiled = language(**timed, compile=True)
    made = pages(tmp_path, naju, rival, flash, compiled)
    page = made["wikitext-efficiency"]
    assert row(page, "wikitext-efficiency-1", "naju d256 eager")[0] == "400 (0.50) paper 258 (0.55)"
    assert row(page, "wikitext-efficiency-1", "transformer-flash d256 eager")[0].startswith("250 (0.31) paper 412")
    assert row(page, "wikitext-efficiency-1", "naju d256 compiled")[0].startswith("250")
    assert "ours: a GPU" in page
    naju["config"]["micro_tokens"] = 32_768
    assert "8,192 in the paper and of 32,768 here" in pages(tmp_path / "other", naju)["wikitext-efficiency"]
    assert cost_tables([])[0].machines == ()
    smaller = language(**timed, micro_tokens=8192) | {"tokens_per_second": 300_000.0}
    both = pages(tmp_path / "both", naju, smaller)["wikitext-efficiency"]
    for table, size, speed in (("-1", "8,192", "300"), ("-3", "32,768", "400")):
        assert f"thousand tokens/s, micro-batches of {size} tokens" in both
        assert row(both, f"wikitext-efficiency{table}", "naju d256 eager")[0].startswith(speed)


def test_without_results_the_papers_numbers_are_there():
    assert told_perplexities([]) == told_pilots([]) == "no results yet"
    assert perplexity_tables([]) == []
    (table,) = pilot_tables([])
    assert [entry.contender for entry in table.rows] == ["naju", "mamba2", "mamba", "mamba-16", "transformer"]
    assert table.rows[2].paper[0.008] == pytest.approx(31.27)


def test_a_result_that_cannot_be_shown_is_named(tmp_path):
    broken = language()
    del broken["config"]["tokens"]
    made = pages(tmp_path, broken)
    assert "0.json cannot be read as a result: its experiment cannot show it" in made["index"]
