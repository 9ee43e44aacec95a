"""Multi-query recall against a solver that reads a sequence token by token, and its distributions against the rule."""

import time
from collections import Counter

import pytest
import torch

from naju.tasks import IGNORE, build_task
from naju.tasks.mqar import TEST, TRAINING, query_slots, subset
from naju.training.questions import questions, right_answers


def batch(count=20, length=64, seed=0, **options):
    task = build_task("MQAR", **options)
    return task, task.sample(count, length, torch.Generator().manual_seed(seed))


def solved(tokens, n_pairs):
    """key -> value, read as a person would: the later of two bindings replaces the earlier."""
    memory = {}
    for place in range(0, 2 * n_pairs, 2):
        memory[tokens[place]] = tokens[place + 1]
    return memory


@pytest.mark.parametrize("random_filler", [True, False])
@pytest.mark.parametrize(
    ("length", "n_pairs", "n_keys"),
    [(64, 4, None), (65, 8, None), (256, 64, None), (64, 8, 4), (40, 10, 3), (12, 5, 1)],
)
def test_every_question_is_answered_by_the_last_binding_of_its_key(length, n_pairs, n_keys, random_filler):
    task, (tokens, targets, _) = batch(length=length, n_pairs=n_pairs, n_keys=n_keys, random_filler=random_filler)
    for row, answers in zip(tokens.tolist(), targets.tolist(), strict=True):
        memory = solved(row, n_pairs)
        asked = {place: answer for place, answer in enumerate(answers) if answer != IGNORE}
        assert len(memory) == len(asked) == task.n_questions
        assert {row[place] for place in asked} == set(memory)  # each key once
        assert all(memory[row[place]] == answer for place, answer in asked.items())
        assert all(place >= 2 * n_pairs and place % 2 == 0 for place in asked)


def test_keys_and_values_come_from_their_halves_without_repetition():
    _, (tokens, _, _) = batch(count=200, length=256, n_pairs=64)
    keys, values = tokens[:, 0:128:2], tokens[:, 1:128:2]
    assert 1 <= keys.min() <= keys.max() < 4096 <= values.min() <= values.max() < 8192
    for part in (keys, values):
        assert all(len(set(row)) == 64 for row in part.tolist())


def test_rewriting_binds_keys_again_to_other_values_and_asks_for_each_once():
    task, (tokens, _, _) = batch(count=300, length=64, n_pairs=16, n_keys=8)
    assert task.n_questions == 8
    places, bound_early = Counter(), set()
    for row in tokens.tolist():
        bound = Counter(row[0:32:2])
        bound_early.add(len(set(row[0:16:2])))
        assert len(bound) == 8
        assert len(set(row[1:32:2])) == 16  # a stale value is never right
        places.update(place for place in range(16) if row[2 * place] in row[2 * place + 2 : 32 : 2])
    assert set(places) == set(range(15))  # any pair but the last may be overwritten later
    assert min(bound_early) < 8  # in any order: not every key once before the first is bound again


def test_filler_is_any_token_or_zero():
    _, (tokens, targets, _) = batch(count=400, length=256, n_pairs=4)
    filler = tokens[:, 8:][targets[:, 8:] == IGNORE]
    assert filler.min() < 40
    assert filler.max() > 8150
    assert abs(filler.double().mean() - 4095.5) < 40  # the deviation of this mean is 7.5
    _, (tokens, targets, _) = batch(length=256, n_pairs=2, n_symbols=8)
    assert tokens[:, 4:][targets[:, 4:] == IGNORE].unique().tolist() == list(range(8))
    _, (tokens, targets, _) = batch(length=256, n_pairs=4, random_filler=False)
    assert not tokens[:, 8:][targets[:, 8:] == IGNORE].any()


def test_slots_are_drawn_one_after_the_other_with_the_given_weights():
    rows, slots = 40_000, 6
    drawn = query_slots(rows, slots, slots, torch.Generator().manual_seed(1))
    assert torch.equal(drawn.sort(1).values, torch.arange(slots).expand(rows, -1))
    weight = torch.arange(1, slots + 1, dtype=torch.float64).pow(0.01 - 1)
    first = drawn[:, 0].bincount(minlength=slots) / rows
    assert (first - weight / weight.sum()).abs().max() < 0.01
    after_slot_0 = drawn[drawn[:, 0] == 0, 1].bincount(minlength=slots).double()
    rest = weight.clone()
    rest[0] = 0
    assert (after_slot_0 / after_slot_0.sum() - rest / rest.sum()).abs().max() < 0.015


def test_subsets_are_uniform_in_members_and_order():
    drawn = subset(60_000, 4, 2, torch.Generator().manual_seed(2))
    shares = [count / 60_000 for count in Counter(map(tuple, drawn.tolist())).values()]
    assert len(shares) == 12  # all ordered pairs of different numbers
    assert max(abs(share - 1 / 12) for share in shares) < 0.006


def test_the_canonical_segments():
    assert sum(-(-segment.examples // 256) for segment in TRAINING) == 707
    assert TRAINING[0] == (64, 4, 100_000)
    assert TRAINING[1:] == ((128, 8, 20_000), (256, 16, 20_000), (256, 32, 20_000), (256, 64, 20_000))
    tested = [(64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256)]
    assert list(TEST) == [(*segment, 1000) for segment in tested]
    for length, n_pairs, _ in (*TRAINING, *TEST):
        task, drawn = batch(count=2, length=length, n_pairs=n_pairs)
        assert task.groups[int(drawn.group[0])] == f"{n_pairs} pairs"


def test_the_whole_training_set_takes_seconds():
    generator, began = torch.Generator().manual_seed(0), time.perf_counter()
    for length, n_pairs, examples in TRAINING:
        task = build_task("MQAR", n_pairs=n_pairs)
        for start in range(0, examples, 4096):
            task.sample(min(4096, examples - start), length, generator)
    assert time.perf_counter() - began < 20  # about one on an idle core


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_pairs": 0}, "n_pairs must be at least 1"),
        ({"n_pairs": 4096}, "n_pairs must be at most 4095 with 8192 n_symbols"),
        ({"n_pairs": 4, "n_keys": 5}, "n_keys must lie between 1 and n_pairs = 4, but is 5"),
        ({"n_pairs": 4, "n_keys": 0}, "n_keys must lie between 1 and n_pairs = 4, but is 0"),
        ({"n_symbols": 3}, "n_symbols must be at least 4"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build_task("MQAR", **options)


def test_questions_are_the_places_in_order_with_their_answers():
    task, drawn = batch(count=3, length=32, n_pairs=4)
    (tokens, places), targets = questions(task, drawn)
    assert torch.equal(tokens, drawn.tokens)
    for row in range(3):
        expected = [place for place in range(32) if drawn.targets[row, place] != IGNORE]
        assert places[row].tolist() == expected
        assert targets[row].tolist() == drawn.targets[row, expected].tolist()


def test_right_answers_are_counted_sequence_by_sequence():
    logits = torch.eye(3)[torch.tensor([[0, 1, 2, 2], [1, 1, 1, 1]])]
    assert right_answers(logits, torch.tensor([[0, 1, 2, 0], [0, 0, 0, 1]])).tolist() == [0.75, 0.25]
    assert right_answers(torch.eye(3), torch.tensor([0, 1, 0])).tolist() == [1.0, 1.0, 0.0]
