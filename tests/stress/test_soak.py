"""The short form of `naju bench soak`, and that it would notice what it is there to notice."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from naju.bench import soak
from naju.bench.soak import WINDOWS, Pool, Shuffled, SoakBench, Soaked, broken_promises, build, piece_sizes

SHORT = SoakBench(tokens=160_000, streams=100, turns=3, d_model=32)
GOOD = Soaked(10, 1.0, 10.0, 1000, 0.0, 0.0, 2.0), Shuffled(4, 8, 3, 3, 0, 0.0)


def test_a_long_stream_and_many_short_ones_keep_all_promises(tmp_path):
    """In a process of its own, whose memory is nobody else's. Windows of 4,000 tokens are too short to tell a tenth of
    their time from what else the machine does: here only a half counts."""
    sizes = ["--tokens", "160000", "--streams", "100", "--turns", "3", "--d-model", "32", "--slowdown", "0.5"]
    command = [sys.executable, "-m", "naju.cli", "bench", "soak", *sizes, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    soaked, shuffled = written(tmp_path)
    assert soaked["tokens"] == 160_000
    assert 0 < soaked["largest_state"] < math.inf
    assert soaked["memory_growth"] <= SHORT.memory_growth
    assert shuffled["turns"] == 300
    assert shuffled["mixed_up"] == 0
    assert 100 < shuffled["restores"] == shuffled["saves"] < 200


def written(folder):
    return [json.loads(line) for line in (folder / "soak.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("place", "changes", "complaint"),
    [
        (0, {"memory_growth": 0.021}, "memory grew by 2.1%"),
        (0, {"slowdown": 0.11}, "a token became slower by 11.0%"),
        (0, {"largest_state": math.nan}, "the largest value of the state is nan"),
        (0, {"largest_state": math.inf}, "the largest value of the state is inf"),
        (1, {"mixed_up": 2}, "2 of 4 streams have a state that is not theirs"),
    ],
)
def test_a_promise_that_is_not_kept_is_a_sentence(place, changes, complaint):
    assert broken_promises(SHORT, *GOOD) == []
    results = [replace(result, **changes) if place == at else result for at, result in enumerate(GOOD)]
    assert broken_promises(SHORT, *results) == [complaint]


def test_two_streams_that_change_places_once_are_noticed(monkeypatch):
    put, swapped = Pool.put, []

    def swap(pool, streams, state):
        if not swapped:
            swapped.extend(streams[:2])
            streams = [streams[1], streams[0], *streams[2:]]
        put(pool, streams, state)

    monkeypatch.setattr(Pool, "put", swap)
    assert soak.shuffle_streams(SHORT, build(SHORT)).mixed_up == 2


def test_a_stream_that_is_not_fetched_from_its_file_is_noticed(monkeypatch):
    monkeypatch.setattr(Pool, "get", lambda pool, streams: pool.state[torch.tensor(streams)])
    found = soak.shuffle_streams(SHORT, build(SHORT))
    assert found.mixed_up > 50
    assert math.isnan(found.worst_error)


def test_a_state_that_became_nan_on_the_way_is_noticed():
    model = build(SHORT)
    nn.init.constant_(model.backbone.embedding.weight[3:4], math.nan)
    assert math.isnan(soak.soak(replace(SHORT, tokens=40 * WINDOWS), model).largest_state)


def test_memory_that_grows_is_noticed(monkeypatch):
    kept, read = [], soak.read

    def leaking(*args):
        kept.append(torch.ones(500_000))
        return read(*args)

    monkeypatch.setattr(soak, "read", leaking)
    assert soak.soak(replace(SHORT, tokens=300 * WINDOWS), build(SHORT)).memory_growth > SHORT.memory_growth


def test_pieces_add_up_and_come_in_all_sizes():
    sizes = piece_sizes(100_000, 0)
    assert sum(sizes) == 100_000
    assert min(sizes) == 1
    assert 1000 < max(sizes) <= soak.LONGEST_PIECE


def test_the_command_writes_both_rows_and_fails_with_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(soak, "shuffle_streams", lambda bench, model: replace(GOOD[1], mixed_up=1))
    with pytest.raises(SystemExit) as caught:
        soak.run_soak_bench(replace(SHORT, tokens=10 * WINDOWS, memory_growth=1.0, slowdown=100.0, out=tmp_path))
    assert caught.value.code == 1
    assert capsys.readouterr().err == "1 of 4 streams have a state that is not theirs\n"
    assert [row["bench"] for row in written(tmp_path)] == ["soak", "soaked streams"]


@pytest.mark.parametrize(("name", "value"), [("tokens", 39), ("streams", 0), ("turns", 0), ("turn_tokens", 0)])
def test_sizes_that_cannot_be_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        SoakBench(**{name: value})
