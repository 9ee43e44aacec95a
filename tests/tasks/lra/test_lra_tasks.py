"""The facts of the five tasks, and that readers insist on the sizes that the tasks tell."""

from __future__ import annotations

from naju.tasks.lra import LRA, GeneratedTask, Sizes, image, retrieval, text
from naju.tasks.lra.examples import byte_examples

# Sizes, the longest sequence, tokens (the padding among them where lengths differ), classes, epochs of the paper.
FACTS = {
    "listops": ((96_000, 2_000, 2_000), 2000, 16, 10, 50),
    "text": ((22_500, 2_500, 25_000), 4000, 257, 2, 50),
    "retrieval": ((147_086, 18_090, 17_437), 4000, 257, 2, 30),
    "image": ((45_000, 5_000, 10_000), 1024, 256, 10, 50),
    "pathfinder": ((160_000, 20_000, 20_000), 1024, 256, 2, 50),
}


def test_tasks_are_those_of_the_arena():
    assert {
        name: (tuple(task.sizes), task.length, task.vocab_size, task.n_classes, task.epochs)
        for name, task in LRA.items()
    } == FACTS
    assert [name for name, task in LRA.items() if task.has_pairs] == ["retrieval"]
    assert [name for name, task in LRA.items() if not task.is_padded] == ["image", "pathfinder"]


def test_readers_insist_on_the_sizes_that_tasks_tell():
    assert tuple(retrieval.PAIRS.values()) == LRA["retrieval"].sizes
    pictures = image.PICTURES["train"]
    assert (pictures - image.VALIDATION, image.VALIDATION, image.PICTURES["test"]) == LRA["image"].sizes
    half = len(text.KINDS) * text.REVIEWS
    assert (half - half // text.HELD_OUT, half // text.HELD_OUT, half) == LRA["text"].sizes
    assert 2 * pictures * image.PIXELS < image.LARGEST_ARRAY  # what is refused is no array of the real file


def test_splits_are_cut_in_order_and_a_count_needs_so_many_examples():
    task = LRA["pathfinder"]
    assert isinstance(task, GeneratedTask)
    blocks = [byte_examples([b"a", b"b", b"c"], [0, 1, 0], 1), byte_examples([b"d", b"e", b"f"], [1, 0, 1], 1)]
    whole = task.gather(blocks, 6)
    assert whole is not None
    assert {name: part.values.tobytes() for name, part in task.splits(whole, Sizes(3, 2, 1)).items()} == {
        "train": b"abc",
        "validation": b"de",
        "test": b"f",
    }
    assert task.gather(blocks, 5).values.tobytes() == b"abcde"
    assert task.gather(blocks, 7) is None
