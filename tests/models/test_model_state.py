"""The state of a whole model: layers of different kinds, picked, rolled back and kept together."""

from __future__ import annotations

import os
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from model_cases import HYBRID, STACKS, sentences, small_model

from memories import assert_states_agree, difference, storage_bytes
from naju import ModelState, NajuState

everywhere = pytest.mark.parametrize("layers", STACKS.values(), ids=STACKS)


def state_of(model, batch=3):
    return model.prefill(sentences(batch, 6))[1]


@everywhere
def test_a_file_gives_back_every_bit_and_the_same_future(layers, tmp_path):
    model = small_model(layers, torch.float32)
    state = state_of(model)
    state.save(tmp_path / "state.safetensors")
    loaded = ModelState.load(tmp_path / "state.safetensors")
    assert os.listdir(tmp_path) == ["state.safetensors"]
    assert [type(layer) for layer in loaded.layers] == [type(layer) for layer in state.layers]
    assert_states_agree(loaded, state, 0.0)
    tokens = sentences(3, 5, seed=2)
    assert torch.equal(model(tokens, loaded)[0], model(tokens, state)[0])


def test_a_layers_state_is_not_a_models(tmp_path):
    state = state_of(small_model(["naju"]))
    state.save(tmp_path / "model")
    state.layers[0].save(tmp_path / "layer")
    with pytest.raises(ValueError, match="holds a NajuState, but a ModelState was expected"):
        ModelState.load(tmp_path / "layer")
    with pytest.raises(ValueError, match="holds a ModelState, but a NajuState was expected"):
        NajuState.load(tmp_path / "model")


def test_a_truncated_file_is_refused(tmp_path):
    state_of(small_model(HYBRID)).save(tmp_path / "state")
    content = (tmp_path / "state").read_bytes()
    (tmp_path / "state").write_bytes(content[:-1])
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        ModelState.load(tmp_path / "state")


def test_names_tell_the_layer_and_the_field():
    names = set(state_of(small_model(HYBRID)).tensors())
    assert {"layers.0.x", "layers.0.u_tail", "layers.1.keys", "layers.2.h_tail"} <= names


def test_layers_cannot_be_replaced():
    state = state_of(small_model(HYBRID))
    with pytest.raises(FrozenInstanceError):
        state.layers = ()


@everywhere
@pytest.mark.parametrize("index", [[2], [0, 2], [1, 1, 0, 2]], ids=str)
def test_beams_are_reordered_in_every_layer(layers, index):
    model = small_model(layers)
    state, tokens = state_of(model), sentences(3, 5, seed=2)
    want = model(tokens, state)[0][index]
    order = torch.tensor(index)
    for picked in (state.reorder(order), state[order], state[index]):
        assert difference(model(tokens[index], picked)[0], want) <= 1e-12


@everywhere
def test_rolling_back_repeats_the_continuation(layers):
    model = small_model(layers)
    snapshot = state_of(model).snapshot()
    tokens = sentences(3, 5, seed=2)
    first, state = model(tokens, snapshot)
    model(sentences(3, 4, seed=5), state)
    again, same = model(tokens, snapshot)
    assert torch.equal(first, again)
    assert_states_agree(same, state, 0.0)


def test_restoring_a_recurrent_model():
    model = small_model(["naju", "coupled"])
    snapshot = state_of(model).snapshot()
    with torch.no_grad():
        _, later = model(sentences(3, 9, seed=2), snapshot)
    later.restore(snapshot)
    assert_states_agree(later, snapshot, 0.0)


def test_a_snapshot_of_another_depth_is_not_restored():
    shallow, deep = (state_of(small_model(["naju"] * depth)) for depth in (1, 2))
    for mine, theirs in ((shallow, deep), (deep, shallow)):
        with pytest.raises(ValueError, match="the snapshot does not fit this state"):
            mine.restore(theirs)


def test_a_recurrent_model_keeps_as_much_after_ten_tokens_as_after_a_thousand():
    model = small_model(["naju", "coupled"], torch.float32)
    by_steps, by_prefill = [], []
    state, tokens = model.init_state(1), sentences(1, 1000)
    with torch.no_grad():
        for count, token in enumerate(tokens.unbind(1), start=1):
            _, state = model.step(token, state)
            if count in (10, 1000):
                by_steps.append(storage_bytes(state))
    for count in (10, 1000):
        by_prefill.append(storage_bytes(model.prefill(tokens[:, :count])[1]))
    assert by_steps[0] == by_steps[1]
    assert by_prefill[0] == by_prefill[1]


def test_a_sequence_is_picked_by_any_integer_and_by_nothing_else():
    state = state_of(small_model(["naju"]))
    assert_states_agree(state[np.int64(1)], state[1], 0.0)
    assert state[np.int64(-1)].batch == 1
    for wrong in (None, ..., (0, 1)):
        with pytest.raises(TypeError, match="indexed by sequence alone"):
            state[wrong]
