"""The sweeps: their rows are the paper's, their runs those of the suite, their tables the results' own numbers."""

import math
from statistics import fmean, stdev

import pytest

from naju.lab.ablations import SWEEPS, BiasF, BiasI, GateRank, MambaFactorial, Readout, sweep_tables, told_sweep
from naju.lab.comparison import Comparison
from naju.lab.diagnostics import FULL
from naju.lab.options import GridOptions
from naju.lab.paper import MeanStd, paper_tables
from naju.lab.reproduce import EXPERIMENTS, Diagnostics

CPU = GridOptions(device="cpu")


def cells(sweep, **options):
    return sweep(**options, grid=CPU).cells()


@pytest.mark.parametrize(
    ("sweep", "table", "rows"),
    [
        (BiasF, "tab:bf_sweep", 6),
        (BiasI, "tab:bi_sweep", 4),
        (Readout, "tab:norm_state", 8),
        (MambaFactorial, "tab:mamba_factorial", 10),
    ],
)
def test_rows_are_those_of_the_paper(sweep, table, rows):
    assert [setting.paper for setting in sweep.settings] == list(paper_tables()[table].rows)
    assert len(sweep.settings) == rows
    assert len({cell.name for cell in cells(sweep)}) == len(cells(sweep)) == rows * 2 * 5


def test_a_setting_that_two_tables_share_is_one_run():
    suite = {cell.name: cell for cell in Diagnostics(grid=CPU).cells()}
    own = {cell.name: cell for sweep in SWEEPS.values() for cell in cells(sweep)}
    for name in ("naju-T4-default-s1", "mamba-T2-default-s5"):
        assert own[name] == suite[name]
    by_command = {command: {cell.name for cell in cells(sweep)} for command, sweep in SWEEPS.items()}
    assert all("naju-T4-default-s1" in names for names in by_command.values())
    assert "naju-T4-f_bias6-s1" in by_command["bias-f"] & by_command["readout"]
    assert "naju-T4-d128-n32-s1" in by_command["bias-f"] & by_command["mamba-factorial"]
    for command, sweep in SWEEPS.items():
        assert (EXPERIMENTS[sweep].command, EXPERIMENTS[sweep].name) == (command, "diagnostics")


def mixer(sweep, name):
    run = next(cell for cell in cells(sweep) if cell.name == name)
    return run.model.build(run.build_task(), 1).backbone.blocks[0].mixer


def test_settings_reach_the_layer():
    assert mixer(BiasF, "naju-T4-d128-n32-f_bias4-s1").forget.bias.unique().tolist() == [4.0]
    assert mixer(BiasF, "naju-T4-d128-n32-f_bias4-s1").d_state == 32
    assert mixer(BiasI, "naju-T4-i_bias-3-s1").write.bias.unique().tolist() == [-3.0]
    assert mixer(Readout, "naju-T4-alpha1-s1").alpha == 1.0
    assert mixer(Readout, "naju-T4-default-s1").alpha == pytest.approx(1 / 8)
    assert mixer(GateRank, "naju-T4-gate_rank32-s1").forget.reduce.out_features == 32
    assert mixer(MambaFactorial, "mamba-T4-d256-n64-s1").d_state == 64


def test_a_seed_of_everything_comes_before_the_next():
    found = cells(BiasI, seeds=("1-2",))
    assert [cell.training.seed for cell in found] == [1] * 8 + [2] * 8
    assert [cell.task for cell in found[:8]] == ["T4"] * 4 + ["T2"] * 4
    with pytest.raises(ValueError, match="tasks must be different ones of T4, T2, but are T1"):
        cells(BiasI, tasks=("T1",))
    assert len(cells(BiasI, tasks=(), seeds=("1",))) == 8


def test_rows_can_be_chosen_by_the_size_of_the_state():
    chosen = BiasF(states=(64,), seeds=("1",), tasks=("T4",), grid=CPU).cells()
    assert {cell.model.mixer_options["d_state"] for cell in chosen} == {64}
    assert len(chosen) == 3
    with pytest.raises(ValueError, match="states must be different ones of 32, 64, but are 7"):
        BiasF(states=(7,), grid=CPU).cells()


@pytest.mark.parametrize("sweep", SWEEPS.values(), ids=SWEEPS)
def test_the_quick_sweep_is_small_and_apart(sweep):
    found = cells(sweep, quick=True)
    assert all("quick" in cell.name and cell.model.d_model == 32 for cell in found)
    assert len({cell.name for cell in found}) == len(found)
    assert sum(cell.steps for cell in found) <= 32_000
    run = found[-1]
    run.model.build(run.build_task(), 1)


def test_a_setting_that_is_a_mixers_own_is_the_suites_run():
    """Naju's quick state is in its protocol, Mamba's is the mixer's default."""
    names = {cell.name for cell in cells(MambaFactorial, quick=True)}
    assert names >= {"naju-T4-quick-s1", "mamba-T4-quick-s1", "mamba-T4-quick-d32-n64-s1"}


