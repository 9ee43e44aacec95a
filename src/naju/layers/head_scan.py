"""One decay a head on a GPU: a scan of Naju whose forget gates are equal in a head and whose write gate is open.

`S_t = decay_t * S_{t-1} + k_t v_t^T` is `x_t = f_t * x_{t-1} + i_t * (h_t B_t^T)` with h = v, B = k, f = decay, i = 1.
Where all heads share their keys (Mamba-2) they are channels of one scan, elsewhere (RetNet, mLSTM) rows of its batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from naju.scan import naju_scan
from naju.scan.dispatch import state_dtype
from naju.scan.frame import without_autocast
from naju.scan.on_gpu import LARGEST_STATE, triton_missing_here

CHANNELS = 16  # padded to a multiple of this, so that rows begin where a GPU reads well
# Taken from every log-decay, because the logit of a decay of 1 has no derivative: the largest decay is 1 - 8e-8. It is
# a gate that the kernels store exactly, and far below what half precision shows.
LEAST = 2.0**-23 * 0.6931471805599453


def head_scan_refuses(
    q: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor | None, cu_seqlens: Tensor | None
) -> str | None:
    """None where this is the way to scan, or the reason why not as the end of a sentence."""
    if v.device.type != "cuda" or v.dtype not in (torch.bfloat16, torch.float16):
        return "it is for GPUs, in half precision"
    if log_decay.shape[-1] != 1 or bonus is not None:
        return "it knows one decay a head and no bonus"
    if cu_seqlens is not None or v.shape[1] == 1:
        return "packed sequences and single tokens are done in torch"
    if q.shape[-1] > LARGEST_STATE:
        return f"the keys are wider than {LARGEST_STATE}"
    return triton_missing_here()


def head_scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`matrix_scan` for one decay a head: outputs in the precision of v, and the state after the last token."""
    with without_autocast(v.device):
        shared = q.shape[2] == k.shape[2] == 1
        return _as_channels(q, k, v, log_decay, state) if shared else _as_rows(q, k, v, log_decay, state)


def _as_channels(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, heads, width = v.shape
    f_logit = _logit(log_decay).expand(v.shape).reshape(batch, length, heads * width)
    x = state.transpose(-1, -2).reshape(batch, heads * width, -1)
    o, x = _scan(v.flatten(2), f_logit, k.squeeze(2), q.squeeze(2), x)
    return o.view(v.shape), x.view(batch, heads, width, -1).transpose(-1, -2)


def _as_rows(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, heads, width = v.shape
    padding = -width % CHANNELS

    def rows(tensor: Tensor) -> Tensor:
        """(b, l, heads or 1, c) to (b * heads, l, c)."""
        return tensor.transpose(1, 2).expand(-1, heads, -1, -1).reshape(batch * heads, length, -1)

    h = rows(F.pad(v, (0, padding)))
    x = F.pad(state.transpose(-1, -2), (0, 0, 0, padding)).flatten(0, 1)
    o, x = _scan(h, rows(_logit(log_decay)).expand(h.shape).contiguous(), rows(k), rows(q), x)
    o = o.view(batch, heads, length, -1)[..., :width].transpose(1, 2)
    return o, x.view(batch, heads, width + padding, -1)[:, :, :width].transpose(-1, -2)


def _logit(log_decay: Tensor) -> Tensor:
    """Rounding can bring mLSTM's log-decay, a difference of levels, above 0, where there is no logit."""
    log_decay = log_decay.to(state_dtype(log_decay.dtype))
    log_decay = log_decay - log_decay.detach().clamp(min=0.0) - LEAST
    return log_decay - (-torch.expm1(log_decay)).log()


def _scan(h: Tensor, f_logit: Tensor, B: Tensor, C: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    opened = torch.full_like(h, torch.inf)
    B, C = (tensor.to(h.dtype).contiguous() for tensor in (B, C))
    return naju_scan(h.contiguous(), f_logit, opened, B, C, alpha=1.0, initial_state=x.contiguous())
