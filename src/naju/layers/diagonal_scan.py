"""Mamba's recurrence: every channel and every state has a decay of its own, `exp(dt A)`.

    x_t = exp(dt_t A) * x_{t-1} + (dt_t h_t) B_t^T        x: (d, n)
    y_t = x_t C_t

The decays alone have the shape (length, d, n). The torch path therefore goes from chunk to chunk, keeps the state that
enters each, and computes a chunk's states again when its gradients are asked for:

    dx_t = dy_t C_t^T + exp(dt_{t+1} A) * dx_{t+1}        d(dt_t A) = dx_t * exp(dt_t A) * x_{t-1}

On a GPU Naju's own kernels (diagonal_kernels.py) do the same. Dispatch to them and to mamba_ssm's is here too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from naju.layers.cuts import outside
from naju.scan.associative import prefixes
from naju.scan.dispatch import other_transform, state_dtype
from naju.scan.frame import one_by_one, without_autocast
from naju.scan.on_gpu import gpu_refuses, triton_missing_here
from naju.scan.operator import refuse_second_derivative, refusing_tangents

CHUNK = 64
KERNEL_CHUNK = 16
BACKENDS = ("auto", "mamba_ssm", "triton", "torch")


def diagonal_scan(
    h: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """y (b, l, d) and the final state (rows, d, n), both in float32 or better.

    h, dt: (b, l, d) with dt >= 0; A: (d, n), negative; B, C: (b, l, n). Every tensor is differentiable, states
    included, except that mamba_ssm's kernel has no gradient for the final state and says so when asked. "auto" is the
    first of the backends that can run this.
    """
    cut_out = outside("diagonal_scan")
    if cut_out is not None:
        return cut_out(h, dt, A, B, C, initial_state=initial_state, cu_seqlens=cu_seqlens, backend=backend)  # type: ignore[no-any-return]
    dtype = state_dtype(h.dtype)
    h, dt, A, B, C = (tensor.to(dtype) for tensor in (h, dt, A, B, C))
    if _takes("mamba_ssm", check_backend(backend), _reason_against_mamba_ssm(h, initial_state, cu_seqlens)):
        return _by_mamba_ssm(h, dt, A, B, C)
    by_kernels = _takes("triton", backend, _reason_against_triton(h, A))
    rows = h.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    x = h.new_zeros(rows, *A.shape) if initial_state is None else initial_state.to(dtype)
    boundaries = None if cu_seqlens is None else cu_seqlens.tolist()
    with without_autocast(h.device):
        return one_by_one(_one_sequence(A, by_kernels))(h, dt, B, C, x, boundaries)


def diagonal_step(x: Tensor, h: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """One token of `diagonal_scan`: h, dt (b, d), B, C (b, n), x (b, d, n)."""
    with without_autocast(h.device):
        h, dt, A, B, C = (tensor.to(x.dtype) for tensor in (h, dt, A, B, C))
        x = torch.exp(dt.unsqueeze(-1) * A) * x + (dt * h).unsqueeze(-1) * B.unsqueeze(-2)
        return (x @ C.unsqueeze(-1)).squeeze(-1), x


Core = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _one_sequence(A: Tensor, by_kernels: bool) -> Core:
    """The scan of one sequence by the operator, or, where a transform could not see through it, by plain operations."""

    def core(h: Tensor, dt: Tensor, B: Tensor, C: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        if other_transform() is not None:
            return _by_prefixes(h, dt, A, B, C, x)
        y, x, _ = _operator(h, dt, A, B, C, x, by_kernels)
        return y, x

    return core


def _by_prefixes(h: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """All states at once: the form to read, and the one that every derivative and every transform understands."""
    decay = torch.exp(dt.unsqueeze(-1) * A)  # (b, l, d, n)
    kept, states = prefixes((decay, (dt * h).unsqueeze(-1) * B.unsqueeze(-2)))
    states = states + kept * x.unsqueeze(1)
    return (states @ C.unsqueeze(-1)).squeeze(-1), states[:, -1]


def _forward(
    h: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, x: Tensor, by_kernels: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the final state, and the state that enters each chunk, (b, chunks, d, n)."""
    if by_kernels:
        return _kernels().forward(h, dt, A, B, C, x, KERNEL_CHUNK)  # type: ignore[no-any-return]
    readings, entering = [], []
    with without_autocast(h.device):
        for h_c, dt_c, B_c, C_c in _chunks(h, dt, B, C):
            entering.append(x)
            _, states = _states(h_c, dt_c, A, B_c, x)
            readings.append((states @ C_c.unsqueeze(-1)).squeeze(-1))
            x = states[:, -1]
    return torch.cat(readings, dim=1), x.clone(), torch.stack(entering, dim=1)