def test_a_gates_rank_shrinks_with_the_quick_width():
    assert {cell.variant for cell in cells(GateRank, quick=True)} == {"quick", "quick-gate_rank16", "quick-gate_rank8"}


def result(task, seed, near, far, variant="f_bias6", best=0.95, lengths=("512", "2048"), mixer="naju"):
    accuracy = dict(zip(lengths, ({"all": near}, {"all": far}), strict=True))
    facts = {"experiment": "diagnostics", "mixer": mixer, "task": task, "variant": variant, "seed": seed}
    return {**facts, "best_validation": best, "accuracy": accuracy}


def test_a_table_has_the_results_numbers_and_the_papers():
    far = (0.9, 0.5, 0.1)
    results = [result("T4", seed, 0.8, share, best=share + 0.05) for seed, share in enumerate(far)]
    results += [result("T2", 0, 1.0, 0.98)]
    (table,) = sweep_tables(BiasF, results)
    row = next(row for row in table.rows if row.setting.label == "naju d128 N64 f_bias 6")
    assert table.headings == ("T2@2048", "T4@512", "T4@2048")
    assert [number.values for number in row.numbers] == [(0.98,), (0.8, 0.8, 0.8), far]
    assert row.told_passed == "1/3"
    assert row.told_paper_passed == "3/5"
    assert row.numbers[2].paper == MeanStd(0.6, 0.27)
    told = told_sweep(BiasF, results)
    line = next(line for line in told.splitlines() if line.startswith("naju d128 N64 f_bias 6"))
    assert f"{fmean(far):.3f}±{stdev(far):.3f} (0.100)  1/3" in line
    assert "0.60±0.27 (0.15)  3/5" in line
    assert told_sweep(BiasI, results) == "no results yet"


def test_two_mixers_of_one_size_have_rows_of_their_own():
    (table,) = sweep_tables(MambaFactorial, [result("T4", 1, 0.8, 0.7, variant="d128-n32", mixer="mamba")])
    filled = {row.setting.label: row.seeds for row in table.rows if row.seeds}
    assert filled == {"mamba d128 N32": 1}


def test_quick_results_have_a_table_without_the_paper():
    results = [result("T4", 1, 0.9, 0.7, variant="quick-i_bias-4", lengths=("64", "256"))]
    full, quick = sweep_tables(BiasI, results)
    assert full.protocol is FULL
    assert quick.headings == ("T2@256", "T4@64", "T4@256")
    assert all(number.paper is None for row in quick.rows for number in row.numbers)
    assert "paper" not in told_sweep(BiasI, results)


def test_the_interval_of_a_difference():
    ours, paper = (0.9, 0.8, 0.7), MeanStd(0.6, 0.1)
    rounding = 0.005  # of the paper's two digits
    half = rounding + 4.303 * math.sqrt(stdev(ours) ** 2 / 3 + 0.1**2 / 5)  # two degrees of freedom
    assert Comparison(ours, paper, 5).interval == pytest.approx((0.2 - half, 0.2 + half))
    alone = rounding + 4.303 * math.sqrt(stdev(ours) ** 2 / 3)
    for unknown in (Comparison(ours, MeanStd(0.6, None), 5), Comparison(ours, paper)):  # the paper's spread, its seeds
        assert unknown.interval == pytest.approx((0.2 - alone, 0.2 + alone))
    assert Comparison((0.9,), paper, 5).interval is None
    assert Comparison((), paper, 5).difference is None
    many = tuple(0.5 + 0.01 * (-1) ** seed for seed in range(30))
    assert Comparison(many, MeanStd(0.4, None)).interval[0] > 0.09
    printed = Comparison((0.994, 0.995, 0.996), MeanStd(0.99, 0.0), 5)  # may have been 0.9949 in both
    assert printed.interval[0] < 0 < printed.interval[1]
    assert Comparison((0.6, 0.6), MeanStd(0.512, None)).interval == pytest.approx((0.088 - 0.0005, 0.088 + 0.0005))
    assert Comparison((0.6, 0.6), MeanStd(0.5, 0.125)).interval == pytest.approx((0.1 - 0.0005, 0.1 + 0.0005))


@pytest.mark.parametrize(
    ("values", "told", "shade"),
    [
        ((), "-", ""),
        ((0.6194,), "+0.019", ""),
        ((0.6196,), "+0.020", "better1"),
        ((0.7,), "+0.100", "better2"),
        ((0.26,), "-0.340", "worse3"),
        ((0.58, 0.58), "-0.020 [-0.025, -0.015]", "worse1"),
    ],
)
def test_a_difference_is_told_with_its_interval_and_coloured_as_it_is_told(values, told, shade):
    comparison = Comparison(values, MeanStd(0.6, None))
    assert (comparison.told_difference(), comparison.shade) == (told, shade)
