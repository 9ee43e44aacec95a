"""Every reader of files on files that are nearly right: it reads them or refuses them, and nothing else happens."""

import random
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import HOSTILE, mutated
from parser_targets import TARGETS, Case

EMPTY_AND_CUT = (b"", b"\x00", b"\xff" * 64, b"{}", b"[]", b"null", b"[" * 100_000)


@pytest.fixture(scope="module", params=TARGETS)
def case(request, tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a checkpoint without a process group
        return Case(request.param, tmp_path_factory.mktemp(request.param))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_a_mutated_file_is_read_or_refused(case, seed):
    rng = random.Random(seed)
    name = rng.choice(list(case.good))
    case.read(name, mutated(case.good[name], rng))


def test_an_empty_file_and_one_of_another_kind_are_read_or_refused(case):
    for name in case.good:
        for content in EMPTY_AND_CUT:
            case.read(name, content)


def test_a_file_cut_anywhere_is_read_or_refused(case):
    for name, good in case.good.items():
        for share in range(8):
            case.read(name, good[: len(good) * share // 8])


def test_the_mutations_reach_json_and_headers():
    """A search that changes nothing finds nothing."""
    rng, good = random.Random(0), b'{"a": {"b": [1, 2]}}'
    found = {mutated(good, rng) for _ in range(300)}
    assert len(found) > 150
    assert any(b"../../outside" in one for one in found)
    assert len(HOSTILE) > 20
