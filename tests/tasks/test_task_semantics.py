"""What the tasks ask, checked by a solver that reads the token names like a person would."""

from collections import Counter

import pytest
import torch

from naju.tasks import build_task
from naju.tasks.events import below, scattered_starts

SETTINGS = [
    ("T1", {}, 128),
    ("T1", {"n_entities": 5, "n_values": 3, "min_facts": 3, "max_facts": 5}, 29),
    ("T1", {"anywhere": True}, 128),
    ("T1", {"n_entities": 5, "n_values": 3, "min_facts": 3, "max_facts": 5, "anywhere": True}, 29),
    ("T2", {"n_facts": 8}, 64),
    ("T2", {"n_entities": 6, "n_values": 4, "n_facts": 6}, 34),
    ("T3", {}, 131),
    ("T3", {"n_entities": 2, "n_values": 4, "min_updates": 1, "max_updates": 4}, 24),
    ("T4", {"n_entities": 8, "n_values": 8, "n_events": 8}, 70),
    ("T4", {"n_entities": 6, "n_values": 8, "n_events": 6, "growing_from": 40}, 100),
]
COUNT = 2000


def draw(name, options, length, count=COUNT, seed=0):
    task = build_task(name, **options)
    return task, task.sample(count, length, torch.Generator().manual_seed(seed))


def events_of(words):
    """(start, five words) of every event before the query; anything that is neither event nor padding is an error."""
    found, place = [], 0
    while place < len(words) - 4:
        if words[place] == "PAD":
            place += 1
            continue
        assert words[place + 4] == "SEP"
        found.append((place, words[place : place + 5]))
        place += 5
    assert place == len(words) - 4
    return found


