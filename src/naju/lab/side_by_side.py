"""Several runs on one GPU: without help they take turns on it, however little each can fill it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
DEFAULT_PIPES = Path("/tmp/nvidia-mps/control")  # where clients look on their own
PATIENCE_SECONDS = 30.0


@contextmanager
def side_by_side(device: str, jobs: int) -> Iterator[None]:
    """Processes that are started inside compute on the GPU at the same time: CUDA's multi-process service, of our own.

    One that somebody else has set up is used as it is. Where the machine has none they take turns, as ever. None gets a
    part of the processors only, which made products of matrices wrong (docs/laboratory.md).
    """
    control = shutil.which(CONTROL)
    theirs = PIPES in os.environ or DEFAULT_PIPES.exists()
    if device != "cuda" or jobs < 2 or control is None or theirs:
        yield
        return
    with TemporaryDirectory(prefix="naju-mps-") as folder:
        places = {PIPES: f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for place in places.values():
            Path(place).mkdir()
        with _environment(places):
            begun = _begin(control, Path(folder) / "said")
            try:
                if begun:
                    yield
            finally:
                if begun:
                    _end(control)
        if not begun:
            yield


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


def _begin(control: str, said: Path) -> bool:
    """What it says goes to a file: its daemon would hold a pipe open."""
    with said.open("w") as file:
        code = subprocess.run(
            [control, "-d"], stdout=file, stderr=file, timeout=PATIENCE_SECONDS, check=False
        ).returncode
    if code != 0:
        why = said.read_text().strip().partition("\n")[0]
        print(f"naju: runs take turns on the GPU, for {CONTROL} says: {why}", file=sys.stderr)
    return code == 0


def _end(control: str) -> None:
    """It waits for its clients, which have ended by now; one that hangs keeps it, and is left to whoever looks."""
    with suppress(subprocess.TimeoutExpired):
        subprocess.run([control], input="quit\n", text=True, capture_output=True, timeout=PATIENCE_SECONDS, check=False)
