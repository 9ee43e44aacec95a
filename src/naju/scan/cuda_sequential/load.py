"""Compiles the CUDA scan for the GPUs of this machine, once, into the user's cache, and calls it.

One library serves a range of d_state, so that a first scan waits seconds for nvcc. It has a C ABI: with torch's headers
the same compilation takes minutes.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from naju.scan.cpu_compiled.build import BuildError, compiled, find_compiler
from naju.scan.dispatch import constant_when_traced
from naju.scan.on_gpu import LARGEST_STATE

USUAL_NVCC = "/usr/local/cuda/bin/nvcc"
SOURCE = Path(__file__).with_name("scan.cu")
FLAGS = ["-O3", "-std=c++17", "--shared", "-Xcompiler", "-fPIC"]
THREADS = 128
SEGMENT = 32  # tokens between the states that the forward keeps
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Shape(NamedTuple):
    """How scan.cu splits its work: `lanes` threads share `own` channels, each with `entries` of a channel's state."""

    lanes: int
    entries: int
    own: int

    @property
    def width(self) -> int:
        """Channels of a thread block."""
        return THREADS // self.lanes * self.own

    def definitions(self) -> list[str]:
        numbers = self._asdict() | {"threads": THREADS, "segment": SEGMENT}
        return [f"-D{name.upper()}={number}" for name, number in numbers.items()]


# By the largest d_state that they hold.
SHAPES = {
    8: Shape(8, 1, 4),
    16: Shape(8, 2, 4),
    32: Shape(16, 2, 4),
    64: Shape(32, 2, 4),
    128: Shape(32, 4, 2),
    LARGEST_STATE: Shape(32, 8, 1),
}


def shape_for(d_state: int) -> Shape:
    return next(shape for largest, shape in SHAPES.items() if d_state <= largest)


class Matrix(ctypes.Structure):
    """`struct Matrix` of scan.cu: a (batch, length, channels) tensor whose channels are contiguous."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch_stride", "token_stride", "type")),
    )


class Problem(ctypes.Structure):
    """`struct Problem` of scan.cu."""

    _fields_ = (
        *((name, Matrix) for name in ("h", "f_logit", "i_logit", "B", "C", "z", "dy")),
        *((name, Matrix) for name in ("y", "dh", "df_logit", "di_logit", "dz", "dB", "dC")),
        *((name, ctypes.c_void_p) for name in ("D", "initial_state", "dstate", "state", "dinitial_state", "dD")),
        *((name, ctypes.c_void_p) for name in ("checkpoints", "boundaries")),
        *((name, ctypes.c_int64) for name in ("n_sequences", "length", "d_inner", "d_state")),
        *((name, ctypes.c_int64) for name in ("partial_stride", "reverse")),
        ("alpha", ctypes.c_float),
    )


def call(function: str, problem: Problem, tensors: Mapping[str, Tensor | None]) -> None:
    """Fill the named tensors into the problem and launch it; channels are made contiguous where they are not."""
    matrices = {field[0] for field in Problem._fields_ if field[1] is Matrix}
    alive = {name: _laid_out(value, name in matrices) for name, value in tensors.items() if value is not None}
    for name, tensor in alive.items():
        data = tensor.data_ptr()
        if name in matrices:
            setattr(problem, name, Matrix(data, tensor.stride(-3), tensor.stride(-2), TYPES[tensor.dtype]))
        else:
            setattr(problem, name, data)
    launch(loaded(shape_for(problem.d_state)), function, problem, alive["h"].device)


def _laid_out(tensor: Tensor, as_rows: bool) -> Tensor:
    return tensor if as_rows and tensor.stride(-1) == 1 else tensor.contiguous()


def launch(built: ctypes.CDLL, function: str, problem: Problem, device: torch.device) -> None:
    """Queue the kernel behind what torch has queued on its current stream."""
    with torch.cuda.device(device):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        error = getattr(built, function)(ctypes.byref(problem), torch.cuda.current_device(), stream)
    if error != 0:
        raise RuntimeError(f"the CUDA scan was not launched: {explained(built, error)}")


def explained(built: ctypes.CDLL, error: int) -> str:
    built.naju_error.restype = ctypes.c_char_p
    return str(built.naju_error(error).decode())


def loaded(shape: Shape) -> ctypes.CDLL:
    found = library(shape)
    if isinstance(found, str):
        raise RuntimeError(f"the CUDA scan is not available: {found}")
    return found


@functools.cache
def library(shape: Shape) -> ctypes.CDLL | str:
    """The loaded library, or the reason there is none. Decided once a process."""
    capabilities = {torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count())}
    try:
        built = ctypes.CDLL(str(compiled_library(shape, capabilities)))
    except (BuildError, OSError) as error:
        _reasons[shape] = str(error)
        told = f"the CUDA scan cannot be built, and the next of naju.backends() takes its place: {error}"
        warnings.warn(told, RuntimeWarning, stacklevel=2)
        return str(error)
    _reasons[shape] = None
    return built


_reasons: dict[Shape, str | None] = {}  # of all builds so far: why there is no library, where there is none


def compiled_library(shape: Shape, capabilities: Iterable[tuple[int, int]]) -> Path:
    """The path of an intact library for these compute capabilities, compiled now if there is none."""
    architectures = sorted(f"{major}{minor}" for major, minor in capabilities)
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in architectures]
    command = [find_nvcc(), *FLAGS, *_host_compiler(), *targets, *shape.definitions()]
    return compiled([SOURCE], command, platform.machine())


def find_nvcc() -> str:
    """nvcc of `$CUDA_HOME` or `$CUDA_PATH` where one is set, else from the path or the toolkit's usual place."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for place in [*(str(Path(home) / "bin" / "nvcc") for home in homes), "nvcc", USUAL_NVCC]:
        found = shutil.which(place)
        if found:
            return found
    raise BuildError("nvcc, the compiler of the CUDA toolkit, was not found on the path or in CUDA_HOME")


def _host_compiler() -> list[str]:
    return [] if os.environ.get("NVCC_CCBIN") else ["-ccbin", find_compiler()]


@constant_when_traced
def not_built(shape: Shape) -> str | None:
    """Why there is no library for this shape. The first to ask waits for nvcc, while it can still choose."""
    found = library(shape)
    return found if isinstance(found, str) else None


@constant_when_traced
def missing_here() -> str | None:
    """Why the CUDA scan cannot run on this machine, as far as tools and past builds tell: it compiles nothing."""
    if sys.platform == "win32":
        return "it is built as a POSIX shared library, which Windows does not load"
    if torch.version.hip is not None:
        return "torch is built for AMD GPUs and it runs on NVIDIA GPUs only"
    if not torch.cuda.is_available():
        return "no NVIDIA GPU is available to torch"
    try:
        find_nvcc()
        _host_compiler()
    except BuildError as error:
        return str(error)
    reasons = list(_reasons.values())
    return reasons[0] if reasons and all(reasons) else None  # what stops every nvcc would stop the next
