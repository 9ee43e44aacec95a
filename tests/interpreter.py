"""A test file run again in Triton's interpreter, which has to be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys


def passes_under_the_interpreter(file: str, *selection: str, seconds: int = 600) -> None:
    """In a process of its own; `selection` is pytest's, such as -k or -m with its expression."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selection, file]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
