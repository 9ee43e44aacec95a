"""The report: its numbers are those of the result files, beside the paper's, and it says what is not there."""

from __future__ import annotations

import html
import json
import re
import sys
from statistics import fmean, stdev
from xml.etree import ElementTree

import pytest
from opened_pages import needs_chromium, opened, pixels, share_of, tables, width_needed
from written_results import LENGTHS, result, some_results, write

from naju import cli
from naju.lab.diagnostics import FULL, TASKS, diagnostic_run
from naju.lab.pages.render import environment
from naju.lab.paper import diagnostics
from naju.lab.report import write_report

NAJU = diagnostics().models[0]


def report(tmp_path, *results):
    return write_report(write(tmp_path / "results", *results), tmp_path / "report")


def shown(values, paper):
    """What a cell has to say, computed from the files' own numbers."""
    told = f"{fmean(values):.3f}"
    if len(values) > 1:
        told += f" ± {stdev(values):.3f} worst {min(values):.3f}"
    if paper is None:
        return told
    difference = round(fmean(values) - paper.mean, 2)
    sign = "▲ +" if difference > 0 else "▼ −" if difference < 0 else "= "
    return f"{told} paper {paper.mean:.2f} ± {paper.std:.2f} {sign}{abs(difference):.2f}"


def cells(page, table, label):
    return next(row for row in tables(page)[table] if row[0] == label)[1:]


@pytest.mark.parametrize("task", TASKS)
def test_a_task_table_holds_mean_deviation_and_worst_seed_beside_the_papers(task, tmp_path):
    results = some_results()
    page = report(tmp_path, *results).read_text()
    mine = [drawn for drawn in results if (drawn["mixer"], drawn["task"]) == ("naju", task)]
    seeds, above, fit, *accuracies = cells(page, task, "Naju")
    assert seeds == "3"
    assert above == str(sum(drawn["best_validation"] > 0.9 for drawn in mine))
    assert fit == " / ".join(
        f"{fmean(drawn[key] for drawn in mine):.3f}" for key in ("train_accuracy", "best_validation")
    )
    for length, cell in zip(LENGTHS, accuracies, strict=True):
        values = [drawn["accuracy"][str(length)]["all"] for drawn in mine]
        assert cell == shown(values, NAJU.accuracy[task].get(length))


