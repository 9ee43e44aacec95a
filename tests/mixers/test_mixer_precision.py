"""Half precision, double precision, autocast, and copies of a mixer."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from mixer_cases import run_in_steps, sequence, small_mixer, used_state

from memories import assert_states_agree, difference
from naju.mixers import MIXERS, NajuMixer
from naju.scan import backends

everywhere = pytest.mark.parametrize("name", MIXERS)


@everywhere
def test_bfloat16_is_close_to_float32(name):
    mixer = small_mixer(name, torch.float32)
    half = copy.deepcopy(mixer).bfloat16()
    u = sequence(2, 40, torch.bfloat16)
    out, _ = half(u)
    assert out.dtype == torch.bfloat16
    want = copy.deepcopy(half).float()(u.float())[0]
    assert difference(out.float(), want) <= 2e-2


@everywhere
def test_bfloat16_streams(name):
    half = small_mixer(name, torch.bfloat16)
    u = sequence(2, 9, torch.bfloat16)
    out, _ = run_in_steps(half, u, half.init_state(2))
    assert out.dtype == torch.bfloat16
    assert difference(out.float(), half(u)[0].float()) <= 2e-2


@everywhere
def test_autocast_is_close_to_float32(name):
    mixer = small_mixer(name, torch.float32)
    u = sequence(2, 40, torch.float32)
    want, _ = mixer(u)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, state = mixer(u)
        again, _ = mixer(u, state)
        stepped, _ = mixer.step(u[:, 0], state)
    assert difference(got.float(), want) <= 2e-2
    assert again.isfinite().all()
    assert stepped.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_memory_and_the_gates_are_never_below_float32(dtype):
    mixer = small_mixer("naju", dtype)
    u = sequence(2, 9, dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mixer(u)[1].x.dtype == torch.float32
        assert mixer.step(u[:, 0], used_state(mixer, 2))[1].x.dtype == torch.float32
        arguments = mixer.scan_arguments(u)
    assert arguments.h.dtype == torch.bfloat16
    assert arguments.f_logit.dtype == arguments.i_logit.dtype == torch.float32


@pytest.mark.parametrize("backend", ["cpu_compiled", "chunked", "associative"])
def test_autocast_does_not_round_the_memory(backend):
    """Both backends read the same bfloat16 drive; only a scan that is itself rounded to bfloat16 could differ."""
    if (reason := backends()[backend]) is not None:
        pytest.skip(reason)
    u = sequence(2, 60, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, want = small_mixer("naju", torch.float32, backend="reference")(u)
        _, got = small_mixer("naju", torch.float32, backend=backend)(u)
    assert difference(got.x, want.x) <= 1e-5


def test_a_state_of_another_precision_is_refused():
    mixer = small_mixer("naju", torch.float32)
    with pytest.raises(TypeError, match="initial_state must be float32 when h is float32, but is float64"):
        mixer(sequence(2, 3, torch.float32), used_state(small_mixer("naju", torch.float64), 2))


@everywhere
def test_copies_compute_the_same_and_learn_apart(name):
    mixer = small_mixer(name, torch.float32)
    u = sequence(2, 9, torch.float32)
    want = mixer(u)[0].detach()
    for twin in (copy.deepcopy(mixer), pickle.loads(pickle.dumps(mixer))):
        assert torch.equal(twin(u)[0], want)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(1.0)
        assert torch.equal(mixer(u)[0], want)
        assert not torch.equal(twin(u)[0], want)


@everywhere
def test_a_state_dict_carries_the_whole_layer(name):
    mixer, other = small_mixer(name, torch.float32), small_mixer(name, torch.float32, seed=1)
    u = sequence(2, 9, torch.float32)
    assert not torch.equal(mixer(u)[0], other(u)[0])
    other.load_state_dict(mixer.state_dict())
    assert torch.equal(mixer(u)[0], other(u)[0])


@everywhere
def test_states_can_be_copied_and_pickled(name):
    state = used_state(small_mixer(name), 2)
    assert_states_agree(copy.deepcopy(state), state, 0.0)
    assert_states_agree(pickle.loads(pickle.dumps(state)), state, 0.0)


@everywhere
def test_every_parameter_gets_a_gradient(name):
    mixer = small_mixer(name, torch.float32)
    mixer(sequence(2, 9, torch.float32))[0].square().sum().backward()
    for key, parameter in mixer.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.ne(0).any(), key
        assert parameter.grad.isfinite().all(), key


def test_a_mixer_can_be_laid_out_without_memory():
    with torch.device("meta"):
        mixer = NajuMixer(4096)
    out, state = mixer(torch.empty(2, 7, 4096, device="meta"))
    assert out.shape == (2, 7, 4096)
    assert state.x.shape == (2, 8192, 64)
