"""The whole layer between its outer projections as one operator: convolution, gate products, gates, scan, readout.

    h = silu(conv(u));  [a | b | B | C] = h W^T;  f_logit = a + conv(h) + bias;  i_logit likewise;  y = naju_scan(…, z)

where uz = [u | z] comes from the layer's first projection. One product makes both logits, B and C; the gates overwrite
the logits in place; the backward writes the gradients of uz and of the product each into one tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from naju.scan.frame import without_autocast
from naju.scan.on_gpu import gpu_refuses, triton_missing_here
from naju.scan.operator import refuse_second_derivative, refusing_tangents
from naju.scan.triton_chunked import launch

# uz (b, l, 2d), u_tail and h_tail (rows, width - 1, d), conv_weight (d, width), conv_bias (d,), weight (2d + 2n, d),
# taps (d, width), biases and D (d,), initial_state (rows, d, n); lengths (rows,) where rows hold from some token on.
# Without tails and initial_state every sequence starts from nothing.


def _forward(
    uz: Tensor,
    u_tail: Tensor | None,
    h_tail: Tensor | None,
    conv_weight: Tensor,
    conv_bias: Tensor,
    weight: Tensor,
    f_taps: Tensor,
    i_taps: Tensor,
    f_bias: Tensor,
    i_bias: Tensor,
    D: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    lengths: Tensor | None,
    alpha: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """y, the final state, h, and, if a backward will want it (`keep`), what it starts from."""
    batch, length, d_inner = uz.shape[0], uz.shape[1], uz.shape[2] // 2
    d_state = weight.shape[0] // 2 - d_inner
    h = uz.new_empty(batch, length, d_inner)
    with launch.on_device(uz.device), without_autocast(uz.device):
        plan = launch.plan(h, d_state, cu_seqlens, keep=keep)
        launch.convolve_silu(plan, uz[..., :d_inner], u_tail, conv_weight, conv_bias, h)
        projected = (h.view(-1, d_inner) @ weight.t()).view(batch, length, -1)
        launch.convolved_gates(plan, h, h_tail, projected, f_taps, i_taps, f_bias, i_bias, lengths)
        states = launch.kept_states(h, d_state, cu_seqlens) if keep else None
        y = torch.empty_like(h) if keep else projected[..., :d_inner]  # in place of a gate that nobody needs afterwards
        state = launch.forward(plan, _drive(plan, h, projected, D, uz, alpha), initial_state, states, y)
    return y, state, h, [] if states is None else [projected, states]


def _drive(plan: launch.Plan, h: Tensor, projected: Tensor, D: Tensor, uz: Tensor, alpha: float) -> launch.Drive:
    log_f, log_i, B, C = _split(projected, plan)
    dtype = launch.gate_dtype(h.dtype)
    z = uz[..., plan.d_inner :]
    return launch.Drive(h=h, log_f=log_f.view(dtype), log_i=log_i.view(dtype), B=B, C=C, D=D, z=z, alpha=alpha)


def _split(projected: Tensor, plan: launch.Plan) -> tuple[Tensor, ...]:
    """The parts for f, i, B and C."""
    return torch.split(projected, [plan.d_inner, plan.d_inner, plan.d_state, plan.d_state], dim=-1)


def _backward(
    dy: Tensor,
    dstate: Tensor | None,
    dh: Tensor | None,
    h: Tensor,
    kept: list[Tensor],
    uz: Tensor,
    u_tail: Tensor | None,
    h_tail: Tensor | None,
    conv_weight: Tensor,
    conv_bias: Tensor,
    weight: Tensor,
    f_taps: Tensor,
    i_taps: Tensor,
    f_bias: Tensor,
    i_bias: Tensor,
    D: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    lengths: Tensor | None,
    alpha: float,
) -> list[Tensor]:
    """Gradients of the arguments from uz to initial_state, empty for one that is absent."""
    projected, states = kept
    d_inner = h.shape[2]
    duz, dprojected, ddrive = (tensor.new_empty(tensor.shape) for tensor in (uz, projected, h))
    dinitial = None if initial_state is None else initial_state.new_empty(initial_state.shape)
    with launch.on_device(uz.device), without_autocast(uz.device):
        plan = launch.plan(h, (weight.shape[0] // 2) - d_inner, cu_seqlens, backward=True)
        df, di, dB, dC = _split(dprojected, plan)
        gradients = launch.DriveGradients(h=ddrive, f_logit=df, i_logit=di, B=dB, C=dC, z=duz[..., d_inner:])
        drive = _drive(plan, h, projected, D, uz, alpha)
        dD = launch.backward(plan, drive, states, dy, dstate, gradients, dinitial)
        dh_tail, *dgates = launch.convolved_gates_backward(plan, df, di, h, h_tail, f_taps, i_taps, ddrive)
        if dh is not None:
            ddrive += dh
        rows, drows = ddrive.view(-1, d_inner), dprojected.view(-1, weight.shape[0])
        dweight = drows.t() @ h.view(-1, d_inner)
        rows.addmm_(drows, weight)
        u, du = uz[..., :d_inner], duz[..., :d_inner]
        du_tail, dconv_bias, dconv_weight = launch.convolve_silu_backward(
            plan, ddrive, u, u_tail, conv_weight, conv_bias, du
        )
    parameters = (dconv_weight, dconv_bias, dweight, *dgates, dD)
    like = (conv_weight, conv_bias, weight, f_taps, i_taps, f_bias, i_bias, D)
    cast = [gradient.to(parameter.dtype) for gradient, parameter in zip(parameters, like, strict=True)]
    optional = [h.new_empty(0) if gradient is None else gradient for gradient in (du_tail, dh_tail, dinitial)]
    return [duz, *optional[:2], *cast, optional[2]]


_OPTIONS: dict[str, Any] = {"mutates_args": (), "device_types": ("cuda", "cpu")}
_layer = torch.library.custom_op("naju::triton_layer", refusing_tangents(_forward), **_OPTIONS)
_layer_backward = torch.library.custom_op("naju::triton_layer_backward", refusing_tangents(_backward), **_OPTIONS)


def _shapes(uz: Tensor, weight: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Empty y, state and h."""
    batch, length, d_inner = uz.shape[0], uz.shape[1], uz.shape[2] // 2
    rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = uz.new_empty(rows, d_inner, weight.shape[0] // 2 - d_inner, dtype=torch.float32)
    return uz.new_empty(batch, length, d_inner), state, uz.new_empty(batch, length, d_inner)


@_layer.register_fake
def _(uz: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    weight, cu_seqlens, keep = rest[4], rest[11], rest[14]
    y, state, h = _shapes(uz, weight, cu_seqlens)
    projected = uz.new_empty(*uz.shape[:2], weight.shape[0])
    if keep:
        return y, state, h, [projected, launch.kept_states(h, state.shape[2], cu_seqlens)]
    return projected[..., : y.shape[2]], state, h, []


@_layer_backward.register_fake
def _(
    dy: Tensor, dstate: Tensor | None, dh: Tensor | None, h: Tensor, kept: list[Tensor], *inputs: Any
) -> list[Tensor]:
    return [h.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape) for tensor in inputs[:12]]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, list[Tensor]]) -> None:
    *tensors, ctx.alpha, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[2], *output[3], *tensors)