def test_the_first_picture_is_a_file_of_its_own(tmp_path):
    picture = report(tmp_path, *some_results()).parent / "frontier.svg"
    texts = ["".join(text.itertext()) for text in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("Naju") == 2  # ours and the paper's
    assert {"xLSTM", "RetNet"} <= set(texts)
    assert not (write_report(write(tmp_path / "none"), tmp_path / "empty").parent / "frontier.svg").exists()


def test_one_seed_has_no_deviation_and_a_model_the_paper_lacks_no_difference(tmp_path):
    results = some_results()
    page = report(tmp_path, *results).read_text()
    for mixer, label in (("mlstm", "xLSTM"), ("coupled", "Coupled")):
        (drawn,) = (drawn for drawn in results if (drawn["mixer"], drawn["task"]) == (mixer, "T2"))
        row = next((row for row in diagnostics().models if row.mixer == mixer), None)
        paper = row.accuracy["T2"][2048] if row else None
        assert cells(page, "T2", label)[5] == shown([drawn["accuracy"]["2048"]["all"]], paper)


def test_growing_events_have_their_own_table(tmp_path):
    results = some_results()
    page = report(tmp_path, *results).read_text()
    mine = [drawn for drawn in results if (drawn["mixer"], drawn["task"]) == ("naju", "T4")]
    values = [drawn["growing"]["2048"]["all"] for drawn in mine]
    assert shown(values, NAJU.accuracy["T4"][2048]) in cells(page, "T4-growing", "Naju")


def test_the_joint_score_is_the_weaker_of_the_two(tmp_path):
    results = some_results()
    page = report(tmp_path, *results).read_text()
    by_task = {
        task: [
            drawn["accuracy"]["2048"]["all"] for drawn in results if (drawn["mixer"], drawn["task"]) == ("naju", task)
        ]
        for task in ("T2", "T4")
    }
    weaker = min(by_task.values(), key=fmean)
    assert cells(page, "main", "Naju")[-1] == shown(weaker, NAJU.accuracy["T4"][2048])


def test_rows_of_the_paper_without_runs_stay_visible(tmp_path):
    page = report(tmp_path, result("naju", "T2", 1)).read_text()
    for row in diagnostics().models[1:]:
        cell = row.accuracy["T2"][2048]
        assert cells(page, "main", row.label)[1] == f"paper {cell.mean:.2f} ± {cell.std:.2f}"


def test_sizes_and_times_are_added_up(tmp_path):
    results = some_results()
    page = report(tmp_path, *results).read_text()
    mine = [drawn for drawn in results if drawn["mixer"] == "naju"]
    parameters, state, runs, steps, hours, _, machine = cells(page, "costs", "Naju")
    assert parameters == "1,001,000 – 1,004,000 paper 1.09M"
    assert (state, runs, machine) == ("16,384 paper 16,384", "12", "a device")
    assert steps == f"{sum(drawn['steps'] for drawn in mine):,}"
    assert hours == f"{sum(drawn['seconds'] for drawn in mine) / 3600:.2f}"


def test_sizes_find_their_row_of_the_paper(tmp_path):
    page = report(
        tmp_path,
        result("mamba", "T2", 1, variant="d128-n16", state_size=4096),
        result("mamba", "T2", 1, state_size=8192, config={"d_model": 256}),
        result("mamba", "T2", 1, variant="tiny", state_size=512, config={"d_model": 32}),
        result("transformer", "T2", 1, state_size=None, config={"d_model": 256, "epochs": 30}),
        result("transformer", "T2", 1, variant="3x-epochs", state_size=None, config={"d_model": 256, "epochs": 90}),
    ).read_text()
    beside = {row[0]: row[1].partition(" ")[2] for row in tables(page)["costs"][1:]}
    assert beside == {
        "Mamba d128 N16": "paper 0.55M",
        "Mamba d256 N16": "paper 1.84M",
        "Mamba (tiny)": "not in the paper's main table",
        "Transformer": "paper 4.29M",
        "Transformer 3 × epochs": "paper 4.29M",
    }


def test_variants_of_one_size_keep_different_names(tmp_path):
    page = report(tmp_path, result("naju", "T2", 1), result("naju", "T2", 1, variant="hidden-head")).read_text()
    assert [row[0] for row in tables(page)["T2"][1:3]] == ["Naju", "Naju (hidden-head)"]


def test_small_runs_are_not_set_beside_the_papers_lengths(tmp_path):
    small = {"d_model": 32, "length": 64}
    drawn = result("naju", "T2", 1, variant="quick", state_size=2048, config=small)
    shares = dict(zip(("64", "128", "256"), drawn["accuracy"].values(), strict=False))
    page = report(tmp_path, drawn | {"accuracy": shares}).read_text()
    head, *rows = tables(page)["T2"]
    assert head[4:] == ["64", "128", "256"]
    assert [row[0] for row in rows] == ["Naju (quick)"]
    assert rows[0][4:] == [f"{cell['all']:.3f}" for cell in shares.values()]
    assert cells(page, "main", "Naju (quick)")[1] == f"{shares['256']['all']:.3f}"
    assert "not trained at the paper's length" in page


def test_missing_cells_are_counted(tmp_path):
    page = report(tmp_path, *some_results()).read_text()
    counts = {row[0]: row[1:] for row in tables(page)["missing"][1:]}
    assert counts["Naju"] == ["3", "3", "3", "3"]
    assert counts["xLSTM"] == ["none", "1", "none", "1"]
    assert counts["GLA"] == ["none"] * 4
    assert counts["Mamba d128 N16"] == ["–", "none", "–", "none"]  # nor does the paper have T1 and T3 there
    have = sum(int(count) for row in counts.values() for count in row if count.isdigit())
    cells_expected = sum(count != "–" for row in counts.values() for count in row)
    assert f"{5 * cells_expected - have} runs are missing" in page


def test_tasks_that_a_quick_grid_leaves_out_are_not_missing(tmp_path):
    def counted(*results):
        page = report(tmp_path, *results).read_text()
        counts = {row[0]: row[1:] for row in tables(page)["missing"][1:]}
        return counts, int(re.search(r"(\d+) runs are missing", page)[1])

    quick = {"state_size": 2048, "config": {"d_model": 32, "length": 64}}
    variants = ("quick", "quick-2x-epochs")
    _, before = counted()
    counts, missing = counted(
        *(result("naju", task, 1, variant=variant, **quick) for variant in variants for task in ("T2", "T4"))
    )
    assert [counts[f"Naju ({variant})"] for variant in variants] == [["–", "1", "–", "1"]] * 2
    assert missing == before  # nobody has planned more of them


def told_list(page, name):
    """The items of the list of this id, without markup."""
    inner = page.partition(f'id="{name}"')[2].partition("</ul>")[0]
    return [html.unescape(item) for item in re.findall(r"<li>(.*?)</li>", inner, re.S)]


def test_each_tasks_budget_stands_above_its_table(tmp_path):
    def budgets(*results):
        return told_list(report(tmp_path, *results).read_text(), "budgets")

    t2 = {"sequences": 50_000, "length": 512, "epochs": 30}
    same = [result(mixer, "T2", 1, config=t2, steps=46_860) for mixer in ("naju", "gla")]
    words = "50,000 sequences of length 512 for 30 epochs (46,860 steps)"
    assert budgets(*same) == [f"T2: {words} for every model."]
    longer = result("mamba2", "T2", 1, config=t2 | {"epochs": 90}, steps=140_580)
    three_times = words.replace("30 epochs (46,860", "90 epochs (140,580")
    assert budgets(*same, longer) == [f"T2: {words} for Naju, GLA; {three_times} for Mamba-2."]
    quick = [result(mixer, "T2", 1, variant="quick", config=t2 | {"epochs": 3}, steps=9) for mixer in ("naju", "gla")]
    assert budgets(*same, *quick)[0].endswith("for 3 epochs (9 steps) for all that are called (quick).")
    assert "an unrecorded number of sequences" in budgets(result("naju", "T1", 1))[0]


def test_what_a_variants_name_stands_for_is_read_from_its_runs(tmp_path):
    def run(task, variant, **changes):
        usual = diagnostic_run(FULL, "naju", task, 1, device="cpu").to_json()
        config = {**usual, "variant": variant} | changes
        return result("naju", task, 1, variant=variant, config=config)

    options = {"d_state": 64, "f_bias": 2.5}
    page = report(
        tmp_path,
        run("T2", "default"),
        run("T2", "mine", mixer_options=options, epochs=60),
        run("T4", "mine", mixer_options=options),
        run("T2", "matrix-decay", decay_all=False),
        run("T2", "by-hand"),
    ).read_text()
    assert told_list(page, "variants") == [
        "by-hand: nothing that is recorded (a name given by hand, to runs of older code for example)",
        "matrix-decay: decay_all False",
        "mine: epochs 60, f_bias 2.5",
    ]
    assert 'id="variants"' not in report(tmp_path / "none", run("T2", "default")).read_text()


def test_at_the_training_length_both_rules_of_t4_are_one_measurement(tmp_path):
    results = some_results()
    page = report(tmp_path, *results).read_text()
    at_512 = [cells(page, board, "Naju")[3] for board in ("T4", "T4-growing")]
    assert at_512[0] == at_512[1] != ""


def test_deviations_from_the_budget_are_named_with_their_place(tmp_path):
    page = report(
        tmp_path,
        result("naju", "T2", 1, config={"epochs": 30}),
        result("gla", "T2", 1, config={"epochs": 30, "lr": 1e-3}),
        result("gla", "T1", 1),
    ).read_text()
    rows = {row[0]: row[1:] for row in tables(page)["deviations"][1:]}
    assert rows["epochs"] == ["50", "30 (T2) 50 (T1)"]
    assert rows["learning rate"] == ["0.0003", "0.0003 (T1; T2: Naju) 0.001 (T2: GLA)"]
    assert set(rows) == {"epochs", "learning rate"}


def test_without_results_it_says_so(tmp_path, capsys):
    page = write_report(write(tmp_path / "results"), tmp_path / "report").read_text()
    assert "There is no finished run of this suite here." in page
    assert "on 0 finished runs" in capsys.readouterr().out


def test_what_cannot_be_read_is_left_out_and_named(tmp_path, capsys):
    folder = write(
        tmp_path / "results",
        result("naju", "T2", 1),
        result("naju", "T1", 1) | {"task": "T9"},
        result("naju", "T4", 1, accuracy={"512": {"all": float("nan")}}),
        result("naju", "T4", 2, accuracy={"512": {"all": 1.5}}),
        result("naju", "T4", 3, curve=[[1, "low", None]]),
    )
    (folder / "torn.json").write_text('{"mixer": "naju", ')
    (folder / "list.json").write_text("[]")
    page = write_report(folder, tmp_path / "report").read_text()
    told = capsys.readouterr().out
    assert "on 1 finished runs" in told
    for problem in (
        "1.json cannot be read as a result: task must be one of T1, T2, T3, T4, but is &#39;T9&#39;",
        "2.json cannot be read as a result: NaN is no measurement",
        "3.json cannot be read as a result: an accuracy must lie in [0, 1], but one is 1.5",
        "4.json cannot be read as a result: a value has another type",
        "torn.json cannot be read as a result: it is not JSON",
        "list.json cannot be read as a result: a value has another type",
    ):
        assert problem in page


def test_runs_folders_are_read_too_and_unfinished_runs_named(tmp_path):
    for name in ("done", "begun"):
        (tmp_path / "runs" / "diagnostics" / name).mkdir(parents=True)
        (tmp_path / "runs" / "diagnostics" / name / "config.json").write_text("{}")
    (tmp_path / "runs" / "diagnostics" / "done" / "result.json").write_text(json.dumps(result("naju", "T2", 1)))
    page = write_report(tmp_path / "runs", tmp_path / "report").read_text()
    assert cells(page, "T2", "Naju")[0] == "1"
    assert "diagnostics/begun has a config but no result: unfinished" in page
    own = write_report(tmp_path / "runs" / "diagnostics" / "done", tmp_path / "report").read_text()
    assert cells(own, "T2", "Naju")[0] == "1"
    assert "Left out" not in own


def test_of_two_results_for_one_cell_the_later_counts(tmp_path):
    early = result("naju", "T2", 1, when="2030-01-01T00:00:00+00:00", train_accuracy=0.25)
    late = result("naju", "T2", 1, when="2030-01-02T00:00:00+00:00", train_accuracy=0.75)
    for order in ((early, late), (late, early)):
        page = report(tmp_path, *order).read_text()
        assert cells(page, "T2", "Naju")[0] == "1"
        assert cells(page, "T2", "Naju")[2].startswith("0.750")


HOSTILE = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">"


def frontier_places(page):
    """Title -> (x, y) of every point of the frontier, read off its own axes."""
    drawing = page[page.index("<svg") : page.index("</svg>")]
    across = {
        label: float(x)
        for x, label in re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="middle">([\d.]+)<', drawing)
    }
    up = {label: float(y) - 4 for y, label in re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)<', drawing)}
    marks = re.findall(r'<g class="point[^>]*><title>([^<]*)</title>.*?translate\(([\d.]+) ([\d.]+)\)', drawing, re.S)
    return {
        title: (
            (float(x) - across["0"]) / (across["1"] - across["0"]),
            (float(y) - up["0"]) / (up["1"] - up["0"]),
        )
        for title, x, y in marks
    }


def test_the_frontier_has_every_point_where_its_axes_say(tmp_path):
    results = some_results()
    places = frontier_places(report(tmp_path, *results).read_text())
    for mixer, label in (("naju", "Naju"), ("mlstm", "xLSTM"), ("coupled", "Coupled")):
        want = [
            fmean(
                drawn["accuracy"]["2048"]["all"]
                for drawn in results
                if (drawn["mixer"], drawn["task"]) == (mixer, task)
            )
            for task in ("T2", "T4")
        ]
        (place,) = (place for title, place in places.items() if title.startswith(f"{label}, ours"))
        assert place == pytest.approx(want, abs=2e-3)  # a tenth of a pixel is 2e-4
    for row in diagnostics().models:
        (place,) = (place for title, place in places.items() if title.startswith(f"{row.label}, the paper"))
        assert place == pytest.approx([row.accuracy[task][2048].mean for task in ("T2", "T4")], abs=2e-3)


def test_models_that_are_nearly_always_right_are_drawn_once_more_apart(tmp_path):
    right = {str(length): {"all": 0.97} for length in LENGTHS}
    good = [result(mixer, task, 1, accuracy=right) for mixer in ("naju", "coupled") for task in ("T2", "T4")]
    page, plain = (report(tmp_path / name, *given).read_text() for name, given in (("two", good), ("one", good[:2])))
    corner = page[page.index("The same above 0.9") : page.index("All tasks at four times")]
    assert {"Naju, ours", "Coupled, ours"} == set(re.findall(r"<title>(\w+, ours)", corner))
    assert "the paper:" not in corner
    assert "The same above 0.9" not in plain


def test_names_are_text(tmp_path):
    page = report(tmp_path, result(HOSTILE, "T2", 1, variant=HOSTILE, machine={"accelerator": HOSTILE})).read_text()
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page


def test_the_page_asks_for_nothing_from_outside(tmp_path):
    page = report(tmp_path, *some_results()).read_text()
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)
    assert "default-src 'none'" in page


