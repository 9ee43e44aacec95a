"""Which runs a grid has, in which order, under which names; and the tables."""

import statistics
from itertools import product

import pytest
import torch
from torch import nn

from naju.lab.diagnostics import FULL, QUICK, SUITE, TASKS, Changes, diagnostic_run, in_order, spread, tables
from naju.lab.reproduce import Diagnostics, GridOptions, parse_seeds
from naju.mixers import MIXERS

SEEDS = (1, 2, 3, 4, 5)


def run(mixer="naju", task="T2", protocol=FULL, device="cpu", **changes):
    return diagnostic_run(protocol, mixer, task, 1, device=device, changes=Changes(**changes))


def test_the_shared_protocol():
    for mixer, task in product(SUITE, TASKS):
        training = run(mixer, task).training
        assert (training.lr, training.weight_decay, training.batch_size) == (3e-4, 1e-4, 32)
        assert (training.warmup_ratio, training.clip, training.length) == (0.05, 1.0, 512)
        assert training == run("naju", task).training  # no mixer has a budget of its own
    budgets = {task: (run(task=task).training.sequences, run(task=task).steps) for task in TASKS}
    assert budgets == {"T1": (10_000, 15_600), "T2": (50_000, 46_860), "T3": (10_000, 15_600), "T4": (100_000, 46_875)}
    assert run(device="cuda").training.bf16
    assert not run().training.bf16
    assert run().examination.test_lengths == (512, 1024, 2048, 4096, 8192)
    assert (run().examination.test_sequences, run().examination.validation_sequences) == (2000, 1000)


def test_sizes_of_the_state_are_those_of_the_papers_main_table():
    sizes = {mixer: run(mixer).model.mixer_options.get("d_state") for mixer in SUITE}
    given = {mixer: size for mixer, size in sizes.items() if size is not None}
    assert given == {"naju": 64, "coupled": 64, "mamba2": 64, "mamba": 16}


@pytest.mark.parametrize("mixer", SUITE)
def test_every_mixer_of_the_suite_can_be_built(mixer):
    model = run(mixer, "T1").model
    assert model.d_model == (256 if mixer in ("mamba", "transformer") else 128)
    built = model.build(run(mixer, "T1").build_task(), 0)
    assert len(built.backbone.blocks) == 4
    assert type(built.backbone.blocks[0].mixer) is MIXERS[mixer]


def test_the_transformer_reaches_the_longest_test():
    mixer = run("transformer", "T1").model.build(run("transformer", "T1").build_task(), 0).backbone.blocks[0].mixer
    assert mixer.max_length >= max(FULL.examination.test_lengths)


@pytest.mark.parametrize(
    ("changes", "variant"),
    [
        ({}, "default"),
        ({"size": "d256-n32"}, "d256-n32"),
        ({"epochs": 50}, "50-epochs"),
        ({"epochs_factor": 3}, "3x-epochs"),
        ({"sequences": 10_000, "epochs": 50}, "10000-sequences-50-epochs"),
        ({"head": "hidden"}, "hidden-head"),
    ],
)
def test_what_departs_from_the_protocol_shows_in_the_name(changes, variant):
    assert run(**changes).name == f"naju-T2-{variant}-s1"


def test_changes_change_what_they_say():
    usual = run("mamba")
    assert run("mamba", size="d128-n64").model.mixer_options == {"d_state": 64}
    assert run("mamba", size="d128-n64").model.d_model == 128
    assert run(epochs_factor=3).steps == 3 * run().steps
    assert run(epochs=50, sequences=10_000).steps == 15_600
    hidden = run("mamba", head="hidden").model.build(usual.build_task(), 0)
    plain = usual.model.build(usual.build_task(), 0)
    extra = sum(p.numel() for p in hidden.parameters()) - sum(p.numel() for p in plain.parameters())
    assert extra == 256 * 256 + 256
    assert [type(part) for part in hidden.head] == [nn.Linear, nn.GELU, nn.Linear]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": "128"}, "size must look like d128-n16"),
        ({"size": "d0-n16"}, "size must look like d128-n16"),
        ({"sequences": 31}, "sequences must be at least a batch, 32, but is 31"),
        ({"epochs": 0}, "epochs must be a positive integer, but is 0"),
        ({"head": "round"}, "head must be 'linear' or 'hidden', but is 'round'"),
    ],
)
def test_changes_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        run(**changes)


