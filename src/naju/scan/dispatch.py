"""The one place where a scan backend is chosen: what a scan is given, who can run it, and why another cannot."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

P = ParamSpec("P")
T = TypeVar("T")
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of the state and of all gate arithmetic: never below float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, kw_only=True)
class ScanInputs:
    """Arguments of one scan after `check_inputs`: shapes agree, `alpha` and `initial_state` are filled in."""

    h: Tensor  # (b, l, d)
    f_logit: Tensor  # (b, l, d)
    i_logit: Tensor  # (b, l, d)
    B: Tensor  # (b, l, n)
    C: Tensor  # (b, l, n)
    alpha: float
    D: Tensor | None  # (d,)
    z: Tensor | None  # (b, l, d)
    initial_state: Tensor  # (sequences, d, n): a row for each batch element, or for each packed sequence
    cu_seqlens: Tensor | None  # (sequences + 1,)
    reverse: bool

    def tensors(self) -> dict[str, Tensor]:
        """The differentiable arguments that were given, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "cu_seqlens"}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def needs_gradient(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors().values())

    def map(self, function: Callable[[Tensor], Tensor]) -> ScanInputs:
        """The same scan with `function` applied to every differentiable argument."""
        changed: dict[str, Any] = {name: function(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **changed)


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A way to run the scan. Both refusals return None for "can", or the reason as the end of a sentence."""

    name: str
    run: Callable[[ScanInputs], tuple[Tensor, Tensor]]
    missing_here: Callable[[], str | None] = lambda: None
    refuses: Callable[[ScanInputs], str | None] = lambda inputs: None


def choose(backends: Mapping[str, Backend], name: str, inputs: ScanInputs) -> Backend:
    """The named backend or an error with its reason; for "auto" the first that can run these inputs here."""
    if name == "auto":
        return next(backend for backend in backends.values() if _reason_against(backend, inputs) is None)
    if name not in backends:
        raise ValueError(f"unknown scan backend {name!r}; expected 'auto' or one of {', '.join(map(repr, backends))}")
    reason = _reason_against(backends[name], inputs)
    if reason is not None:
        instead = choose(backends, "auto", inputs).name
        raise ValueError(f"scan backend {name!r} cannot run this: {reason}; use backend={instead!r}")
    return backends[name]


def _reason_against(backend: Backend, inputs: ScanInputs) -> str | None:
    return backend.missing_here() or backend.refuses(inputs)


def other_transform() -> str | None:
    """The refusal of every compiled kernel: other transforms than plain backward would silently see no derivative."""
    if _transform_active():
        return "a torch.func transform is active and it has a plain backward only"
    if _inside_dual_level():
        return "forward-mode differentiation is active and it has a plain backward only"
    return None


def constant_when_traced(function: Callable[P, T]) -> Callable[P, T]:
    """`torch.compiler.assume_constant_result`, which would import the whole compiler, a second's work, with naju."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# torch.compile asks both while it traces, when the transforms that surround the call are really active.
@constant_when_traced
def _transform_active() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


@constant_when_traced
def _inside_dual_level() -> bool:
    return forward_ad._current_level >= 0


def check_inputs(
    h: Tensor,
    f_logit: Tensor,
    i_logit: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    alpha: float | None,
    D: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    reverse: bool,
    state_name: str = "initial_state",
) -> ScanInputs:
    """Raise a TypeError or ValueError that names the argument, what came and what was expected; fill in defaults."""
    _check_tensor("h", h)
    if h.dim() != 3 or 0 in h.shape:
        raise ValueError(f"h must have shape (batch, length, d_inner), none of them 0, but has shape {tuple(h.shape)}")
    batch, length, d_inner = h.shape
    _check_tensor("B", B, like=h)
    if B.dim() != 3 or B.shape[:2] != h.shape[:2] or B.shape[2] == 0:
        raise ValueError(f"B must have shape ({batch}, {length}, d_state) to go with h, but has shape {tuple(B.shape)}")
    d_state = B.shape[2]
    _check_tensor("f_logit", f_logit, like=h, shape=h.shape)
    _check_tensor("i_logit", i_logit, like=h, shape=h.shape)
    _check_tensor("C", C, like=h, shape=B.shape)
    if D is not None:
        _check_tensor("D", D, like=h, shape=(d_inner,))
    if z is not None:
        _check_tensor("z", z, like=h, shape=h.shape)
    sequences = batch if cu_seqlens is None else check_cu_seqlens(cu_seqlens, batch, length)
    return ScanInputs(
        h=h,
        f_logit=f_logit,
        i_logit=i_logit,
        B=B,
        C=C,
        alpha=check_alpha(alpha, d_state),
        D=D,
        z=z,
        initial_state=_check_state(state_name, initial_state, h, (sequences, d_inner, d_state)),
        cu_seqlens=cu_seqlens,
        reverse=bool(reverse),
    )


def check_alpha(alpha: float | None, d_state: int) -> float:
    if alpha is None:
        return float(d_state**-0.5)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise TypeError(f"alpha must be a float or None, but is {type(alpha).__name__}")
    if not torch.compiler.is_compiling() and not math.isfinite(alpha):  # there it may be a symbol
        raise ValueError(f"alpha must be finite, but is {alpha}")
    return float(alpha)


def check_cu_seqlens(cu_seqlens: Tensor, batch: int, length: int) -> int:
    """The number of packed sequences; values are read only where that costs no wait for a device."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be an integer tensor, but is {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64, but is {_name(cu_seqlens.dtype)}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens must have shape (sequences + 1,), but has shape {tuple(cu_seqlens.shape)}")
    if batch != 1:
        raise ValueError(f"cu_seqlens packs sequences along length and needs batch 1, but h has batch {batch}")
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        check_boundaries(cu_seqlens.tolist(), length)
    return len(cu_seqlens) - 1


def boundaries_on(device: torch.device, cu_seqlens: Tensor) -> Tensor:
    """Those of a host go to a GPU without a wait for it, unless they are pinned, and so read there only when the copy's
    turn comes: by then they may be others. The other way nobody would know when they have arrived, and while tracing
    nobody can ask whether they are pinned."""
    waits = device.type != "cuda" or torch.compiler.is_compiling() or cu_seqlens.is_pinned()
    return cu_seqlens.to(device, non_blocking=not waits)


def check_boundaries(boundaries: Sequence[int], length: int) -> None:
    rising = all(left <= right for left, right in itertools.pairwise(boundaries))
    if not rising or boundaries[0] != 0 or boundaries[-1] != length:
        shown = ", ".join(map(str, boundaries[:8])) + (", …" if len(boundaries) > 8 else "")
        raise ValueError(f"cu_seqlens must rise from 0 to the length {length}, but is [{shown}]")


def _check_tensor(name: str, value: Tensor, like: Tensor | None = None, shape: Sequence[int] | None = None) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, but is {type(value).__name__}")
    if value.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be bfloat16, float16, float32 or float64, but is {_name(value.dtype)}")
    if like is not None and value.device != like.device:
        raise ValueError(f"{name} must be on the device of h, {like.device}, but is on {value.device}")
    if like is not None and state_dtype(value.dtype) != state_dtype(like.dtype):
        raise TypeError(f"{name} is {_name(value.dtype)} and h is {_name(like.dtype)}: float64 must be all or none")
    if shape is not None and tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)} to go with h, but has shape {tuple(value.shape)}")


def _check_state(name: str, state: Tensor | None, h: Tensor, shape: tuple[int, int, int]) -> Tensor:
    dtype = state_dtype(h.dtype)
    if state is None:
        return torch.zeros(shape, dtype=dtype, device=h.device)
    _check_tensor(name, state)
    if state.device != h.device:
        raise ValueError(f"{name} must be on the device of h, {h.device}, but is on {state.device}")
    if state.dtype != dtype:
        raise TypeError(f"{name} must be {_name(dtype)} when h is {_name(h.dtype)}, but is {_name(state.dtype)}")
    if tuple(state.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, but has shape {tuple(state.shape)}")
    return state


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
