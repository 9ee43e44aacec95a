"""Multi-query recall: the cells of its grid, what a run leaves behind, and the best of several rates in its tables."""

from dataclasses import replace

import pytest
import torch

from naju.lab import mqar_run
from naju.lab.comparison import Comparison
from naju.lab.lock import LockLostError
from naju.lab.mqar import FULL, NAMES, PAPER, RATES, Mqar
from naju.lab.mqar_run import Data, Recaller, run_mqar, slice_name
from naju.lab.mqar_tables import last_value_shares, papers_table, recall_tables, told_mqar
from naju.lab.options import GridOptions
from naju.lab.paper import MeanStd
from naju.lab.runs import RunFolder
from naju.models import LanguageModel, ModelConfig
from naju.tasks import IGNORE
from naju.tasks.mqar import TEST, TRAINING, Segment
from naju.training import Reporter, StoppedError, evaluate, fit
from naju.training.seeding import derived_seed

CPU = GridOptions(device="cpu")
SILENT = Reporter()


def cells(**options):
    return Mqar(**options, grid=CPU).cells()


def tiny(rate=1e-2, seed=1, **changes):
    """Twelve steps, four epochs."""
    (run,) = cells(quick=True, mixers=("naju",), rates=(rate,), seeds=(str(seed),))
    data = replace(
        run.data, training=(Segment(16, 2, 8), Segment(32, 4, 16)), test=(Segment(16, 2, 9), Segment(32, 4, 6))
    )
    model = replace(run.model, d_model=8, mixer_options={"d_state": 4})
    return replace(run, data=data, model=model, training=replace(run.training, batch_size=8, steps=12), **changes)


def test_the_protocol():
    for run in cells():
        training = run.training
        assert (training.batch_size, training.weight_decay, training.warmup_ratio, training.clip) == (
            256,
            0.1,
            0.0,
            None,
        )
        assert (run.epoch_steps, run.steps, training.bf16) == (707, 32 * 707, False)
        assert (run.data.training, run.data.test, run.data.n_symbols) == (TRAINING, TEST, 8192)
        assert run.model.n_layers == 2
        assert run.data.random_filler
        assert not run.data.rewriting
    assert RATES == (1e-3, 3.16e-3, 1e-2, 3.16e-2)
    first = cells()[0]
    assert first.to_json()["enough"] == 0.99
    assert [first.factor(step) for step in (0, 706)] == [1.0, 1.0]
    assert first.factor(16 * 707) == pytest.approx(0.5)
    assert 0 < first.factor(31 * 707) == first.factor(32 * 707 - 1) < 0.01


def test_the_grid_is_the_papers_table_four_times():
    numbers = sum(row[f"acc_d{width}"] is not None for row in PAPER.values() for width in FULL.widths)
    names = [run.name for run in cells()]
    assert len(set(names)) == len(names) == numbers * len(RATES)
    first = cells()[: 3 * 2 * 4]
    assert {(run.model.mixer, run.model.d_model, run.model.mixer_options["d_state"]) for run in first} == {
        (mixer, width, 64) for mixer in ("naju", "mamba2", "mamba") for width in (128, 256)
    }
    assert [run.training.lr for run in first] == [rate for rate in RATES for _ in range(6)]
    assert [run.model.mixer for run in first[:6]] == ["naju", "naju", "mamba2", "mamba2", "mamba", "mamba"]


def test_what_departs_from_the_protocol_shows_in_the_name():
    choice = {"mixers": ("naju",), "widths": (128,), "states": (64,), "rates": (1e-3,)}
    assert [run.name for run in cells(**choice)] == ["naju-d128-n64-lr0.001-s1", "naju-d128-n64-reparam-lr0.001-s1"]
    changed = cells(**choice, reparam="with", rewriting=True, filler="zero", epochs=8, bf16=True)
    assert [run.name for run in changed] == ["naju-d128-n64-reparam-lr0.001-rewriting-zeros-8-epochs-bf16-s1"]
    (run,) = changed
    assert run.model.mixer_options == {"d_state": 64, "gate_reparam": True}
    assert run.steps == 8 * 707
    assert run.data.task(TEST[-1]).n_questions == 128
    assert not run.data.task(TEST[-1]).random_filler
    assert run.data.task(Segment(64, 5, 1)).n_questions == 3
    (usual,) = cells(**choice, reparam="without", epochs=1)
    assert usual.steps == 707
    assert usual.data.task(Segment(64, 5, 1)).n_questions == 5