def test_a_grid_fills_the_contested_tasks_first_and_more_seeds_last():
    cells = in_order(SUITE, tuple(TASKS), SEEDS)
    assert len(cells) == len(set(cells)) == len(SUITE) * 4 * 5
    assert cells[:10] == [("naju", task, seed) for seed in SEEDS for task in ("T2", "T4")]
    rivals, rest = ("coupled", "mamba2", "gla", "mlstm", "mamba"), ("transformer", "hgrn", "retnet", "rwkv")
    assert cells[10:30] == [(mixer, task, seed) for seed in (1, 2) for mixer in rivals for task in ("T2", "T4")]
    assert cells[30:38] == [(mixer, task, 1) for mixer in rest for task in ("T2", "T4")]
    assert {task for _, task, _ in cells[38:76]} == {"T1", "T3"}
    assert [(mixer, seed) for mixer, _, seed in cells[38:76]] == [(mixer, seed) for mixer, _, seed in cells[:38]]
    assert not {"naju"} & {mixer for mixer, _, _ in cells[76:]}


def chosen_with(*options, mixer="gla"):
    return Diagnostics(
        mixers=(mixer,), tasks=("T2",), seeds=("1",), options=options, grid=GridOptions(device="cpu")
    ).cells()


def test_options_of_a_mixer_make_a_variant():
    (cell,) = chosen_with("d_conv=4")
    assert cell.name == "gla-T2-d_conv4-s1"
    assert cell.model.build(cell.build_task(), 0).backbone.blocks[0].mixer.conv.weight.shape[1] == 4
    assert [cell.name for cell in chosen_with("f_bias=2.5", mixer="naju")] == ["naju-T2-f_bias2.5-s1"]
    (cell,) = chosen_with("f_bias=[-1,6]", mixer="naju")
    assert cell.name == "naju-T2-f_bias-1to6-s1"
    assert cell.model.build(cell.build_task(), 0).backbone.blocks[0].mixer.forget.bias[[0, -1]].tolist() == [-1.0, 6.0]


def test_weight_decay_on_matrices_alone_makes_a_variant_too():
    usual, plain, changed = (
        Diagnostics(mixers=("naju",), tasks=("T2",), seeds=("1",), grid=GridOptions(device="cpu"), **choice).cells()[0]
        for choice in ({}, {"decay_all": False}, {"decay_all": False, "options": ("f_bias=2",)})
    )
    assert [cell.variant for cell in (usual, plain, changed)] == ["default", "matrix-decay", "f_bias2-matrix-decay"]
    assert [cell.training.decay_all for cell in (usual, plain, changed)] == [True, False, False]
    assert "decay_all" not in usual.to_json()
    assert plain.to_json() == {**usual.to_json(), "variant": "matrix-decay", "decay_all": False}


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("d_conv", "options must look like name=value, but one is 'd_conv'"),
        ("d_conv=wide", "options must be numbers or lists of them, but d_conv is 'wide'"),
        ("width=4", "mixer 'gla' has no option width"),
        ("d_conv=2.5", "d_conv must be an int, but is float"),
        ("d_conv=-1", "d_conv must be positive, or 0 for no convolution, but is -1"),
        ("d_conv=1e400", "options must be finite, but d_conv is 1e400"),
    ],
)
def test_options_that_a_mixer_does_not_have_are_refused_before_anything_runs(option, words):
    with pytest.raises(ValueError, match=words):
        chosen_with(option)


def test_options_are_named_once_and_sizes_are_those_a_mixer_has():
    for changes, words in (
        ({"options": ("f_bias=2", "f_bias=3")}, "options has f_bias twice: 2 and 3"),
        ({"size": "d32-n16"}, "mixer 'gla' has no option d_state"),
    ):
        with pytest.raises(ValueError, match=words):
            Diagnostics(mixers=("naju", "gla"), grid=GridOptions(device="cpu"), **changes).cells()


def test_the_whole_suite_ends_with_the_longer_transformer():
    cells = Diagnostics(grid=GridOptions(device="cpu")).cells()
    longer = [cell for cell in cells if cell.variant == "3x-epochs"]
    assert cells[-len(longer) :] == longer
    assert {cell.model.mixer for cell in longer} == {"transformer"}
    assert len({cell.name for cell in cells}) == len(cells) == 200 + 20
    chosen = Diagnostics(mixers=("transformer",), tasks=("T2",), seeds=("1",), grid=GridOptions(device="cpu")).cells()
    assert [cell.name for cell in chosen] == ["transformer-T2-default-s1"]


