"""What the GPU backends have in common: when they run, when not, and Triton's interpreter, which takes CPU tensors."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

from naju.scan.dispatch import constant_when_traced, other_transform

LARGEST_STATE = 256
OLDEST_CAPABILITY = (8, 0)  # that Triton supports; on older chips some of the kernels do not even compile


def interpreted() -> bool:
    """Whether Triton, which looks at this when it is first imported, runs kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "on", "true", "yes", "y")


@functools.cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@constant_when_traced
def triton_missing_here() -> str | None:
    if not _triton_installed():
        return "triton is not installed"
    if interpreted():
        return None
    if torch.version.hip is not None:
        return "torch is built for AMD GPUs and it runs on NVIDIA GPUs only"
    if not torch.cuda.is_available():
        return "no NVIDIA GPU is available to torch"
    if not torch.cuda.is_initialized():  # a process that only uses its CPU is not to start CUDA by asking
        return None
    capability = _newest_capability()
    if capability < OLDEST_CAPABILITY:
        return f"Triton needs a GPU of compute capability 8.0 and this one has {capability[0]}.{capability[1]}"
    return None


@functools.cache
def _newest_capability() -> tuple[int, int]:
    return max(map(_capability, range(torch.cuda.device_count())), default=OLDEST_CAPABILITY)


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    """Asked once: a decoding step has no time for it."""
    return torch.cuda.get_device_capability(index)


@constant_when_traced
def _too_old(index: int) -> str | None:
    """The reason against Triton on this GPU, which may stand beside a newer one that `triton_missing_here` found."""
    if not torch.cuda.is_initialized() or _capability(index) >= OLDEST_CAPABILITY:  # fake tensors may have no GPU
        return None
    major, minor = _capability(index)
    return f"Triton needs a GPU of compute capability 8.0 and cuda:{index} has {major}.{minor}"


def gpu_refuses(h: Tensor, d_state: int, *, in_triton: bool = True) -> str | None:
    """The reason against a kernel on h: its place, its sizes, or the transform that surrounds it."""
    if h.device.type != "cuda" and not (in_triton and h.device.type == "cpu" and interpreted()):
        return f"h is on {h.device} and it runs on NVIDIA GPUs only"
    if h.dtype == torch.float64:
        return "h is float64 and it computes in float32"
    if d_state > LARGEST_STATE:
        return f"d_state is {d_state} and it goes up to {LARGEST_STATE}"
    if in_triton and h.device.type == "cuda":
        return _too_old(h.device.index) or other_transform()
    return other_transform()
