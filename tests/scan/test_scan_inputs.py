"""Wrong calls are refused with a sentence that names the argument, what came and what was expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from naju import backends, naju_scan, naju_step
from numerics import BACKEND_NAMES, TORCH_BACKENDS, each_backend, each_backend_and_auto

BATCH, LENGTH, D_INNER, D_STATE = 2, 6, 4, 3
PER_CHANNEL, PER_STATE = (BATCH, LENGTH, D_INNER), (BATCH, LENGTH, D_STATE)


def good(batch: int = BATCH, **changes: Any) -> dict[str, Any]:
    shapes = dict.fromkeys(("h", "f_logit", "i_logit", "z"), (batch, LENGTH, D_INNER))
    shapes |= dict.fromkeys(("B", "C"), (batch, LENGTH, D_STATE))
    shapes |= {"D": (D_INNER,), "initial_state": (batch, D_INNER, D_STATE)}
    return {name: torch.randn(shape) for name, shape in shapes.items()} | changes


def packed(*boundaries: Any, **options: Any) -> dict[str, Any]:
    cu_seqlens = torch.tensor(boundaries, **options)
    return good(1, cu_seqlens=cu_seqlens, initial_state=torch.randn(max(1, len(cu_seqlens) - 1), D_INNER, D_STATE))


def float64_except(name: str) -> dict[str, Any]:
    return {key: tensor if key == name else tensor.double() for key, tensor in good().items()}


# A wrong call, and what its sentence must begin with (the argument) and hold (what was expected, what came).
WRONG_SHAPES = {
    "h without length": (good(h=torch.randn(2, 4)), ["h ", "(batch, length, d_inner)", "(2, 4)"]),
    "h with four axes": (good(h=torch.randn(1, *PER_CHANNEL)), ["h ", "(batch, length, d_inner)", "(1, 2, 6, 4)"]),
    "no tokens": (good(h=torch.randn(2, 0, 4)), ["h ", "(2, 0, 4)", "none of them 0"]),
    "no rows": (good(h=torch.randn(0, 6, 4)), ["h ", "(0, 6, 4)", "none of them 0"]),
    "no channels": (good(h=torch.randn(2, 6, 0)), ["h ", "(2, 6, 0)", "none of them 0"]),
    "f_logit of other width": (good(f_logit=torch.randn(2, 6, 5)), ["f_logit ", "(2, 6, 4)", "(2, 6, 5)"]),
    "f_logit to be broadcast": (good(f_logit=torch.randn(1, 1, 4)), ["f_logit ", "(2, 6, 4)", "(1, 1, 4)"]),
    "i_logit of other length": (good(i_logit=torch.randn(2, 5, 4)), ["i_logit ", "(2, 6, 4)", "(2, 5, 4)"]),
    "B without batch": (good(B=torch.randn(6, 3)), ["B ", "(2, 6, d_state)", "(6, 3)"]),
    "B of other batch": (good(B=torch.randn(1, 6, 3)), ["B ", "(2, 6, d_state)", "(1, 6, 3)"]),
    "B of other length": (good(B=torch.randn(2, 7, 3)), ["B ", "(2, 6, d_state)", "(2, 7, 3)"]),
    "B without state": (good(B=torch.randn(2, 6, 0)), ["B ", "(2, 6, d_state)", "(2, 6, 0)"]),
    "C of other state": (good(C=torch.randn(2, 6, 4)), ["C ", "(2, 6, 3)", "(2, 6, 4)"]),
    "D a column": (good(D=torch.randn(4, 1)), ["D ", "(4,)", "(4, 1)"]),
    "D of other width": (good(D=torch.randn(3)), ["D ", "(4,)", "(3,)"]),
    "D a scalar": (good(D=torch.tensor(1.0)), ["D ", "(4,)", "()"]),
    "z of other width": (good(z=torch.randn(2, 6, 3)), ["z ", "(2, 6, 4)", "(2, 6, 3)"]),
    "state transposed": (good(initial_state=torch.randn(2, 3, 4)), ["initial_state ", "(2, 4, 3)", "(2, 3, 4)"]),
    "state without batch": (good(initial_state=torch.randn(4, 3)), ["initial_state ", "(2, 4, 3)", "(4, 3)"]),
    "state of other batch": (good(initial_state=torch.randn(1, 4, 3)), ["initial_state ", "(2, 4, 3)", "(1, 4, 3)"]),
    "a state too few for a packing": (
        good(1, cu_seqlens=torch.tensor([0, 2, 6])),
        ["initial_state ", "(2, 4, 3)", "(1, 4, 3)"],
    ),
}
WRONG_TYPES = {
    "h a list": (good(h=[1.0]), ["h ", "tensor", "list"]),
    "h None": (good(h=None), ["h ", "tensor", "NoneType"]),
    "f_logit a number": (good(f_logit=2.0), ["f_logit ", "tensor", "float"]),
    "B an array": (good(B=np.zeros(PER_STATE, np.float32)), ["B ", "tensor", "ndarray"]),
    "D a number": (good(D=0.5), ["D ", "tensor", "float"]),
    "z a boolean": (good(z=True), ["z ", "tensor", "bool"]),
    "state a list": (good(initial_state=[0.0]), ["initial_state ", "tensor", "list"]),
    "h integers": (good(h=torch.ones(PER_CHANNEL, dtype=torch.int64)), ["h ", "float32", "int64"]),
    "h complex": (good(h=torch.ones(PER_CHANNEL, dtype=torch.complex64)), ["h ", "float32", "complex64"]),
    "C booleans": (good(C=torch.ones(PER_STATE, dtype=torch.bool)), ["C ", "float32", "bool"]),
    "h alone float64": (good(h=torch.randn(PER_CHANNEL).double()), ["B ", "float32", "h is float64", "all or none"]),
    "h alone float32": (float64_except("h"), ["B ", "float64", "h is float32", "all or none"]),
    "C alone float32": (float64_except("C"), ["C ", "float32", "float64"]),
    "D alone float32": (float64_except("D"), ["D ", "float32", "float64"]),
    "state alone float32": (float64_except("initial_state"), ["initial_state ", "float64", "float32"]),
    "state alone float64": (
        good(initial_state=torch.randn(2, 4, 3).double()),
        ["initial_state ", "float32", "float64"],
    ),
    "state in half precision": (
        good(initial_state=torch.randn(2, 4, 3).half()),
        ["initial_state ", "float32", "float16"],
    ),
    "alpha a tensor": (good(alpha=torch.tensor(0.5)), ["alpha ", "float", "Tensor"]),
    "alpha a boolean": (good(alpha=True), ["alpha ", "float", "bool"]),
    "alpha a string": (good(alpha="0.5"), ["alpha ", "float", "str"]),
}
WRONG_PACKINGS = {
    "floats": (packed(0.0, 6.0), TypeError, ["cu_seqlens ", "int32 or int64", "float32"]),
    "int16": (packed(0, 6, dtype=torch.int16), TypeError, ["cu_seqlens ", "int32 or int64", "int16"]),
    "a list": (good(1, cu_seqlens=[0, 6]), TypeError, ["cu_seqlens ", "tensor", "list"]),
    "decreasing": (packed(0, 4, 2, 6), ValueError, ["cu_seqlens ", "rise", "[0, 4, 2, 6]"]),
    "a negative boundary": (packed(0, -1, 6), ValueError, ["cu_seqlens ", "rise", "[0, -1, 6]"]),
    "a late start": (packed(1, 6), ValueError, ["cu_seqlens ", "from 0", "[1, 6]"]),
    "an early end": (packed(0, 2, 5), ValueError, ["cu_seqlens ", "length 6", "[0, 2, 5]"]),
    "an end past the length": (packed(0, 2, 7), ValueError, ["cu_seqlens ", "length 6", "[0, 2, 7]"]),
    "two axes": (packed([0, 6]), ValueError, ["cu_seqlens ", "(sequences + 1,)", "(1, 2)"]),
    "one boundary": (packed(0), ValueError, ["cu_seqlens ", "(sequences + 1,)", "(1,)"]),
    "batch 2": (good(cu_seqlens=torch.tensor([0, 6])), ValueError, ["cu_seqlens ", "batch 1", "batch 2"]),
}
WRONG = {name: (call, ValueError, words) for name, (call, words) in WRONG_SHAPES.items()}
WRONG |= {name: (call, TypeError, words) for name, (call, words) in WRONG_TYPES.items()}
WRONG |= {f"cu_seqlens: {name}": wrong for name, wrong in WRONG_PACKINGS.items()}


def assert_refused(words: list[str], exception: type[Exception], function: Any, /, **call: Any) -> None:
    with pytest.raises(exception) as caught:
        function(**call)
    sentence = str(caught.value)
    assert sentence.startswith(words[0]), sentence
    assert not [word for word in words if word not in sentence], sentence


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_wrong_call_is_refused(backend: str, name: str) -> None:
    call, exception, words = WRONG[name]
    assert_refused(words, exception, naju_scan, **call, backend=backend)


@pytest.mark.parametrize("name", ["f_logit", "i_logit", "B", "C", "D", "z", "initial_state"])
def test_another_device_is_refused(name: str) -> None:
    call = good()
    call[name] = call[name].to("meta")
    assert_refused([f"{name} ", "cpu", "meta"], ValueError, naju_scan, **call)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    words = ["unknown scan backend 'turbo'", "'auto'", *map(repr, BACKEND_NAMES)]
    assert_refused(words, ValueError, naju_scan, **good(), backend="turbo")


def one_token(**changes: Any) -> dict[str, Any]:
    shapes = dict.fromkeys(("h", "f_logit", "i_logit", "z"), (BATCH, D_INNER))
    shapes |= {"B": (BATCH, D_STATE), "C": (BATCH, D_STATE), "D": (D_INNER,), "state": (BATCH, D_INNER, D_STATE)}
    return {name: torch.randn(shape) for name, shape in shapes.items()} | changes


WRONG_STEPS = {
    "h with a length": (one_token(h=torch.randn(2, 1, 4)), ValueError, ["h ", "(2, 1, 4)", "(batch, "]),
    "z with a length": (one_token(z=torch.randn(2, 1, 4)), ValueError, ["z ", "(2, 1, 4)"]),
    "h of other width": (one_token(h=torch.randn(2, 5)), ValueError, ["f_logit ", "5)", "4)"]),
    "f_logit of other batch": (one_token(f_logit=torch.randn(3, 4)), ValueError, ["f_logit ", "(2, ", "(3, "]),
    "B of other batch": (one_token(B=torch.randn(3, 3)), ValueError, ["B ", "(2, ", "(3, "]),
    "C of other state": (one_token(C=torch.randn(2, 4)), ValueError, ["C ", "3)", "4)"]),
    "D of other width": (one_token(D=torch.randn(5)), ValueError, ["D ", "(4,)", "(5,)"]),
    "state transposed": (one_token(state=torch.randn(2, 3, 4)), ValueError, ["state ", "(2, 4, 3)", "(2, 3, 4)"]),
    "state of other batch": (one_token(state=torch.randn(1, 4, 3)), ValueError, ["state ", "(2, 4, 3)", "(1, 4, 3)"]),
    "state None": (one_token(state=None), TypeError, ["state ", "tensor", "NoneType"]),
    "state in half precision": (
        one_token(state=torch.randn(2, 4, 3).half()),
        TypeError,
        ["state ", "float32", "float16"],
    ),
    "h None": (one_token(h=None), TypeError, ["h ", "tensor", "NoneType"]),
    "h integers": (one_token(h=torch.ones(2, 4, dtype=torch.int32)), TypeError, ["h ", "float32", "int32"]),
    "B alone float64": (one_token(B=torch.randn(2, 3).double()), TypeError, ["B ", "float64", "float32"]),
    "alpha a tensor": (one_token(alpha=torch.tensor(1.0)), TypeError, ["alpha ", "float", "Tensor"]),
}


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_a_wrong_step_is_refused(name: str) -> None:
    call, exception, words = WRONG_STEPS[name]
    assert_refused(words, exception, naju_step, **call)


def test_a_named_backend_that_cannot_run_this_names_one_that_can() -> None:
    call = {name: tensor.double() for name, tensor in good().items()}
    reason = backends()["cpu_compiled"] or "h is float64"
    words = ["scan backend 'cpu_compiled' cannot run this", reason, "use backend='chunked'"]
    assert_refused(words, ValueError, naju_scan, **call, backend="cpu_compiled")


def test_backends_lists_every_one_in_order_of_preference() -> None:
    listed = backends()
    assert [name for name in listed if name in BACKEND_NAMES] == ["cpu_compiled", "chunked", "associative", "reference"]
    assert all(reason is None or reason for reason in listed.values())
    assert [listed[name] for name in TORCH_BACKENDS] == [None] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "extra", [{}, {"reverse": True}, {"alpha": 2}, {"alpha": 0.0}, {"cu_seqlens": torch.tensor([0, 6])}]
)
def test_auto_takes_every_valid_call(dtype: torch.dtype, extra: dict[str, Any]) -> None:
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    call = {name: tensor.to(dtype) for name, tensor in good(1).items()}
    call["initial_state"] = call["initial_state"].to(state_dtype)
    y, state = naju_scan(**call, **extra)
    assert (y.shape, y.dtype) == (call["h"].shape, dtype)
    assert (state.shape, state.dtype) == (call["initial_state"].shape, state_dtype)


@each_backend_and_auto
def test_both_integer_types_pack(backend: str) -> None:
    call = packed(0, 2, 6)
    wide = naju_scan(**call, backend=backend)
    narrow = naju_scan(**call | {"cu_seqlens": call["cu_seqlens"].to(torch.int32)}, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(wide, narrow, strict=True))


@each_backend
def test_without_gradients_nothing_is_recorded(backend: str) -> None:
    y, state = naju_scan(**good(), backend=backend)
    assert not y.requires_grad
    assert not state.requires_grad
