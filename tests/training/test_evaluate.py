"""Accuracy against models whose accuracy is known."""

import pytest
import torch
from torch import nn

from naju.tasks import build_task
from naju.training import Reporter, StoppedError, evaluate

TASK = build_task("T2", n_entities=6, n_values=4, n_facts=6)
LENGTH = 40


class Reader(nn.Module):
    """Looks the asked entity up; facts that start in its blind half of the sequence are answered wrongly."""

    def __init__(self, blind_before=0):
        super().__init__()
        self.blind_before = blind_before

    def forward(self, tokens):
        names = TASK.token_names()
        answers = []
        for row in tokens.tolist():
            words = [names[token] for token in row]
            place = words.index(words[-2])
            value = int(words[place + 2][1:])
            answers.append(value if place >= self.blind_before else (value + 1) % 4)
        return nn.functional.one_hot(torch.tensor(answers), 4).float()


def accuracy(model, **options):
    settings = {"count": 150, "length": LENGTH, "generator": torch.Generator().manual_seed(0), "batch_size": 64}
    return evaluate(model, TASK, **{**settings, **options})


def test_a_perfect_reader_scores_one_at_any_length():
    for length in (LENGTH, 4 * LENGTH):
        result = accuracy(Reader(), length=length)
        assert result.overall == 1.0
        assert set(result.by_group) == {"early", "middle", "late"}
        assert all(share == 1.0 for share, _ in result.by_group.values())
        assert sum(count for _, count in result.by_group.values()) == result.count == 150


def test_groups_say_where_a_reader_fails():
    result = accuracy(Reader(blind_before=LENGTH // 2), count=600)
    early, middle, late = (result.by_group[name][0] for name in TASK.groups)
    assert early == 0.0
    assert 0.2 < middle < 0.8
    assert late == 1.0
    assert result.overall == pytest.approx(sum(share * count for share, count in result.by_group.values()) / 600)


def test_it_leaves_the_model_as_it_was_and_builds_no_graph():
    model = Reader()
    graphs, modes = [], []
    model.register_forward_hook(lambda *_: graphs.append(torch.is_grad_enabled()))
    model.register_forward_hook(lambda *_: modes.append(model.training))
    for mode in (True, False):
        model.train(mode)
        accuracy(model)
        assert model.training is mode
    assert not any(graphs)
    assert not any(modes)  # nothing is dropped out while it answers


@pytest.mark.parametrize(("bf16", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_products_are_rounded_where_that_is_asked_for(bf16, dtype):
    model, seen = nn.Sequential(nn.Embedding(TASK.vocab_size, 4), nn.Flatten(), nn.Linear(4 * LENGTH, 4)), []
    model.register_forward_hook(lambda _, inputs, logits: seen.append(logits.dtype))
    accuracy(model, bf16=bf16)
    assert set(seen) == {dtype}


def test_the_same_generator_gives_the_same_answer():
    assert accuracy(Reader(25)) == accuracy(Reader(25))


def test_an_empty_evaluation_is_refused():
    with pytest.raises(ValueError, match="count must be a positive integer, but is 0"):
        accuracy(Reader(), count=0)
    assert accuracy(Reader(), count=1).count == 1


def test_it_tells_how_far_it_is_and_can_be_stopped():
    shares, model = [], Reader()
    accuracy(model, examined=shares.append)
    assert shares == [0, 64 / 150, 128 / 150]
    with pytest.raises(StoppedError):
        accuracy(model, examined=Reporter(stop=lambda: True).examined)
    assert model.training
