"""What every task promises, whatever it asks."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from naju.tasks import IGNORE, TASKS, build_task
from naju.training import seeded_generator


@pytest.mark.parametrize("name", TASKS)
def test_a_batch_is_a_function_of_the_generator(name):
    task = build_task(name)
    length = task.minimum_length() + 40
    before = torch.random.get_rng_state()
    first, second = (task.sample(8, length, torch.Generator().manual_seed(3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(before, torch.random.get_rng_state())
    other = task.sample(8, length, torch.Generator().manual_seed(4))
    assert not torch.equal(first.tokens, other.tokens)


@pytest.mark.parametrize("name", TASKS)
def test_shapes_and_ranges(name):
    task = build_task(name)
    for length in (task.minimum_length(), task.minimum_length() + 7, 2048):
        tokens, targets, group = task.sample(5, length, torch.Generator().manual_seed(0))
        assert tokens.shape == (5, length)
        assert group.shape == (5,)
        assert targets.shape == ((5,) if task.n_questions is None else (5, length))
        assert tokens.dtype == targets.dtype == group.dtype == torch.int64
        assert 0 <= tokens.min() <= tokens.max() < task.vocab_size == len(task.token_names())
        asked = targets[targets != IGNORE]
        assert len(asked) == 5 * (task.n_questions or 1)
        assert 0 <= asked.min() <= asked.max() < task.n_classes
        assert 0 <= group.min() <= group.max() < len(task.groups)


@pytest.mark.parametrize("name", TASKS)
def test_too_short_a_length_says_the_minimum(name):
    task = build_task(name)
    minimum = task.minimum_length()
    with pytest.raises(ValueError, match=f"at least {minimum} .* but is {minimum - 1}"):
        task.sample(1, minimum - 1, torch.Generator())
    with pytest.raises(ValueError, match="count must be a positive integer, but is 0"):
        task.sample(0, minimum, torch.Generator())


def test_unknown_names_and_options_list_the_known_ones():
    with pytest.raises(ValueError, match="unknown task 'T9'; expected one of T1, T2, T3, T4"):
        build_task("T9")
    with pytest.raises(TypeError, match="'T2' has no option n_fact; it has n_entities, n_values, n_facts"):
        build_task("T2", n_fact=3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("T1", {"min_facts": 9, "max_facts": 8}, "1 <= min_facts <= max_facts, but are 9, 8"),
        ("T1", {"min_facts": 2}, "min_facts must be at least 3"),
        ("T1", {"n_entities": 8}, "n_entities must be at least 16"),
        ("T2", {"n_facts": 2}, "n_facts must be at least 3"),
        ("T2", {"n_entities": 8}, "n_entities must be at least 32"),
        ("T2", {"n_values": 1}, "n_values must be at least 2"),
        ("T3", {"min_updates": 0}, "1 <= min_updates <= max_updates, but are 0, 6"),
        ("T3", {"n_values": 5}, "n_values must be at least 6"),
        ("T3", {"n_entities": 1}, "n_entities must be at least 2"),
        ("T4", {"n_events": 5}, "n_events must be at least 6"),
        ("T4", {"growing_from": 100}, "growing_from must be at least 164"),
    ],
)
def test_impossible_settings_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        build_task(name, **options)


@pytest.mark.parametrize("name", TASKS)
def test_training_and_test_sets_share_no_sequence(name):
    """Their generators have seeds derived from different purposes, and each task has far more sequences than anyone
    draws; this looks at the sets themselves, and that the comparison finds a sequence that is really there twice."""
    task = build_task(name)
    rows = {}
    for purpose, count in (("training data", 10_000), ("test data of length 512", 2_000)):
        tokens = task.sample(count, 512, seeded_generator(1, purpose)).tokens
        rows[purpose] = {row.numpy().tobytes() for row in tokens.to(torch.int16)}
        assert len(rows[purpose]) == count
    assert not rows["training data"] & rows["test data of length 512"]
    again = task.sample(10_000, 512, seeded_generator(1, "training data")).tokens[-1]
    assert again.to(torch.int16).numpy().tobytes() in rows["training data"]


@pytest.mark.parametrize("name", TASKS)
def test_an_answer_is_a_word_of_the_vocabulary(name):
    task = build_task(name)
    assert {task.answer_name(target) for target in range(task.n_classes)} <= set(task.token_names())


@pytest.mark.parametrize("name", TASKS)
def test_sampling_never_waits_for_the_device(name):
    """Fake tensors have no values to read: whatever runs there needs no host synchronisation."""
    task = build_task(name)
    with FakeTensorMode():
        tokens, targets, group = task.sample(4, 512, torch.Generator())
    assert tokens.shape == (4, 512)
    assert targets.shape == ((4,) if task.n_questions is None else (4, 512))
    assert group.shape == (4,)
