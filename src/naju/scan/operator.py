"""Turns a kernel's forward and backward into one torch operator: opaque to torch.compile, with fakes and autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from naju.scan.dispatch import ScanInputs

P = ParamSpec("P")
R = TypeVar("R")

# The fields of ScanInputs in the order that the operators take them.
ARGUMENTS = ("h", "f_logit", "i_logit", "B", "C", "D", "z", "initial_state", "cu_seqlens", "alpha", "reverse")
_SCHEMA = (
    "Tensor h, Tensor f_logit, Tensor i_logit, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor initial_state, "
    "Tensor? cu_seqlens, float alpha, bool reverse"
)
# of h, f_logit, i_logit, B, C, D, z, initial_state; None for an absent D or z
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]
Scan = Callable[[ScanInputs], tuple[Tensor, Tensor]]


def define_operator(
    name: str,
    device_type: str | tuple[str, ...],
    forward: Callable[[ScanInputs, bool], tuple[Tensor, Tensor, list[Tensor]]],
    backward: Callable[[Tensor, Tensor, list[Tensor], ScanInputs], Gradients],
    kept: Callable[[ScanInputs], list[Tensor]] = lambda scan: [],
) -> Scan:
    """Register `naju::name` and `naju::name_backward` and return the function that runs a scan with them.

    forward(scan, keep) -> y, state, and, if a backward will follow (`keep`), the tensors it starts from
    backward(dy, dstate, kept, scan) -> gradients
    kept(scan) -> empty tensors shaped like the ones that forward keeps
    """
    options: dict[str, Any] = {"mutates_args": (), "device_types": device_type}
    results, given = "(Tensor, Tensor, Tensor[])", "Tensor dy, Tensor dstate, Tensor[] kept"

    def run_forward(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        *fields, keep = arguments
        return forward(scan_of(fields), keep)

    def run_backward(dy: Tensor, dstate: Tensor, kept: list[Tensor], *fields: Any) -> tuple[Tensor, ...]:
        gradients = backward(dy, dstate, kept, scan_of(fields))
        return tuple(dy.new_empty(0) if gradient is None else gradient for gradient in gradients)

    scan = torch.library.custom_op(
        f"naju::{name}", refusing_tangents(run_forward), schema=f"({_SCHEMA}, bool keep) -> {results}", **options
    )
    scan_backward = torch.library.custom_op(
        f"naju::{name}_backward",
        refusing_tangents(run_backward),
        schema=f"({given}, {_SCHEMA}) -> ({', '.join(['Tensor'] * 8)})",
        **options,
    )

    def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
        *tensors, ctx.alpha, ctx.reverse, _ = inputs
        ctx.set_materialize_grads(False)  # what is kept can be large, and nobody differentiates it
        ctx.kept = len(output[2])
        ctx.save_for_backward(*output[2], *tensors)

    def differentiate(ctx: Any, dy: Tensor | None, dstate: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        tensors = saved[ctx.kept :]
        dy = torch.zeros_like(tensors[0]) if dy is None else dy
        dstate = torch.zeros_like(tensors[7]) if dstate is None else dstate
        *grads, dD, dz, dinitial_state = scan_backward(
            dy, dstate, list(saved[: ctx.kept]), *tensors, ctx.alpha, ctx.reverse
        )
        optional = (None if tensors[5] is None else dD, None if tensors[6] is None else dz)
        return *grads, *optional, dinitial_state, None, None, None, None

    def fake(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        *fields, keep = arguments
        scan = scan_of(fields)
        return _empty_like(scan.h), _empty_like(scan.initial_state), kept(scan) if keep else []

    def fake_backward(dy: Tensor, dstate: Tensor, kept: list[Tensor], *fields: Any) -> tuple[Tensor, ...]:
        return tuple(dy.new_empty(0) if given is None else _empty_like(given) for given in fields[:8])

    scan.register_fake(fake)
    scan_backward.register_fake(fake_backward)
    scan.register_autograd(differentiate, setup_context=save_inputs)
    scan_backward.register_autograd(refuse_second_derivative)

    def run(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
        y, state, _ = scan(*(getattr(inputs, argument) for argument in ARGUMENTS), inputs.needs_gradient())
        return y, state

    return run


def scan_of(fields: Sequence[Any]) -> ScanInputs:
    return ScanInputs(**dict(zip(ARGUMENTS, fields, strict=True)))


def refusing_tangents(kernel: Callable[P, R]) -> Callable[P, R]:
    """A kernel that raises where torch would drop a tangent: dual numbers in a compiled graph, or in a cotangent."""

    @functools.wraps(kernel)
    def checked(*arguments: P.args, **options: P.kwargs) -> R:
        flat = (item for argument in arguments for item in (argument if isinstance(argument, list) else [argument]))
        if any(isinstance(item, Tensor) and forward_ad.unpack_dual(item).tangent is not None for item in flat):
            raise RuntimeError("a compiled kernel has a plain backward only: forward-mode differentiation is refused")
        return kernel(*arguments, **options)

    return checked


def refuse_second_derivative(ctx: Any, *_: Any) -> NoReturn:
    raise RuntimeError("a kernel's backward cannot be differentiated; Naju with backend='chunked' can be, twice")


def _empty_like(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.shape)