def _differentiate(ctx: Any, dy: Tensor | None, dstate: Tensor | None, dh: Tensor | None, _: Any) -> tuple[Any, ...]:
    h, projected, states, *tensors = ctx.saved_tensors
    dy = torch.zeros_like(h) if dy is None else dy
    gradients = _layer_backward(dy, dstate, dh, h, [projected, states], *tensors, ctx.alpha)
    given = (None if tensor is None else gradient for tensor, gradient in zip(tensors, gradients, strict=False))
    return *given, None, None, None, None


_layer.register_autograd(_differentiate, setup_context=_save)
_layer_backward.register_autograd(refuse_second_derivative)


def layer(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """y, the final state and h; takes what `_forward` takes but `keep`: only what is differentiated keeps anything."""
    _check_sizes(*arguments[:11])
    tensors = (argument for argument in arguments if isinstance(argument, Tensor))
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    y, state, h, _ = _layer(*arguments, differentiated)
    return y, state, h


def _check_sizes(
    uz: Tensor,
    u_tail: Tensor | None,
    h_tail: Tensor | None,
    conv_weight: Tensor,
    conv_bias: Tensor,
    weight: Tensor,
    f_taps: Tensor,
    i_taps: Tensor,
    *vectors: Tensor,
) -> None:
    """The kernels read by address; tails and state are the caller's to check."""
    d_inner, taps = uz.shape[2] // 2, conv_weight.shape
    fits = taps[0] == weight.shape[1] == d_inner and f_taps.shape == i_taps.shape == taps
    if not fits or any(vector.shape != (d_inner,) for vector in (conv_bias, *vectors)):
        given = (conv_weight, conv_bias, weight, f_taps, i_taps, *vectors)
        raise ValueError(
            f"a layer of {d_inner} channels cannot have convolution, matrices, taps, biases and D of shapes "
            f"{', '.join(str(tuple(tensor.shape)) for tensor in given)}"
        )


def layer_refuses(uz: Tensor, d_state: int, width: int) -> str | None:
    """The reason why the operator cannot run this layer, or None where it can."""
    if width > launch.MOST_WIDTH:
        return f"the convolution is {width} tokens wide and it holds at most {launch.MOST_WIDTH}"
    return gpu_refuses(uz, d_state) or triton_missing_here()