def test_other_options_and_what_decays_show_in_the_name_and_reach_the_model():
    choice = {"mixers": ("naju",), "widths": (64,), "states": (16,), "rates": (1e-3,), "reparam": "without"}
    (run,) = cells(**choice, options=("f_bias=2", "alpha=1"), decay_all=False, epochs=8)
    assert run.name == "naju-d64-n16-f_bias2-alpha1-lr0.001-8-epochs-matrix-decay-s1"
    mixer = run.build().language.backbone.blocks[1].mixer
    assert mixer.forget.bias.detach().unique().tolist() == [2.0]
    assert mixer.alpha == 1
    assert not run.training.decay_all
    assert run.to_json()["decay_all"] is False
    (usual,) = cells(**choice)
    assert usual.training.decay_all
    assert "decay_all" not in usual.to_json()  # as in configs of before there was a choice


def test_what_decay_alone_leaves():
    """Step by step, as AdamW does it."""
    (run,) = cells(mixers=("naju",), widths=(64,), states=(16,), rates=(1e-2,), reparam="without", epochs=2)
    parameter = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = torch.optim.AdamW([parameter], lr=1.0, weight_decay=0.1)
    for step in range(run.steps):
        optimizer.param_groups[0]["lr"] = run.training.lr * run.factor(step)
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert run.kept == pytest.approx(parameter.item(), rel=1e-9)


def test_the_papers_names_are_taken():
    by_paper, by_us = (
        cells(mixers=names, widths=(64,)) for names in (("xlstm", "transformer"), ("mlstm", "attention"))
    )
    assert [run.name for run in by_paper] == [run.name for run in by_us]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"options": ("d_state=32",)}, "options must leave d_state to states and gate_reparam to reparam"),
        ({"options": ("gate_reparam=true",)}, "options must leave d_state to states and gate_reparam to reparam"),
        ({"mixers": ("mamba",), "options": ("f_bias=2",)}, "mixer 'mamba' has no option f_bias"),
        ({"mixers": ("xlstm", "mlstm")}, "mixers must be different ones of .*, but are mlstm, mlstm"),
        ({"mixers": ("gla",)}, "mixers must be different ones of attention, mlstm, mamba, mamba2, naju, but are gla"),
        ({"widths": (32,)}, "widths must be different ones of 64, 128, 256, 512, but are 32"),
        ({"states": (32,)}, "states must be different ones of 16, 64, but are 32"),
        ({"quick": True, "states": (64,)}, "states must be different ones of 16, but are 64"),
        (
            {"mixers": ("naju",), "quick": True, "reparam": "with"},
            "states and reparam leave none of attention, mlstm, mamba N16, mamba2 N16, naju N16$",
        ),
        ({"epochs": 0}, "epochs must be a positive integer, but is 0"),
        ({"rates": (1e-3, 0.001)}, "rates must differ in six digits, but are 0.001, 0.001"),
    ],
)
def test_a_choice_that_the_table_does_not_have_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        cells(**options)


def test_a_choice_of_states_leaves_models_that_have_none():
    assert {run.model.mixer for run in cells(states=(64,))} >= {"attention", "naju"}


def test_the_quick_grid_has_every_mixer_that_is_asked_for():
    assert {run.model.mixer for run in cells(quick=True, mixers=NAMES)} == set(NAMES)
    assert {run.model.mixer for run in cells(quick=True)} == {"naju", "mamba2", "attention"}


