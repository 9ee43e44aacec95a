"""The work that a rate is taken of, against torch's own count of products."""

from math import prod

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from naju.bench.compare import Failed
from naju.bench.decode import Decoder
from naju.bench.scan_inputs import scan_inputs
from naju.bench.shells import LanguageShell, ResidualStack
from naju.bench.work import factors_of, rates, work_of, work_of_scan, work_of_step

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


def test_a_scans_bytes_are_its_sequences_once_a_pass_and_their_gradients() -> None:
    sizes = {"batch": 2, "length": 24, "d_inner": 8, "d_state": 4}
    inputs = scan_inputs(*sizes.values(), dtype=torch.bfloat16)
    sequences, y = sum(tensor.nbytes for tensor in inputs.values() if tensor.dim() == 3), inputs["h"].nbytes
    forward, both = (work_of_scan(**sizes, itemsize=2, backward=backward) for backward in (False, True))
    assert forward["least_bytes"] == sequences + y
    assert both["least_bytes"] == forward["least_bytes"] + sequences + y + sequences


def test_a_scans_products_and_sums_are_those_of_the_loop() -> None:
    sizes = {"batch": 2, "length": 24, "d_inner": 8, "d_state": 4}
    states = prod(sizes.values())
    counted = OperationsOfTheLoop()
    f, w, B, C, x = (torch.ones(4) for _ in range(5))
    with counted:
        x = f * x + w * B
        (x * C).sum()
    assert work_of_scan(**sizes, itemsize=2)["flop"] == states * counted.numbers / 4
    g, f, w, dy = (torch.ones(4) for _ in range(4))
    with counted:
        g = f * g + dy * C
        for gradient in (dy * x, w * g, g * B, g * x):
            gradient.sum()
    assert work_of_scan(**sizes, itemsize=2, backward=True)["flop"] == states * counted.numbers / 4


class OperationsOfTheLoop(TorchDispatchMode):
    """Counts the numbers that go into products and sums."""

    numbers = 0

    def __torch_dispatch__(self, function, types, given=(), options=None):
        self.numbers += given[0].numel()
        return function(*given, **(options or {}))


def test_a_step_reads_all_weights_and_reads_and_writes_what_it_keeps_of_each_sequence() -> None:
    stack = ResidualStack("naju", n_layers=2, d_model=16, d_state=8).bfloat16()
    states = Decoder(stack, context=3).states_of_one()
    assert [tensor.shape[1:] for tensor in states[0]] == [(32, 8), (3, 32), (3, 32)], "the memory first"
    sizes = {"d_model": 16, "n_layers": 2, "itemsize": 2}
    work = work_of_step(stack, states, batch=3, **sizes)
    kept = 4 * 32 * 8 + 2 * (3 + 3) * 32  # the memory is float32
    weights = sum(parameter.nbytes for parameter in stack.parameters())
    between = 2 * 2 * 2 * 3 * 16  # what goes into and comes out of both layers
    assert work["least_bytes"] == weights + between + 2 * 3 * 2 * kept
    assert work["flop"] == 3 * (2 * factors_of(stack) + 2 * 5 * 32 * 8)


def test_what_failed_has_no_rate() -> None:
    assert work_of(Failed("out of memory"), **SIZES) == {}
    assert rates({"reason": "out of memory"}) == {}
