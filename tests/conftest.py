"""Settings of the whole test suite. Its folder is on the path, so that tests can import `numerics`."""

import signal

import pytest
import torch
from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a script starts what it puts into the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("naju", deadline=None, derandomize=True, database=None, max_examples=30, print_blob=False)
settings.load_profile("naju")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