def test_widths_that_the_paper_leaves_out_can_be_asked_for():
    asked, usual = ([run.model.d_model for run in cells(mixers=("attention",), widths=w)] for w in ((512,), ()))
    assert set(asked) == {512}
    assert 512 not in usual


@pytest.mark.parametrize("contender", PAPER, ids=lambda contender: contender.label)
def test_every_model_of_the_table_can_be_built(contender):
    (run,) = [
        run
        for run in cells(mixers=(contender.mixer,), widths=(64,), rates=(1e-3,))
        if run.model.mixer_options == contender.options
    ]
    model = run.build()
    assert len(model.language.backbone.blocks) == 2
    assert model.language.backbone.embedding.weight.std().item() == pytest.approx(0.02, rel=0.02)


def test_reading_at_some_places_is_the_language_model_there():
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=16, d_model=8, n_layers=2, mixer_options={"d_state": 4})
    recaller, whole = Recaller(config), LanguageModel(config)
    whole.load_state_dict(recaller.language.state_dict())
    tokens, places = torch.randint(16, (3, 12)), torch.tensor([[0, 5], [11, 2], [3, 3]])
    logits, _ = whole(tokens)
    expected = torch.stack([logits[row, places[row]] for row in range(3)])
    torch.testing.assert_close(recaller(tokens, places), expected)


def test_a_run_and_its_result(tmp_path):
    run = tiny()
    folder = RunFolder(tmp_path / run.name)
    result = run_mqar(run, folder, SILENT)
    assert folder.result() == result
    assert folder.config() == result["config"]
    assert list(result["accuracy"]) == ["all", "2 pairs in 16", "4 pairs in 32"]
    shares = [cell["all"] for cell in result["accuracy"].values()]
    assert shares[0] == pytest.approx((9 * shares[1] + 6 * shares[2]) / 15)
    assert result["steps"] == 12 == folder.metrics()[-1]["step"]
    assert [row["step"] for row in folder.metrics() if row["validation_accuracy"] is not None] == [3, 6, 9, 12]
    assert result["seconds"] > 0
    assert all(name.startswith("model.") for name in folder.checkpoint().tensors)
    assert run_mqar(run, folder, Reporter(begin=lambda step: pytest.fail("trained"))) == result


def test_a_run_learns_at_the_sweeps_rates_and_is_examined_on_data_of_its_own(tmp_path, monkeypatch):
    fits, asked = [], []

    def fitted(*given):
        fits.append(given)
        return fit(*given)

    def evaluated(model, task, **options):
        asked.append(options)
        return replace(evaluate(model, task, **options), overall=options["length"] / 64)

    monkeypatch.setattr(mqar_run, "fit", fitted)
    monkeypatch.setattr(mqar_run, "evaluate", evaluated)
    run, folder = tiny(), RunFolder(tmp_path / "run")
    result = run_mqar(run, folder, SILENT)
    assert result["accuracy"]["all"]["all"] == pytest.approx((9 * 0.25 + 6 * 0.5) / 15)  # every example counts alike
    assert [row["lr"] for row in folder.metrics()] == [1e-2 * run.factor(step) for step in range(12)]
    assert fits[0][-1] == 0.99  # a validation above this is enough
    purposes = [f"{kind} data of {slice_name(segment)}" for kind in ("validation", "test") for segment in run.data.test]
    seeds = [options["generator"].initial_seed() for options in asked]
    assert seeds == [derived_seed(1, purpose) for purpose in (*4 * purposes[:2], *purposes[2:])]
    assert [options["count"] for options in asked[-2:]] == [9, 6]
    assert [options["batch_size"] for options in asked[-2:]] == [2**17 // 16, 2**17 // 32]


def test_stopped_and_resumed_it_ends_with_the_same_metrics(tmp_path):
    run, steps = tiny(), []
    whole, halved = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "halved")
    result = run_mqar(run, whole, SILENT)
    with pytest.raises(StoppedError):
        run_mqar(run, halved, Reporter(progress=lambda step, _: steps.append(step), stop=lambda: 5 in steps))
    again = run_mqar(run, halved, SILENT)
    assert again["accuracy"] == result["accuracy"]
    assert (halved.path / "metrics.jsonl").read_bytes() == (whole.path / "metrics.jsonl").read_bytes()


