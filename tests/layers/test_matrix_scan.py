"""The matrix scan against a float64 loop: values, states and every gradient, packed, forgetting nothing or all."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

import pytest
import torch

from naju.layers.head_scan import LEAST, head_scan, head_scan_refuses
from naju.layers.layout import layout_of
from naju.layers.matrix_scan import CHANNEL_CHUNK, HEAD_CHUNK, held, matrix_scan, matrix_step, running_max
from numerics import TOLERANCE, relative_rms

HEADS, KEY, VALUE = 3, 4, 5
# Lengths around the chunks: none full, exactly full, one over, several.
LENGTHS = (1, 7, CHANNEL_CHUNK, CHANNEL_CHUNK + 1, HEAD_CHUNK, HEAD_CHUNK + 1, 2 * HEAD_CHUNK + 22)
KINDS = {"per head": (1, False), "per channel": (KEY, False), "per channel with bonus": (KEY, True)}
# Log-decays from a standard normal draw.
REGIMES = {
    "ordinary": lambda normal: torch.nn.functional.logsigmoid(normal + 2),
    "holding": lambda normal: -torch.exp(normal - 7),
    "holding, with overwrites": lambda normal: torch.where(normal > 1.6, -30.0, -torch.exp(normal - 7)),
    "forgetting": lambda normal: -torch.exp(normal + 3),
    "all or nothing": lambda normal: torch.where(normal > 1.3, -math.inf, 0.0).to(normal.dtype),
}
each_kind = pytest.mark.parametrize(("channels", "with_bonus"), KINDS.values(), ids=KINDS)


def draw(length, channels, with_bonus, *, regime="ordinary", batch=2, rows=None, shared=False, seed=0):
    """Arguments of a scan in float64, by name."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    arguments = {
        "q": normal(batch, length, 1 if shared else HEADS, KEY),
        "k": normal(batch, length, 1 if shared else HEADS, KEY),
        "v": normal(batch, length, HEADS, VALUE),
        "log_decay": REGIMES[regime](normal(batch, length, HEADS, channels)),
        "state": normal(batch if rows is None else rows, HEADS, KEY, VALUE),
    }
    return arguments | ({"bonus": normal(HEADS, KEY)} if with_bonus else {})


def loop(q, k, v, log_decay, state, bonus=None, cu_seqlens=None):
    """The recurrence as it is written, token by token."""
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    rows = [state] if cu_seqlens is None else state.split(1)
    outputs, states = [], []
    for S, (left, right) in zip(rows, pairwise(bounds), strict=True):
        for t in range(left, right):
            write = torch.einsum("bhk,bhv->bhkv", k[:, t].expand(-1, HEADS, -1), v[:, t])
            after = log_decay[:, t].exp().unsqueeze(-1) * S + write
            read = after if bonus is None else S + bonus.unsqueeze(-1) * write
            outputs.append(torch.einsum("bhkv,bhk->bhv", read, q[:, t].expand(-1, HEADS, -1)))
            S = after
        states.append(S)
    return torch.stack(outputs, dim=1), torch.cat(states)


