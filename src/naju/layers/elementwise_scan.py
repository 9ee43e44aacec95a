"""The recurrence with one number a channel: Naju's scan with a state of size 1, and so with all of its backends."""

from __future__ import annotations

from torch import Tensor

from naju.scan import naju_scan, naju_step


def elementwise_scan(
    h: Tensor,
    f_logit: Tensor,
    i_logit: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`x_t = sigmoid(f_logit_t) * x_{t-1} + sigmoid(i_logit_t) * h_t` for h and logits (b, l, d): every x_t in the
    precision of h, and the final state (rows, d) in float32 or better."""
    x = None if initial_state is None else initial_state.unsqueeze(-1)
    one = h.new_ones(*h.shape[:2], 1)
    y, x = naju_scan(h, f_logit, i_logit, one, one, alpha=1.0, initial_state=x, cu_seqlens=cu_seqlens)
    return y, x.squeeze(-1)


def elementwise_step(x: Tensor, h: Tensor, f_logit: Tensor, i_logit: Tensor) -> tuple[Tensor, Tensor]:
    """One token of `elementwise_scan`, (b, d)."""
    one = h.new_ones(h.shape[0], 1)
    y, x = naju_step(x.unsqueeze(-1), h, f_logit, i_logit, one, one, alpha=1.0)
    return y, x.squeeze(-1)