def test_a_run_that_was_taken_over_leaves_no_result(tmp_path, monkeypatch):
    folder, learned = RunFolder(tmp_path / "run"), mqar_run.learned

    def while_another_takes_over(*given):
        (folder.path / "lock.json").write_text('{"host": "elsewhere", "pid": 7}')
        return learned(*given)

    monkeypatch.setattr(mqar_run, "learned", while_another_takes_over)
    with pytest.raises(LockLostError):
        run_mqar(tiny(), folder, SILENT)
    assert folder.result() is None


def test_a_rate_that_diverges_is_a_result(tmp_path, monkeypatch):
    def explodes(*given, **named):
        raise FloatingPointError("the loss became infinite or NaN at step 3; a lower lr may help")

    monkeypatch.setattr("naju.lab.mqar_run.fit", explodes)
    result = run_mqar(tiny(), RunFolder(tmp_path / "run"), SILENT)
    assert result["diverged"].startswith("the loss became infinite")
    assert "diverged" in told_mqar([result])


def written(rate, seed, validation, test, hardest, width=512, reparam="without", **changes):
    choice = {"mixers": ("naju",), "widths": (width,), "states": (64,), "reparam": reparam, "rates": (rate,)}
    (run,) = cells(**choice, seeds=(str(seed),), **changes)
    slices = {slice_name(segment): {"all": test} for segment in TEST}
    accuracy = {"all": {"all": test}, **slices, "256 pairs in 1024": {"all": hardest}}
    return {
        "experiment": "mqar",
        "mixer": "naju",
        "task": "MQAR",
        "variant": run.variant,
        "seed": seed,
        "config": run.to_json(),
        "final_validation": validation,
        "accuracy": accuracy,
        "seconds": 1.0,
        "steps": 10,
    }


def test_the_papers_epochs_are_no_change():
    assert written(1e-3, 1, 0.8, 0.8, 0.5, epochs=32) == written(1e-3, 1, 0.8, 0.8, 0.5)


def test_the_best_rate_is_chosen_by_validation_and_never_by_the_test():
    results = [written(1e-3, 1, 0.8, 0.99, 0.9), written(1e-2, 1, 0.9, 0.85, 0.4), written(1e-3, 2, 0.7, 0.75, 0.3)]
    (table,) = recall_tables(results)
    (row,) = table.rows
    assert table.is_papers
    assert row.rates == {1: 1e-2, 2: 1e-3}
    assert row.tried == 1  # by the second seed
    assert row.overall == Comparison((0.85, 0.75), MeanStd(0.887, None))
    assert row.hardest == Comparison((0.4, 0.3), MeanStd(0.384, None))
    assert row.overall.difference == pytest.approx(0.8 - 0.887)
    told = told_mqar(results)
    assert "0.800±0.071 (0.750)" in told
    assert "0.887" in told


def test_reparameterised_gates_have_a_row_of_their_own():
    results = [written(1e-3, 1, 0.8, 0.8, 0.5), written(1e-3, 1, 0.8, 0.9, 0.5, reparam="with")]
    (table,) = recall_tables(results)
    assert [(row.contender.label, row.overall.values) for row in table.rows] == [
        ("naju N64", (0.8,)),
        ("naju N64 reparam", (0.9,)),
    ]