def solve_facts(words):
    """The value of the fact that the query names, and where that fact stands among all facts."""
    facts = [event for _, event in events_of(words)]
    assert all((key, verb) == ("KEY", "IS") for key, _, verb, _, _ in facts)
    question, key, entity, end = words[-4:]
    assert (question, key, end) == ("QUES", "KEY", "EOS")
    entities = [fact[1] for fact in facts]
    assert len(set(entities)) == len(entities)
    asked = entities.index(entity)
    return facts[asked][3], min(third for third in range(3) if asked < (third + 1) * len(facts) // 3)


def solve_updates(words):
    """The last value given to the entity that the query names, and the third of the sequence where that happened."""
    question, entity, now, end = words[-4:]
    assert (question, now, end) == ("QUES", "NOW", "EOS")
    updates = [(start, event) for start, event in events_of(words) if event[1] == entity]
    values = [event[3] for _, event in updates]
    assert len(set(values)) == len(values)
    start, event = updates[-1]
    return event[3], 3 * start // (len(words) - 4)


@pytest.mark.parametrize(("name", "options", "length"), SETTINGS)
def test_targets_and_groups_are_what_a_reader_of_the_sequence_finds(name, options, length):
    task, batch = draw(name, options, length)
    solve = solve_facts if name in ("T1", "T2") else solve_updates
    assert batch.tokens.shape == (COUNT, length)
    for tokens, target, group in zip(batch.tokens, batch.targets.tolist(), batch.group.tolist(), strict=True):
        assert solve(task.describe(tokens)) == (f"v{target}", group)


@pytest.mark.parametrize("name", ["T1", "T2", "T3", "T4"])
def test_the_default_settings_at_the_papers_length(name):
    task, batch = draw(name, {}, 512, count=200)
    solve = solve_facts if name in ("T1", "T2") else solve_updates
    for tokens, target, group in zip(batch.tokens, batch.targets.tolist(), batch.group.tolist(), strict=True):
        assert solve(task.describe(tokens)) == (f"v{target}", group)


def test_t1_stands_right_before_the_query_and_varies_its_number_of_facts():
    task, batch = draw("T1", {}, 200)
    counts = set()
    for tokens in batch.tokens:
        facts = events_of(task.describe(tokens))
        assert [start for start, _ in facts] == [196 - 5 * back for back in range(len(facts), 0, -1)]
        counts.add(len(facts))
    assert counts == set(range(8, 17))


def test_t1_may_stand_anywhere_as_one_block():
    """Every place is equally likely: the first and the last are both reached, and the average is the middle."""
    task, batch = draw("T1", {"min_facts": 3, "max_facts": 5, "anywhere": True}, 60, count=6000)
    places, share = set(), 0.0
    for tokens in batch.tokens:
        starts = [start for start, _ in events_of(task.describe(tokens))]
        assert starts == [starts[0] + 5 * index for index in range(len(starts))]
        free = 56 - 5 * len(starts)
        places.add((len(starts), starts[0]))
        share += starts[0] / free / 6000
    assert places == {(facts, start) for facts in (3, 4, 5) for start in range(56 - 5 * facts + 1)}
    assert abs(share - 0.5) < 5 * 0.3 / 6000**0.5


def test_t2_keeps_its_number_of_facts_at_every_length():
    for length in (64, 300):
        task, batch = draw("T2", {"n_facts": 8}, length, count=100)
        assert {len(events_of(task.describe(tokens))) for tokens in batch.tokens} == {8}


def test_t3_fills_the_sequence_and_marks_the_first_and_the_last_update():
    task, batch = draw("T3", {}, 131)
    distracting = Counter()
    for tokens in batch.tokens:
        words = task.describe(tokens)
        found = events_of(words)
        events = [event for _, event in found]
        assert [start for start, _ in found] == list(range(2, 127, 5))  # up to the query; what is left over comes first
        marks = [event[0] for event in events if event[1] == words[-3]]
        assert marks == ["INIT", *["LATER"] * (len(marks) - 2), "FINAL"]
        assert 3 <= len(marks) <= 6
        distracting.update(event[0] for event in events if event[1] != words[-3])
    assert set(distracting) == {"INIT", "LATER"}
    assert abs(distracting["INIT"] / distracting.total() - 0.5) < 0.02  # else INIT would betray the target


@pytest.mark.parametrize(("growing_from", "expected"), [(None, 8), (64, 25)])
def test_t4_says_later_everywhere_and_follows_its_length_rule(growing_from, expected):
    task, batch = draw("T4", {"n_entities": 8, "n_events": 8, "growing_from": growing_from}, 200, count=500)
    for tokens in batch.tokens:
        words = task.describe(tokens)
        events = [event for _, event in events_of(words)]
        assert len(events) == expected
        assert {event[0] for event in events} == {"LATER"}
        assert 3 <= sum(event[1] == words[-3] for event in events) <= 6


def test_placements_are_uniform():
    """Two events of five tokens in twelve free places: all six placements, equally often."""
    starts = scattered_starts(6000, 2, 12, torch.Generator().manual_seed(0))
    placements, counts = starts.unique(dim=0, return_counts=True)
    assert placements.tolist() == [[0, 5], [0, 6], [0, 7], [1, 6], [1, 7], [2, 7]]
    assert (counts - 1000).abs().max() < 150  # five standard deviations


def test_numbers_below_a_bound_are_uniform_each_with_its_own():
    drawn = below(torch.tensor([1, 2, 5]).expand(6000, -1), torch.Generator().manual_seed(0))
    for bound, column in zip((1, 2, 5), drawn.unbind(1), strict=True):
        counts = column.bincount()
        assert len(counts) == bound
        assert (counts - 6000 / bound).abs().max() < 5 * (6000 / bound) ** 0.5


@pytest.mark.parametrize("name", ["T1", "T2"])
def test_every_third_is_asked_equally_often(name):
    _, batch = draw(name, {}, 256, count=6000)
    assert (batch.group.bincount() - 2000).abs().max() < 190


@pytest.mark.parametrize(("name", "options", "length"), SETTINGS)
def test_answers_are_balanced(name, options, length):
    task, batch = draw(name, options, length, count=6000)
    share = 1 / task.n_classes
    spread = 5 * (6000 * share * (1 - share)) ** 0.5
    assert (batch.targets.bincount(minlength=task.n_classes) - 6000 * share).abs().max() < spread


@pytest.mark.parametrize("name", ["T1", "T2", "T3", "T4"])
def test_the_question_alone_is_worth_a_guess(name):
    """Bindings are fresh in every sequence: whoever learns the usual answer to each question stays at chance."""
    task, known = draw(name, {}, 512, count=20_000, seed=1)
    _, asked = draw(name, {}, 512, count=20_000, seed=2)
    seen = torch.zeros(task.vocab_size, task.n_classes)
    entity = -3 if name in ("T3", "T4") else -2
    seen.index_put_((known.tokens[:, entity], known.targets), torch.ones(20_000), accumulate=True)
    right = (seen.argmax(1)[asked.tokens[:, entity]] == asked.targets).double().mean().item()
    chance = 1 / task.n_classes
    assert abs(right - chance) < 5 * (chance * (1 - chance) / 20_000) ** 0.5


@pytest.mark.parametrize("growing_from", [None, 64])
def test_the_last_value_of_all_answers_t4_no_more_often_than_the_target_is_the_last(growing_from):
    options = {"n_entities": 40, "n_values": 32, "n_events": 8, "growing_from": growing_from}
    task, batch = draw("T4", options, 128)
    hits, ends_with_target = 0, 0
    for tokens, target in zip(batch.tokens, batch.targets.tolist(), strict=True):
        words = task.describe(tokens)
        _, (_, entity, _, value, _) = events_of(words)[-1]
        hits += value == f"v{target}"
        ends_with_target += entity == words[-3]
    events = 8 if growing_from is None else 16
    assert abs(ends_with_target / COUNT - 4.5 / events) < 5 * (0.25 / COUNT) ** 0.5  # 3 to 6 updates, evenly
    assert abs(hits - ends_with_target - (COUNT - ends_with_target) / 32) < 5 * (COUNT / 32) ** 0.5