def outcome(scan, arguments, **options):
    """Outputs, final state and the gradient of every argument, for fixed cotangents on both results."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in arguments.items()}
    results = scan(**leaves, **options)
    generator = torch.Generator().manual_seed(9)
    weights = [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.dtype) for r in results]
    gradients = torch.autograd.grad(results, list(leaves.values()), weights)
    tensors = [tensor.detach() for tensor in (*results, *gradients)]
    return dict(zip(["o", "state", *(f"d{name}" for name in leaves)], tensors, strict=True))


def assert_equals_the_loop(arguments, dtype, **options):
    rounded = {name: tensor.to(dtype) for name, tensor in arguments.items()}
    got = outcome(matrix_scan, rounded, **options)
    want = outcome(loop, {name: tensor.double() for name, tensor in rounded.items()}, **options)
    for name, tensor in want.items():
        tolerance = TOLERANCE[dtype, "forward" if name in ("o", "state") else "gradient"]
        assert got[name].dtype == dtype
        if tensor.any():
            assert relative_rms(got[name], tensor) <= tolerance, name
        else:
            assert not got[name].any(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
@each_kind
def test_any_length_equals_the_loop(channels, with_bonus, length, dtype):
    assert_equals_the_loop(draw(length, channels, with_bonus), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("regime", REGIMES)
@each_kind
def test_any_decay_equals_the_loop(channels, with_bonus, regime, dtype):
    assert_equals_the_loop(draw(150, channels, with_bonus, regime=regime), dtype)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("regime", REGIMES)
def test_one_decay_a_head_is_a_scan_of_naju(regime, shared):
    """Of decays a little smaller than those given; what is taken from them is below the digits of half precision."""
    arguments = draw(150, 1, False, regime=regime, shared=shared)
    smaller = arguments | {"log_decay": arguments["log_decay"] - LEAST}
    got, want = outcome(head_scan, arguments), outcome(loop, smaller)
    for name, tensor in want.items():
        assert relative_rms(got[name], tensor) <= TOLERANCE[torch.float64, "gradient"], name
    assert TOLERANCE[torch.bfloat16, "forward"] / 2 >= 10_000 * LEAST


def test_a_log_decay_rounded_above_0_is_one_of_0():
    """Its gradient too; a difference of two levels, as in mLSTM, may come out so."""
    arguments = draw(40, 1, False, regime="all or nothing")
    above = arguments | {"log_decay": torch.where(arguments["log_decay"] == 0, 1e-6, arguments["log_decay"])}
    got, want = outcome(head_scan, above), outcome(head_scan, arguments)
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def test_only_a_gpu_takes_one_decay_a_head_to_naju():
    reason = head_scan_refuses(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 1), None, None)
    assert reason == "it is for GPUs, in half precision"


@pytest.mark.parametrize("counts", [[1], [20], [3, 0, 70], [0, 0, 5], [16, 64, 1, 1, 40]], ids=str)
@each_kind
def test_packed_sequences_equal_the_loop(channels, with_bonus, counts):
    arguments = draw(sum(counts), channels, with_bonus, batch=1, rows=len(counts))
    assert_equals_the_loop(arguments, torch.float64, cu_seqlens=torch.tensor([0, *accumulate(counts)]))


@pytest.mark.parametrize("length", [1, 70])
def test_heads_may_share_queries_and_keys(length):
    assert_equals_the_loop(draw(length, 1, False, shared=True), torch.float64)


@each_kind
def test_a_step_is_a_scan_of_one_token(channels, with_bonus):
    arguments = draw(9, channels, with_bonus)
    want, memory = loop(**arguments)
    state, bonus = arguments.pop("state"), arguments.pop("bonus", None)
    outputs = []
    for t in range(9):
        o, state = matrix_step(*(tensor[:, t] for tensor in arguments.values()), state, bonus=bonus)
        outputs.append(o)
    assert relative_rms(torch.stack(outputs, dim=1), want) <= 1e-14
    assert relative_rms(state, memory) <= 1e-14


@each_kind
def test_autocast_and_half_precision_inputs_are_scanned_in_float32(channels, with_bonus):
    arguments = {
        name: tensor.float() if name == "state" else tensor.bfloat16()
        for name, tensor in draw(100, channels, with_bonus).items()
    }
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, state = matrix_scan(**arguments)
    assert o.dtype == torch.bfloat16
    want, memory = loop(**{name: tensor.double() for name, tensor in arguments.items()})
    assert relative_rms(o, want) <= 4e-3
    assert relative_rms(state, memory) <= TOLERANCE[torch.float32, "forward"]


@each_kind
def test_padding_holds_the_state_bit_for_bit(channels, with_bonus):
    arguments = draw(20, channels, with_bonus)
    mask = torch.ones(2, 20)
    mask[0, 11:], mask[1, :] = 0, 0
    layout = layout_of(arguments["v"], mask)
    arguments["log_decay"], arguments["k"] = held(layout, arguments["log_decay"], arguments["k"])
    _, state = matrix_scan(**arguments)
    want = matrix_scan(
        **{n: t if n == "bonus" else t[:1] if n == "state" else t[:1, :11] for n, t in arguments.items()}
    )
    assert relative_rms(state[:1], want[1]) <= 1e-14
    assert torch.equal(state[1], arguments["state"][1])


@pytest.mark.parametrize("counts", [[1], [7], [150], [3, 0, 70]], ids=str)
def test_running_max_is_its_recursion(counts):
    generator = torch.Generator().manual_seed(0)
    length, rows = sum(counts), len(counts)
    values, log_decay = (torch.randn(1, length, HEADS, generator=generator, dtype=torch.float64) for _ in range(2))
    log_decay, start = -log_decay.exp(), torch.randn(rows, HEADS, generator=generator, dtype=torch.float64)
    bounds = [0, *accumulate(counts)]
    want = []
    for m, (left, right) in zip(start, pairwise(bounds), strict=True):
        for t in range(left, right):
            m = torch.maximum(log_decay[0, t] + m, values[0, t])
            want.append(m)
    got = running_max(values, log_decay, start, None if rows == 1 else torch.tensor(bounds))
    assert relative_rms(got[0], torch.stack(want)) <= 1e-14
