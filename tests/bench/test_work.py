"""The work that a rate is taken of, against torch's own count of products."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from naju.bench.compare import Failed
from naju.bench.shells import LanguageShell, ResidualStack
from naju.bench.work import rates, work_of

SIZES = {"tokens": 2 * 24, "length": 24, "d_model": 16, "n_layers": 2, "itemsize": 4}


def counted(module, given):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(given)
    return counter.get_total_flops()


def test_products_with_weights_are_all_counted_once() -> None:
    stack = ResidualStack("naju", n_layers=2, d_model=16, d_state=8)
    shell = LanguageShell(stack, d_model=16, vocab_size=50)
    work = work_of(shell, **SIZES)["flop"]
    head = 2 * SIZES["tokens"] * 16 * 50
    assert work - work_of(stack, **SIZES)["flop"] == head
    assert counted(torch.nn.Linear(16, 50, bias=False), torch.zeros(2, 24, 16)) == head


def test_attention_counts_the_past_only() -> None:
    stack = ResidualStack("transformer-math", n_layers=2, d_model=16, d_state=8)
    past = 2 * SIZES["n_layers"] * SIZES["tokens"] * SIZES["length"] * SIZES["d_model"]
    # torch counts the future too, which is masked afterwards
    assert work_of(stack, **SIZES)["flop"] + past == counted(stack, torch.zeros(2, 24, 16))


def test_a_training_step_is_three_passes_and_a_rate_is_per_second() -> None:
    stack = ResidualStack("naju", n_layers=2, d_model=16, d_state=8)
    one, three = work_of(stack, **SIZES), work_of(stack, **SIZES, passes=3)
    assert {name: 3 * value for name, value in one.items()} == three
    assert rates({**one, "median_s": 0.5}) == {"flop_per_s": 2 * one["flop"], "bytes_per_s": 2 * one["least_bytes"]}


def test_what_failed_has_no_rate() -> None:
    assert work_of(Failed("out of memory"), **SIZES) == {}
    assert rates({"reason": "out of memory"}) == {}
