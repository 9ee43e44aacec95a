"""A run of the arena from data to result, its cells, and its table."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from naju.lab import lra, lra_run
from naju.lab.lock import LockLostError
from naju.lab.lra import Lra, describe_lra, lra_rows, told_lra
from naju.lab.lra_run import LraModel, LraRun, PaddingAware, limited, ran_out_of_memory, run_lra
from naju.lab.options import GridOptions
from naju.lab.runs import RunFolder
from naju.mixers import MIXERS
from naju.tasks.lra import LRA
from naju.tasks.lra.examples import byte_examples
from naju.training import Reporter, StoppedError, TrainConfig

CPU = GridOptions(device="cpu")
SHORT = {name: replace(task, length=24) for name, task in LRA.items()}


def splits(task):
    """Whether there are more a than b, in texts of many lengths; pairs hold the text twice."""
    rng = np.random.default_rng(0)
    made = {}
    for name, count in (("train", 64), ("validation", 20), ("test", 20)):
        lengths = [24] * count if not task.is_padded else rng.integers(3, 24, size=count)
        texts = [bytes(rng.choice([0, 1], size=length).astype(np.uint8)) for length in lengths]
        labels = [int(2 * sum(text) > len(text)) for text in texts]
        made[name] = byte_examples([text for text in texts for _ in range(1 + task.has_pairs)], labels, 24)
    return made


@pytest.fixture(autouse=True)
def _small_data(monkeypatch):
    monkeypatch.setattr(lra_run, "LRA", SHORT)
    monkeypatch.setattr(lra_run, "load_data", lambda task, *where: splits(task))


def tiny_run(task="text", mixer="naju", **changes):
    options = {"d_state": 4} if mixer == "naju" else {}
    model = LraModel(mixer=mixer, mixer_options=options, d_model=8, n_layers=1)
    training = TrainConfig(steps=12, length=24, batch_size=8, lr=1e-2, warmup_ratio=0.1, seed=1, sequences=64)
    return replace(LraRun(task=task, variant="tiny", model=model, training=training), **changes)


def finished(tmp_path, run, reporter=None):
    folder = RunFolder(tmp_path / run.name)
    return folder, run_lra(run, folder, reporter or Reporter())


@pytest.mark.parametrize("task", LRA)
def test_every_task_runs_to_a_result(tmp_path, task):
    folder, result = finished(tmp_path, tiny_run(task))
    assert json.loads((folder.path / "result.json").read_text()) == result
    assert (result["experiment"], result["task"], result["outcome"]) == ("lra", task, "finished")
    assert 0 <= result["test_accuracy"] <= 1
    assert result["curve"][-1][0] == 12
    assert result["config"] == folder.config()
    assert not {"data", "cache"} & set(result["config"])
    assert result["machine"]["peak_memory"] is None  # known of a GPU only
    assert all(name.startswith("model.") for name in folder.checkpoint().tensors)
    assert "test 0." in describe_lra(result) or "test 1." in describe_lra(result)


def test_a_run_that_was_taken_over_leaves_no_result(tmp_path, monkeypatch):
    folder, learned = RunFolder(tmp_path / tiny_run().name), lra_run.learned

    def while_another_takes_over(*given):
        (folder.path / "lock.json").write_text('{"host": "elsewhere", "pid": 7}')
        return learned(*given)

    monkeypatch.setattr(lra_run, "learned", while_another_takes_over)
    with pytest.raises(LockLostError):
        run_lra(tiny_run(), folder, Reporter())
    assert folder.result() is None


def test_only_the_last_validation_takes_all_examples(tmp_path, monkeypatch):
    asked, accuracy = [], lra_run.accuracy
    monkeypatch.setattr(lra_run, "VALIDATED", 3)
    monkeypatch.setattr(
        lra_run, "accuracy", lambda *given, **options: asked.append(len(given[2])) or accuracy(*given, **options)
    )
    _, result = finished(tmp_path, tiny_run())
    *before, last, test = asked
    assert set(before) == {3}
    assert (last, test) == (20, 20)
    assert len([share for _, _, share in result["curve"] if share is not None]) == len(before) + 1


def test_a_stopped_run_ends_as_an_unbroken_one(tmp_path):
    _, whole = finished(tmp_path / "whole", tiny_run())
    steps = []
    reporter = Reporter(progress=lambda step, _: steps.append(step), stop=lambda: 5 in steps)
    with pytest.raises(StoppedError, match="after step 5 of 12"):
        finished(tmp_path / "cut", tiny_run(), reporter)
    _, cut = finished(tmp_path / "cut", tiny_run())
    assert cut["curve"] == whole["curve"]
    assert cut["test_accuracy"] == whole["test_accuracy"]


def test_checkpointing_blocks_gives_the_same_curve(tmp_path):
    _, plain = finished(tmp_path / "plain", tiny_run())
    saving = replace(tiny_run(), model=replace(tiny_run().model, checkpoint_blocks=True))
    assert finished(tmp_path / "saving", saving)[1]["curve"] == plain["curve"]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), RuntimeError("can't allocate memory: 9 bytes")]
)
def test_running_out_of_memory_is_a_result(tmp_path, monkeypatch, error):
    def greedy(*arguments, **options):
        raise error

    monkeypatch.setattr(lra_run, "fit", greedy)
    folder, result = finished(tmp_path, tiny_run())
    assert (result["outcome"], result["test_accuracy"], result["steps"]) == ("out of memory", None, 0)
    assert result["reason"] == str(error).splitlines()[0]
    assert folder.result() == result
    assert "out of memory" in told_lra([result])
    assert describe_lra(result).startswith("out of memory: ")


def test_data_that_do_not_fit_into_memory_say_nothing_of_the_model(tmp_path, monkeypatch):
    def greedy(*arguments):
        raise MemoryError("no room for the data")

    monkeypatch.setattr(lra_run, "load_data", greedy)
    with pytest.raises(MemoryError, match="no room for the data"):
        finished(tmp_path, tiny_run())
    assert RunFolder(tmp_path / tiny_run().name).result() is None


def test_other_errors_stay_errors(tmp_path, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(lra_run, "fit", broken)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        finished(tmp_path, tiny_run())
    assert not ran_out_of_memory(RuntimeError("shapes do not fit"))


@pytest.mark.parametrize("mixer", MIXERS)
def test_padding_in_the_tokens_changes_no_answer_of_any_mixer(mixer):
    model = LraModel(mixer=mixer, d_model=16, n_layers=2).build(SHORT["text"], 0).double()
    tokens = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 0, 0, 0], [7, 0, 0, 0, 0]])
    with torch.no_grad():
        together = model(tokens)
        alone = torch.cat([model(tokens[:1]), model(tokens[1:2, :2]), model(tokens[2:, :1])])
    assert torch.allclose(together, alone, rtol=0, atol=1e-10)


def test_a_black_pixel_is_no_padding():
    model = LraModel(mixer="naju", d_model=8, n_layers=1).build(SHORT["image"], 0)
    tokens = torch.tensor([[9, 2, 0, 0]])
    assert not torch.allclose(model(tokens), model(tokens[:, :2]))


def test_a_model_reads_in_both_directions_and_averages():
    model = LraModel(mixer="naju", d_model=8, n_layers=1).build(SHORT["image"], 0)
    tokens = torch.tensor([[3, 1, 4, 1, 5], [3, 1, 4, 1, 9]])
    features, _ = model.classifier.backbone(tokens)
    assert not torch.allclose(features[0, 0], features[1, 0])
    assert torch.allclose(model(tokens), model.classifier.head(features.mean(1)))


def test_an_empty_text_has_an_answer_like_any_other():
    model = LraModel(mixer="naju", d_model=8, n_layers=1).build(SHORT["text"], 0)
    assert isinstance(model, PaddingAware)
    assert model(torch.zeros(2, 5, dtype=torch.int64)).isfinite().all()


def test_cells_have_the_recipe_of_the_paper():
    cells = Lra(mixers=("naju", "mamba"), grid=CPU).cells()
    assert [cell.training.seed for cell in cells] == [1] * 10 + [2] * 10 + [3] * 10
    assert {cell.task: cell.training.steps for cell in cells} == {
        "listops": 50 * 3000,
        "text": 50 * 703,
        "retrieval": 30 * 4596,
        "image": 50 * 1406,
        "pathfinder": 50 * 5000,
    }
    for cell in cells:
        training, model = cell.training, cell.model
        assert (training.lr, training.warmup_ratio, training.batch_size) == (3e-4, 0.1, 32)
        assert (model.d_model, model.n_layers, model.mixer_options["d_state"]) == (128, 6, 64)
        assert cell.variant == "default"
        assert not training.bf16  # on a GPU only


def test_a_budget_shortens_the_schedule_of_all_alike_and_marks_the_variant():
    cells = Lra(task=("image",), mixers=("naju", "gla"), budget=0.01, checkpoint=True, grid=CPU).cells()
    assert {cell.training.steps for cell in cells} == {703}
    assert {cell.variant for cell in cells} == {"budget0.01-checkpointed"}
    assert len({cell.name for cell in Lra(task=("image",), seeds=("1-3",), quick=False, grid=CPU).cells()}) == 9


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"budget": 0}, "budget must lie in"),
        ({"budget": 1.5}, "budget must lie in"),
        ({"task": ("cifar",)}, "task must be different ones of listops, text"),
        ({"mixers": ("naju", "naju")}, "mixers must be different ones"),
        ({"task": ("text",), "sequences": 30_000}, "sequences must be at most 22,500 for text here, but is 30,000"),
        ({"sequences": 0}, "sequences must be a positive integer, but is 0"),
        ({"task": ("text",), "quick": True}, "task must be different ones of listops, pathfinder"),
    ],
)
def test_bad_options_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Lra(**options, grid=CPU).cells()


@pytest.mark.parametrize("width", [1, 2])
def test_fewer_sequences_are_of_all_classes_where_a_file_has_one_after_the_other(width):
    texts = [bytes([number]) * (1 + number % 3) for number in range(100) for _ in range(width)]
    examples = byte_examples(texts, [0] * 50 + [1] * 50, 24)
    fewer = limited(examples, 20)
    assert fewer.labels.tolist() == [0] * 10 + [1] * 10
    assert [int(fewer.sequence(row * width)[0]) for row in range(20)] == list(range(0, 100, 5))
    assert limited(examples, 100) is examples
    with pytest.raises(ValueError, match="sequences must be at most the 100"):
        limited(examples, 101)


def test_no_mixers_are_those_that_are_compared():
    names = [cell.name for cell in Lra(mixers=(), grid=CPU).cells()]
    assert names == [cell.name for cell in Lra(grid=CPU).cells()]
    assert {name.split("-")[0] for name in names} == {"naju", "mamba2", "mamba"}


def test_absent_data_are_found_out_before_anything_is_generated(monkeypatch):
    loaded = []
    monkeypatch.setattr(lra, "load_data", lambda task, *where: loaded.append(task.name))
    Lra(grid=CPU).prepare()
    assert loaded == ["text", "retrieval", "image", "listops", "pathfinder"]


def told(mixer, task, share, *, seed=1, variant="default"):
    outcome = "out of memory" if share is None else "finished"
    return {"mixer": mixer, "variant": variant, "task": task, "seed": seed, "test_accuracy": share, "outcome": outcome}


def test_the_table_has_ours_beside_the_papers_and_the_published_rows():
    shares = dict(zip(LRA, (0.5, 0.8, 0.9, 0.6, 0.7), strict=True))
    results = [told("naju", task, share) for task, share in shares.items()]
    results += [told("naju", "listops", 0.54, seed=2), told("mlstm", "text", None), told("coupled", "image", 0.4)]
    results += [told("naju", "image", None, seed=2)]
    rows = {row.label: row for row in lra_rows(results)}
    assert list(rows) == [
        "naju",
        "coupled",
        "mlstm",
        "mamba (paper)",
        "mamba2 (paper)",
        "transformer (published)",
        "s4 (published)",
    ]
    naju = rows["naju"]
    assert naju.cells["listops"].comparison.values == (0.5, 0.54)
    assert naju.cells["listops"].comparison.paper.mean == 0.554
    assert naju.cells["listops"].comparison.paper_seeds == 3
    assert str(naju.cells["image"]).startswith("0.600")  # by the seed for which memory sufficed
    assert naju.average == pytest.approx((0.52 + 0.8 + 0.9 + 0.6 + 0.7) / 5)
    assert naju.paper_average == 0.725
    assert rows["coupled"].average is None
    assert str(rows["coupled"].cells["image"]) == "0.400 (0.400)"
    assert rows["mlstm"].cells["image"].comparison.paper.mean == 0.461
    assert str(rows["mlstm"].cells["text"]) == "out of memory | out of memory"
    assert str(rows["mlstm"].cells["listops"]) == "- | out of memory"
    assert str(rows["mlstm"].cells["pathfinder"]) == "- | 0.738"
    assert rows["s4 (published)"].paper_average == 0.84
    text = told_lra(results)
    assert "0.520±0.028 (0.500) | 0.554±0.012" in text
    assert "0.704 | 0.725" in text


def test_the_quick_grid_stands_beside_nothing_of_the_papers():
    (run, *_) = Lra(quick=True, grid=CPU).cells()
    assert run.training.sequences == run.sizes.train < LRA["listops"].sizes.train
    assert run.to_json()["sizes"] == list(run.sizes)
    assert run.model.n_layers < LraModel(mixer="naju").n_layers
    quick = told("naju", "listops", 0.2, variant=run.variant) | {"config": run.to_json()}
    rows = {row.label: row for row in lra_rows([quick])}
    assert rows["naju (quick)"].cells["listops"].comparison.paper is None
    assert rows["naju (quick)"].paper_average is None
    assert rows["naju (paper)"].cells["listops"].comparison.paper.mean == 0.554


def test_the_table_says_what_a_reduced_budget_was():
    cells = Lra(task=("listops", "image"), mixers=("naju", "mamba"), budget=0.1, seeds=("1",), grid=CPU).cells()
    results = [told(run.model.mixer, run.task, 0.4, variant=run.variant) | {"config": run.to_json()} for run in cells]
    assert told_lra([*results, told("naju", "text", 0.8)]).splitlines()[-2:] == [
        "budget0.1, listops: 5 of 50 epochs, 96,000 of 96,000 examples, 6 layers of width 128",
        "budget0.1, image: 5 of 50 epochs, 45,000 of 45,000 examples, 6 layers of width 128",
    ]