def test_the_quick_grid_is_small_and_has_names_of_its_own():
    cells = Diagnostics(quick=True, grid=GridOptions(device="cpu")).cells()
    assert [cell.name for cell in cells] == [
        f"{mixer}-{task}-quick-s1" for mixer in ("naju", "coupled", "mamba2") for task in ("T2", "T4")
    ]
    assert sum(cell.steps for cell in cells) == 3 * (1500 + 2500)
    sizes = {cell.model.build(cell.build_task(), 0).backbone.blocks[0].mixer.state_size for cell in cells}
    assert len(sizes) == 1


def test_the_quick_grid_has_the_other_tasks_for_who_asks_for_them():
    cells = Diagnostics(mixers=("naju",), tasks=("T1", "T3"), quick=True, grid=GridOptions(device="cpu")).cells()
    assert [(cell.name, cell.steps) for cell in cells] == [("naju-T1-quick-s1", 1500), ("naju-T3-quick-s1", 500)]
    for cell in cells:
        for length in (cell.training.length, *cell.examination.test_lengths):
            assert cell.build_task().sample(2, length, torch.Generator()).tokens.shape == (2, length)


def test_seeds():
    assert parse_seeds(["1-5"]) == SEEDS
    assert parse_seeds(["3", "1-2", "2"]) == (3, 1, 2)
    for wrong in ("5-1", "a", "1-", "-1", ""):
        with pytest.raises(ValueError, match="seeds must be numbers or ranges such as 1-5"):
            parse_seeds([wrong])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixers": ("naju", "lstm")}, "mixers must be different ones of naju, .* but are naju, lstm"),
        ({"mixers": ("naju", "naju")}, "mixers must be different ones"),
        ({"tasks": ("T5",)}, "tasks must be different ones of T1, T2, T3, T4, but are T5"),
        ({"tasks": ("T2", "T2"), "quick": True}, "tasks must be different ones of T1, T2, T3, T4, but are T2, T2"),
    ],
)
def test_unknown_names_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Diagnostics(**options, grid=GridOptions(device="cpu")).cells()


def result(mixer, seed, shares, task="T4", variant="default", best=0.95, growing=None):
    lengths = dict(zip(("512", "1024"), ({"all": share, "near": 0.0} for share in shares), strict=True))
    facts = {"mixer": mixer, "task": task, "variant": variant, "seed": seed, "best_validation": best}
    return {**facts, "accuracy": lengths, **({} if growing is None else {"growing": {"1024": {"all": growing}}})}


def test_tables_show_mean_sample_deviation_worst_seed_and_successes():
    shares = [(0.99, 0.5), (0.97, 0.9), (0.2, 0.1)]
    results = [result("naju", seed, share, best=share[0]) for seed, share in enumerate(shares)]
    results += [result("gla", 0, (0.8, 0.7), best=0.9), result("naju", 0, (1.0, 1.0), task="T2")]
    told = tables(results)
    first, second = told.split("\n\n")
    assert first.splitlines()[1].split() == ["naju", "default", "1", "1/1", "1.000", "(1.000)", "1.000", "(1.000)"]
    _, naju, gla = second.splitlines()
    wanted = [f"{statistics.mean(c):.3f}±{statistics.stdev(c):.3f} ({min(c):.3f})" for c in zip(*shares, strict=True)]
    assert naju.split() == ["naju", "default", "3", "2/3", *" ".join(wanted).split()]
    assert gla.split() == ["gla", "default", "1", "0/1", "0.800", "(0.800)", "0.700", "(0.700)"]


def test_growing_events_have_a_table_of_their_own_and_variants_their_rows():
    results = [result("naju", 1, (0.9, 0.8), growing=0.6), result("naju", 1, (0.9, 0.8), variant="3x-epochs")]
    plain, growing = tables(results).split("\n\n")
    assert [line.split()[1] for line in plain.splitlines()[1:]] == ["default", "3x-epochs"]
    assert growing.splitlines()[0].startswith("T4, growing")
    assert growing.splitlines()[1].split()[-2:] == ["0.600", "(0.600)"]
    assert tables([]) == "no results yet"


def test_one_seed_has_no_deviation():
    assert spread([0.5]) == (0.5, None, 0.5)
    assert spread([0.5, 0.7]).std == pytest.approx(statistics.stdev([0.5, 0.7]))


def test_quick_and_full_differ_in_sizes_only():
    assert set(QUICK.settings) <= set(SUITE)
    assert run(protocol=QUICK).training.weight_decay == run().training.weight_decay
