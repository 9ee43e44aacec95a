"""Published GPU kernels for `matrix_scan`, used where they are installed and keep its promises.

All of them are flash-linear-attention's: `chunk_simple_gla` for one decay a head (RetNet's retention, Mamba-2 and mLSTM
are cases of it), `chunk_gla` for one a key channel, `chunk_rwkv6` with a bonus.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from naju.scan.dispatch import other_transform

# q, k, v, log_decay, state, bonus to outputs and final state.
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
SMALLEST_HEAD = 16  # the side of a tensor core's tile


def public_kernel(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor | None, cu_seqlens: Tensor | None
) -> Kernel | None:
    """The kernel that can run this scan, or None.

    float32 stays with ours, because these kernels multiply it as TF32; so do packed sequences, single tokens, narrow
    heads, graphs being compiled, transforms that only see through ordinary operations, and gradients that are known to
    come out wrong.
    """
    if not suits_public_kernels(q, k, v, cu_seqlens):
        return None
    if torch.compiler.is_compiling() or other_transform() is not None:
        return None
    per_head = log_decay.shape[-1] == 1
    if per_head and _gradient_refused(v.device):  # nor its forward: evaluated by other kernels than it was trained by
        return None
    kernel = _load("chunk_rwkv6" if bonus is not None else "chunk_simple_gla" if per_head else "chunk_gla")
    return None if kernel is None else partial(_run, kernel)


def suits_public_kernels(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> bool:
    half = all(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in (q, k, v))
    wide = min(k.shape[-1], v.shape[-1]) >= SMALLEST_HEAD
    return v.device.type == "cuda" and half and wide and v.shape[1] > 1 and cu_seqlens is None


@cache
def _gradient_refused(device: torch.device) -> bool:
    """Triton 3.4.0 to 3.7.0 miscompiles the gradient of `chunk_simple_gla` for Hopper, and fla refuses it there."""
    version = [int(part) for part in re.findall(r"\d+", importlib.import_module("triton").__version__)[:3]]
    return torch.cuda.get_device_capability(device)[0] == 9 and [3, 4, 0] <= version < [3, 7, 1]


@cache
def _load(name: str) -> Callable[..., tuple[Tensor, Tensor]] | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that it would like to have and nothing here needs
            return getattr(importlib.import_module("fla.ops"), name)  # type: ignore[no-any-return]
    except ImportError:
        return None


def _run(
    kernel: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    bonus: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Theirs want one precision, a query and a key for each head, and no axis for a decay a head; ours come scaled."""
    q, k = (tensor.to(v.dtype).expand(-1, -1, v.shape[2], -1).contiguous() for tensor in (q, k))
    decay = log_decay.squeeze(-1) if log_decay.shape[-1] == 1 else log_decay
    drive = (q, k, v.contiguous(), decay.float().contiguous(), *(() if bonus is None else (bonus,)))
    with torch.autocast("cuda", enabled=False):
        return kernel(*drive, scale=1.0, initial_state=state.contiguous(), output_final_state=True)