def _backward(
    dy: Tensor, dx: Tensor, entering: Tensor, h: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, by_kernels: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of h, dt, A, B, C and the initial state: the chunks again, last to first."""
    if by_kernels:
        return _kernels().backward(dy, dx, entering, h, dt, A, B, C, KERNEL_CHUNK)  # type: ignore[no-any-return]
    parts, dA = [], torch.zeros_like(A)
    with without_autocast(h.device):
        for x, chunk in zip(reversed(entering.unbind(1)), reversed(_chunks(h, dt, B, C, dy)), strict=True):
            *gradients, dA_c, dx = _chunk_backward(dx, x, A, *chunk)
            parts.append(gradients)
            dA += dA_c
    dh, ddt, dB, dC = (torch.cat(part[::-1], dim=1) for part in zip(*parts, strict=True))
    return dh, ddt, dA, dB, dC, dx.clone()


def _chunk_backward(
    dx: Tensor, x: Tensor, A: Tensor, h: Tensor, dt: Tensor, B: Tensor, C: Tensor, dy: Tensor
) -> tuple[Tensor, ...]:
    """dh, ddt, dB, dC, dA and the gradient of x, which entered the chunk; dx is that of the state which left it."""
    decay, states = _states(h, dt, A, B, x)
    dstates = dy.unsqueeze(-1) * C.unsqueeze(-2)  # (b, q, d, n)
    dstates[:, -1] += dx
    for t in reversed(range(dstates.shape[1] - 1)):
        dstates[:, t].addcmul_(decay[:, t + 1], dstates[:, t + 1])
    dx = decay[:, 0] * dstates[:, 0]
    dC = (dy.unsqueeze(-2) @ states).squeeze(-2)
    dB = ((dt * h).unsqueeze(-2) @ dstates).squeeze(-2)
    dwrite = (dstates @ B.unsqueeze(-1)).squeeze(-1)  # of dt h
    dexponent = decay.mul_(dstates)  # of dt A: times the state that the decay was applied to
    dexponent[:, 0] *= x
    dexponent[:, 1:] *= states[:, :-1]
    dA = (dexponent * dt.unsqueeze(-1)).sum((0, 1))
    return dwrite * dt, dwrite * h + (dexponent * A).sum(-1), dB, dC, dA, dx


def _states(h: Tensor, dt: Tensor, A: Tensor, B: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Decays and states of one chunk, (b, q, d, n), from the state that enters it."""
    decay = torch.exp(dt.unsqueeze(-1) * A)
    states = (dt * h).unsqueeze(-1) * B.unsqueeze(-2)  # the writes, on which what was before is laid
    for t in range(states.shape[1]):
        x = states[:, t].addcmul_(decay[:, t], x)
    return decay, states


def _chunks(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(tensor.split(CHUNK, dim=1) for tensor in tensors), strict=True))


_operator = torch.library.custom_op("naju::diagonal_scan", refusing_tangents(_forward), mutates_args=())
_operator_backward = torch.library.custom_op(
    "naju::diagonal_scan_backward", refusing_tangents(_backward), mutates_args=()
)


@_operator.register_fake
def _(
    h: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, x: Tensor, by_kernels: bool
) -> tuple[Tensor, Tensor, Tensor]:
    (batch, length, _), chunk = h.shape, KERNEL_CHUNK if by_kernels else CHUNK
    return h.new_empty(h.shape), x.new_empty(x.shape), x.new_empty(batch, -(-length // chunk), *A.shape)


@_operator_backward.register_fake
def _(
    dy: Tensor, dx: Tensor, entering: Tensor, h: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, by_kernels: bool
) -> tuple[Tensor, ...]:
    drive = (h, dt, A, B, C)
    return *(tensor.new_empty(tensor.shape) for tensor in drive), dx.new_empty(dx.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.by_kernels = inputs[6]
    ctx.save_for_backward(output[2], *inputs[:5])


def _differentiate(ctx: Any, dy: Tensor | None, dx: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    entering, h, *rest = ctx.saved_tensors
    dy = torch.zeros_like(h) if dy is None else dy
    dx = torch.zeros_like(entering[:, 0]) if dx is None else dx
    return *_operator_backward(dy, dx, entering, h, *rest, ctx.by_kernels), None


_operator.register_autograd(_differentiate, setup_context=_save)
_operator_backward.register_autograd(refuse_second_derivative)


def check_backend(backend: str) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"unknown diagonal scan backend {backend!r}; expected one of {', '.join(BACKENDS)}")
    return backend


def _takes(kernel: str, backend: str, reason: str | None) -> bool:
    if backend == kernel and reason is not None:
        raise ValueError(f"diagonal scan backend {kernel!r} cannot run this: {reason}; use backend='torch'")
    return backend in ("auto", kernel) and reason is None


def _reason_against_triton(h: Tensor, A: Tensor) -> str | None:
    return gpu_refuses(h, A.shape[1]) or triton_missing_here()


def _kernels() -> ModuleType:
    return importlib.import_module("naju.layers.diagonal_kernels")


def _reason_against_mamba_ssm(h: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> str | None:
    """None where mamba_ssm's kernel can run this, else why not."""
    if h.device.type != "cuda":
        return f"h is on {h.device}, not on an NVIDIA GPU"
    if h.dtype == torch.float64:
        return "h is float64"
    if initial_state is not None or cu_seqlens is not None:
        return "it takes no initial state and no packed sequences"
    if torch.compiler.is_compiling():
        return "torch.compile cannot trace it"
    if _selective_scan() is None:
        return "mamba_ssm is not installed"
    return other_transform()


@cache
def _selective_scan() -> Callable[..., tuple[Tensor, Tensor]] | None:
    try:
        return importlib.import_module("mamba_ssm.ops.selective_scan_interface").selective_scan_fn  # type: ignore[no-any-return]
    except ImportError:
        return None


def _by_mamba_ssm(h: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    kernel = _selective_scan()
    assert kernel is not None
    h, dt, B, C = (tensor.transpose(1, 2).contiguous() for tensor in (h, dt, B, C))
    with without_autocast(h.device):
        y, x = kernel(h, dt, A, B, C, return_last_state=True)
    return y.transpose(1, 2), _Undifferentiable.apply(x)


class _Undifferentiable(torch.autograd.Function):
    """The kernel's backward leaves the final state out without a word, so that its gradient would be silently wrong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        raise RuntimeError("mamba_ssm has no gradient for the final state; use backend='torch' to differentiate it")