@needs_chromium
def test_the_browser_shows_the_numbers_and_runs_no_name(tmp_path):
    results = [*some_results(), result(HOSTILE, "T2", 1)]
    path = report(tmp_path, *results)
    document = opened(path)
    assert "<title>Naju: diagnostic results</title>" in document
    assert tables(document) == tables(path.read_text())


def test_models_of_another_training_length_are_in_tables_only(tmp_path):
    short = {"length": 64, "epochs": 3}
    measured = {length: {"all": 0.5, "early": 0.5, "near": 0.5} for length in ("64", "256")}
    quick = [result("gla", task, 1, variant="quick", config=short, accuracy=measured) for task in ("T2", "T4")]
    page = report(tmp_path, *some_results(), *quick).read_text()
    assert "In tables only, for they were trained at another length: GLA (quick)." in page
    assert "GLA (quick)" in {row[0] for row in tables(page)["main"]}
    assert "GLA (quick)" not in "".join(re.findall(r"<svg.*?</svg>", page, re.S))
    alone = report(tmp_path / "alone", *quick).read_text()
    assert "GLA (quick), ours" in alone
    assert "In tables only" not in alone


@needs_chromium
@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_fits_a_narrow_screen(width, tmp_path):
    assert width_needed(report(tmp_path, *some_results()), width) <= width


