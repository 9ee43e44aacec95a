"""Generated data: cached, resumed, the same with any number of processes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from naju.lab import lra_data
from naju.lab.lra_data import generated, load_data, load_examples, make_block, save_examples
from naju.tasks.lra import LRA, Sizes
from naju.tasks.lra.examples import byte_examples, examples_of

TWO_BLOCKS, ONE_BLOCK = Sizes(1500, 300, 200), Sizes(700, 200, 100)


def test_the_file_is_the_same_with_one_process_and_with_two(tmp_path):
    files = []
    for processes in (1, 2):
        generated(LRA["listops"], tmp_path / str(processes), TWO_BLOCKS, processes=processes)
        files.append((tmp_path / str(processes) / "listops-seed0-2000.safetensors").read_bytes())
    assert files[0] == files[1]


def test_splits_are_cut_in_order_and_the_cache_is_used(tmp_path, monkeypatch):
    splits = load_data(LRA["listops"], tmp_path, tmp_path, ONE_BLOCK)
    assert [len(part) for part in splits.values()] == list(ONE_BLOCK)
    whole = load_examples(tmp_path / "listops-seed0-1000.safetensors")
    assert np.array_equal(np.concatenate([part.values for part in splits.values()]), whole.values)

    def refuse(*arguments):
        raise AssertionError("generated again")

    monkeypatch.setattr(lra_data, "_make_blocks", refuse)
    assert np.array_equal(
        load_data(LRA["listops"], tmp_path, tmp_path, ONE_BLOCK)["test"].labels, splits["test"].labels
    )


def test_an_interrupted_generation_goes_on_and_a_damaged_block_is_made_again(tmp_path, monkeypatch):
    folder = tmp_path / "listops-seed0-3000-blocks"
    folder.mkdir()
    for number in (0, 1, 2):
        make_block("listops", 0, number, folder)
    damaged = folder / "00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    made = []
    honest = lra_data.make_block
    monkeypatch.setattr(lra_data, "make_block", lambda *arguments: made.append(arguments[2]) or honest(*arguments))
    examples = generated(LRA["listops"], tmp_path, Sizes(2000, 500, 500), processes=1)
    assert made == [1]
    assert len(examples) == 3000
    assert not folder.exists()


def test_a_generation_leaves_the_blocks_of_another_that_is_not_finished_alone(tmp_path, monkeypatch):
    made, honest = [], lra_data.make_block

    def until_interrupted(name, seed, number, folder):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(number)
        return honest(name, seed, number, folder)

    monkeypatch.setattr(lra_data, "make_block", until_interrupted)
    with pytest.raises(KeyboardInterrupt):
        generated(LRA["listops"], tmp_path, Sizes(2000, 500, 500), processes=1)
    monkeypatch.setattr(lra_data, "make_block", honest)
    generated(LRA["listops"], tmp_path, ONE_BLOCK, processes=1)
    again = []
    monkeypatch.setattr(lra_data, "make_block", lambda *given: again.append(given[2]) or honest(*given))
    generated(LRA["listops"], tmp_path, Sizes(2000, 500, 500), processes=1)
    assert (made, again) == ([0, 1], [2])


def test_repetitions_cost_another_block(tmp_path, monkeypatch):
    def blocks(seed, number):
        return examples_of([np.array([5 * number + k % 4], np.uint8) for k in range(5)], range(5))

    task = replace(LRA["listops"], block_size=5, block_of=blocks)
    monkeypatch.setattr(lra_data, "LRA", {"listops": task})
    made, honest = [], lra_data.make_block
    monkeypatch.setattr(lra_data, "make_block", lambda *given: made.append(given[2]) or honest(*given))
    examples = generated(task, tmp_path, Sizes(8, 1, 1), processes=1)
    assert examples.values.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 10, 11]
    assert made == [0, 1, 2]


def test_less_than_a_block_is_the_beginning_of_one_and_every_seed_has_its_own(tmp_path, monkeypatch):
    def blocks(seed, number):
        return examples_of([np.array([100 * seed + 5 * number + k], np.uint8) for k in range(5)], range(5))

    task = replace(LRA["pathfinder"], block_size=5, block_of=blocks)
    monkeypatch.setattr(lra_data, "LRA", {"pathfinder": task})
    for seed, want in ((0, [0, 1, 2]), (1, [100, 101, 102]), (0, [0, 1, 2])):
        assert generated(task, tmp_path, Sizes(1, 1, 1), seed=seed, processes=1).values.tolist() == want


def test_what_is_read_lies_in_one_folder_and_what_is_generated_in_the_other(tmp_path):
    data, cache = tmp_path / "data", tmp_path / "cache"
    load_data(LRA["listops"], data, cache, ONE_BLOCK)
    assert not data.exists()
    assert [path.name for path in cache.iterdir()] == ["listops-seed0-1000.safetensors"]
    text = replace(LRA["text"], read=lambda folder: {"train": folder})
    assert load_data(text, data, cache) == {"train": data}


def test_a_damaged_cache_is_reported(tmp_path):
    path = tmp_path / "some.safetensors"
    save_examples(path, byte_examples([b"one", b"two"], [0, 1], 9))
    content = path.read_bytes()
    starts, labels = (np.array(ends).tobytes() for ends in ([0, 3, 6], [0, 1]))
    damages = (b"two", b"too"), (starts, np.array([0, 2, 6]).tobytes()), (labels, np.array([0, 2]).tobytes())
    for there, damaged in damages:
        assert content.count(there) == 1
        path.write_bytes(content.replace(there, damaged))
        with pytest.raises(ValueError, match=r"some.safetensors is damaged; remove it.*checksum"):
            load_examples(path)
    for damaged in (content.replace(starts, np.array([0, 9, 6]).tobytes()), content[: len(content) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="is damaged; remove it"):
            load_examples(path)


def test_another_process_may_finish_first(tmp_path, monkeypatch):
    want = generated(LRA["listops"], tmp_path / "elsewhere", ONE_BLOCK)

    def overtaken(*arguments):
        save_examples(tmp_path / "listops-seed0-1000.safetensors", want)

    monkeypatch.setattr(lra_data, "_make_blocks", overtaken)
    assert np.array_equal(generated(LRA["listops"], tmp_path, ONE_BLOCK).values, want.values)