def test_runs_with_other_options_have_rows_and_with_another_decay_tables_of_their_own():
    usual, other = written(1e-3, 1, 0.8, 0.8, 0.5), written(1e-3, 1, 0.8, 0.9, 0.5, options=("f_bias=2", "alpha=1"))
    on_matrices = written(1e-3, 1, 0.8, 0.7, 0.5, decay_all=False)
    papers, apart = recall_tables([on_matrices, other, usual])
    assert [(row.contender.label, row.overall.values) for row in papers.rows] == [
        ("naju N64", (0.8,)),
        ("naju N64 alpha=1 f_bias=2", (0.9,)),
    ]
    assert papers.rows[1].overall.paper is None
    assert apart.departures == ("weight decay on matrices alone instead of on everything",)
    assert apart.title == f"{papers.title}, weight decay on matrices alone"


def test_recall_with_keys_bound_again_is_told_beside_the_answer_that_needs_no_key():
    """Checked on examples: the share of questions whose answer is the value of the last pair."""
    told = recall_tables([written(1e-3, 1, 0.8, 0.7, 0.5, rewriting=True)])[0].note
    shares = last_value_shares(TEST)
    assert f"{sum(shares) / len(shares):.3f} over all slices, {', '.join(f'{s:.3f}' for s in shares)}" in told
    assert told in told_mqar([written(1e-3, 1, 0.8, 0.7, 0.5, rewriting=True)])
    assert recall_tables([written(1e-3, 1, 0.8, 0.7, 0.5)])[0].note == ""
    for segment, share in zip(TEST[:4], shares, strict=False):
        task = Data(training=TRAINING, test=TEST, rewriting=True).task(segment)
        batch = task.sample(50, segment.length, torch.Generator().manual_seed(0))
        last = batch.tokens[:, 2 * segment.n_pairs - 1, None].expand_as(batch.tokens)
        asked = batch.targets != IGNORE
        assert (batch.targets == last)[asked].double().mean().item() == pytest.approx(share)


def test_a_seed_that_diverged_is_told():
    lost = written(1e-3, 3, 0.0, 0.0, 0.0) | {"diverged": "the loss is nan"}
    (table,) = recall_tables([written(1e-3, 1, 0.8, 0.8, 0.5), lost])
    assert (len(table.rows[0].rates), table.rows[0].diverged) == (1, 1)
    assert "1 of 2, 1 diverged" in told_mqar([written(1e-3, 1, 0.8, 0.8, 0.5), lost])


def test_other_data_and_budgets_have_tables_of_their_own():
    results = [written(1e-3, 1, 0.8, 0.8, 0.5), written(1e-3, 1, 0.8, 0.7, 0.5, rewriting=True)]
    results.append(written(1e-3, 1, 0.8, 0.6, 0.5, epochs=8))
    tables = recall_tables(results)
    assert [table.is_papers for table in tables] == [True, False, False]
    for change in ({"bf16": True}, {"filler": "zero"}):
        changed = written(1e-3, 1, 0.8, 0.6, 0.5, **change)
        assert [table.is_papers for table in recall_tables([changed, results[0]])] == [True, False]
    fewer = written(1e-3, 1, 0.8, 0.6, 0.5)
    fewer["config"] = fewer["config"] | {"sequences": 18_000}
    assert recall_tables([fewer])[0].departures == ("18,000 sequences instead of 180,000",)
    rewriting = next(table for table in tables if "keys bound twice" in table.title)
    assert rewriting.rows[0].overall.paper is None  # the paper has no such numbers
    assert told_mqar([]) == "no results yet"


def test_the_papers_table_has_runs_at_its_budget_only_and_all_of_the_papers_rows():
    own, short = written(1e-3, 1, 0.8, 0.8, 0.5), written(1e-3, 1, 0.8, 0.6, 0.5, epochs=8)
    other_test = own | {"config": own["config"] | {"test_segments": [[64, 4, 10]]}}
    for results, values in (([short, other_test], set()), ([short, other_test, own], {(0.8,)})):
        table = papers_table(recall_tables(results))
        assert {row.overall.values for row in table.rows} - {()} == values
        assert len(table.rows) == len(cells(rates=(1e-3,)))