@needs_chromium
def test_the_frontier_is_seen_in_light_and_dark(tmp_path):
    path = report(tmp_path, *some_results())
    blank = report(tmp_path / "blank")
    light, dark, nothing = pixels(path), pixels(path, dark=True), pixels(blank)
    assert light[5, 5].min() > 0.98
    assert dark[5, 5].max() < 0.15
    for picture, naju, xlstm in ((light, "#0072b2", "#2a9fd6"), (dark, "#56b4e9", "#8fd3ff")):
        assert share_of(picture, naju) > 5e-5  # a marker has about 60 pixels of the 1.2 million
        assert share_of(picture, xlstm) > 5e-5
    assert share_of(nothing, "#0072b2") == 0


def test_a_folder_that_is_none_is_one_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", str(tmp_path / "nowhere"), "-o", str(tmp_path / "report")])
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert "runs must be a folder" in told
    assert told.count("\n") == 1


def test_without_jinja2_it_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    environment.cache_clear()
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", str(write(tmp_path / "results")), "-o", str(tmp_path / "report")])
    assert stop.value.code == 2
    assert "pip install 'naju[report]'" in capsys.readouterr().err


@pytest.mark.parametrize("variant", ["1000-sequences", "5-epochs", "hidden-head", "quick-d128-n64", "f_bias2-D_init1"])
def test_runs_of_another_experiment_are_named_and_not_beside_the_papers(variant, tmp_path):
    page = report(tmp_path, result("naju", "T2", 1, variant=variant)).read_text()
    label = f"Naju ({variant})"
    assert not any("paper" in cell for cell in cells(page, "T2", label)[3:])
    assert cells(page, "T2", "Naju")[0] == "0"


def test_only_rows_of_a_sweep_leave_the_first_page(tmp_path):
    page = report(tmp_path, result("naju", "T4", 1, variant="f_bias4"), result("naju", "T4", 1)).read_text()
    assert "f_bias4" not in page
    sweep = (tmp_path / "report" / "bias-f.html").read_text()
    assert "f_bias 4" in sweep


def test_a_model_that_nobody_planned_lacks_no_runs(tmp_path):
    def missing(*results):
        told = report(tmp_path / str(len(results)), *results).read_text()
        return int(re.search(r"([\d,]+) runs are missing", told)[1].replace(",", ""))

    planned, beside = result("naju", "T2", 1), result("naju", "T2", 1, variant="1000-sequences")
    assert missing(planned) == missing(planned, beside)
