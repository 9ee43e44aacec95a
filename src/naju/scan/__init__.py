"""The operator: `x_t = f_t x_{t-1} + i_t h_t B_t^T`, `y_t = alpha x_t C_t + D h_t`, on any machine.

`naju_scan` runs a whole sequence, `naju_step` one token, `backends` says what can run here and why the rest cannot.
"""

from __future__ import annotations

from torch import Tensor

from naju.scan.associative import ASSOCIATIVE
from naju.scan.chunked import CHUNKED
from naju.scan.cpu_compiled import CPU_COMPILED
from naju.scan.cuda_sequential import CUDA_SEQUENTIAL
from naju.scan.dispatch import check_alpha, check_inputs, choose, state_dtype
from naju.scan.frame import after_token, gate, readout, without_autocast
from naju.scan.reference import REFERENCE
from naju.scan.triton_chunked import TRITON_CHUNKED
from naju.scan.triton_sequential import TRITON_SEQUENTIAL

__all__ = ["BACKENDS", "PLAIN_BACKENDS", "backends", "naju_scan", "naju_step"]

# In order of preference.
_ON_A_GPU = (TRITON_CHUNKED, CUDA_SEQUENTIAL, TRITON_SEQUENTIAL)
_ANYWHERE = (CPU_COMPILED, CHUNKED, ASSOCIATIVE, REFERENCE)
BACKENDS = {backend.name: backend for backend in (*_ON_A_GPU, *_ANYWHERE)}
PLAIN_BACKENDS = (CHUNKED.name, ASSOCIATIVE.name, REFERENCE.name)  # torch's operations: every derivative passes


def backends() -> dict[str, str | None]:
    """Every backend in order of preference: None where it can run on this machine, else the reason it cannot."""
    return {name: backend.missing_here() for name, backend in BACKENDS.items()}


def naju_scan(
    h: Tensor,
    f_logit: Tensor,
    i_logit: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    alpha: float | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Scan a batch of sequences; returns the outputs and the state after the last token.

        x_t = sigmoid(f_logit_t) * x_{t-1} + sigmoid(i_logit_t) * h_t B_t^T
        y_t = (alpha * x_t C_t + D * h_t) * silu(z_t)

    `h, f_logit, i_logit, z, y`: (batch, length, d_inner); `B, C`: (batch, length, d_state); `D`: (d_inner,); states:
    (batch, d_inner, d_state), float32 (float64 for float64 inputs). `alpha=None` means `1/sqrt(d_state)`; without `D`
    or `z` their factors are left out. Every tensor is differentiable, both states included.

    `cu_seqlens` = [0, …, length] packs sequences along the length of a batch of 1; states then have one row a sequence,
    and an empty sequence hands its state through. `reverse` runs from the last token to the first: `initial_state`
    enters at the right end and the returned state is that at the left. `backend` names one of `backends()`.
    """
    inputs = check_inputs(
        h,
        f_logit,
        i_logit,
        B,
        C,
        alpha=alpha,
        D=D,
        z=z,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        reverse=reverse,
    )
    with without_autocast(h.device):
        return choose(BACKENDS, backend, inputs).run(inputs)


def naju_step(
    state: Tensor,
    h: Tensor,
    f_logit: Tensor,
    i_logit: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    alpha: float | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One token of `naju_scan`: `h, f_logit, i_logit, z`: (batch, d_inner); `B, C`: (batch, d_state)."""
    _check_step(state, h, f_logit, i_logit, B, C, D, z)
    dtype = state_dtype(h.dtype)
    with without_autocast(h.device):
        v = gate(i_logit.to(dtype)) * h.to(dtype)
        state = after_token(state, f_logit.to(dtype), v.unsqueeze(-1) * B.to(dtype).unsqueeze(-2))
        m = (state @ C.to(dtype).unsqueeze(-1)).squeeze(-1)
        return readout(m, h, check_alpha(alpha, B.shape[-1]), D, z), state


def _check_step(
    state: Tensor,
    h: Tensor,
    f_logit: Tensor,
    i_logit: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
) -> None:
    """The checks of `naju_scan` on a length of one; messages name the shapes with that length of one in them."""
    for name, value in {"h": h, "f_logit": f_logit, "i_logit": i_logit, "B": B, "C": C}.items():
        if isinstance(value, Tensor) and value.dim() != 2:
            raise ValueError(
                f"{name} must have two axes in a step, (batch, channels), but has shape {tuple(value.shape)}"
            )
    with_length = [
        tensor.unsqueeze(1) if isinstance(tensor, Tensor) else tensor for tensor in (h, f_logit, i_logit, B, C)
    ]
    z_with_length = z.unsqueeze(1) if isinstance(z, Tensor) else z
    if not isinstance(state, Tensor):
        raise TypeError(f"state must be a tensor, but is {type(state).__name__}")
    check_inputs(
        *with_length,
        alpha=None,
        D=D,
        z=z_with_length,
        initial_state=state,
        cu_seqlens=None,
        reverse=False,
        state_name="state",
    )
