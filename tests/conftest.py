"""Settings of the whole test suite. Its folder is on the path, so that tests can import `numerics`."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("naju", deadline=None, derandomize=True, database=None, max_examples=30, print_blob=False)
settings.load_profile("naju")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
