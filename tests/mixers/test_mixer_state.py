"""What one can do with a recurrent state: copy, pick, reorder, roll back, and keep in a file."""

from __future__ import annotations

import os
from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from mixer_cases import assert_same_memory, sequence, small_mixer, used_state
from safetensors.torch import save_file

from memories import EXACT, assert_states_agree, difference
from naju import NajuState
from naju.mixers import MIXERS, NajuMixer, State

everywhere = pytest.mark.parametrize("name", MIXERS)


@pytest.fixture
def state():
    return used_state(small_mixer("naju", torch.float32), 4)


@everywhere
def test_fields_cannot_be_replaced(name):
    state = used_state(small_mixer(name), 2)
    for field in fields(state):
        with pytest.raises(FrozenInstanceError):
            setattr(state, field.name, torch.zeros(1))


@everywhere
@pytest.mark.parametrize("copied", [State.clone, State.snapshot], ids=lambda method: method.__name__)
def test_a_copy_shares_no_memory(name, copied):
    state = used_state(small_mixer(name), 2)
    copy = copied(state)
    assert_states_agree(copy, state, 0.0)
    for mine, theirs in zip(copy.tensors().values(), state.tensors().values(), strict=True):
        assert mine.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr()


@everywhere
def test_detaching_cuts_the_graph_and_keeps_the_values(name):
    _, state = small_mixer(name)(sequence(2, 5))
    assert any(tensor.requires_grad for tensor in state.tensors().values())
    cut = state.detach()
    assert not any(tensor.requires_grad for tensor in cut.tensors().values())
    assert_states_agree(cut, state, 0.0)


@everywhere
def test_a_state_moves_between_devices_and_keeps_its_precision(name):
    state = used_state(small_mixer(name), 2)
    assert_states_agree(state.to("cpu"), state, 0.0)
    assert_states_agree(state.to(device=torch.device("cpu"), non_blocking=True), state, 0.0)
    assert all(tensor.is_meta for tensor in state.to("meta").tensors().values())


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.bfloat16,), {}),
        (("cpu", torch.float64), {}),
        ((), {"dtype": torch.float16}),
        ((torch.zeros(1, dtype=torch.float64),), {}),
    ],
    ids=str,
)
def test_a_state_does_not_take_another_precision(state, args, kwargs):
    with pytest.raises(TypeError, match="precision is fixed by the mixer that made it"):
        state.to(*args, **kwargs)


@everywhere
@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (1, [1]),
        (-1, [3]),
        (torch.tensor(2), [2]),
        (slice(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        (torch.tensor([3, 0, 3]), [3, 0, 3]),
        ([2, 1], [2, 1]),
        (torch.tensor([True, False, False, True]), [0, 3]),
    ],
    ids=str,
)
def test_picking_sequences(name, index, rows):
    mixer = small_mixer(name)
    state = used_state(mixer, 4)
    picked = state[index]
    assert picked.batch == len(rows)
    for key, tensor in state.tensors().items():
        assert torch.equal(picked.tensors()[key], tensor[rows]), key
    u = sequence(4, 6, seed=5)
    assert difference(mixer(u[rows], picked)[0], mixer(u, state)[0][rows]) <= EXACT


@pytest.mark.parametrize("index", [4, -5])
def test_a_sequence_that_is_not_there_is_refused(state, index):
    with pytest.raises(IndexError, match=f"state holds 4 sequences, but sequence {index} was asked for"):
        state[index]


def test_a_state_can_be_taken_apart_row_by_row(state):
    rows = list(state)
    assert [row.batch for row in rows] == [1] * 4
    assert torch.equal(torch.cat([row.x for row in rows]), state.x)


@everywhere
def test_beams_are_reordered_with_their_past(name):
    mixer = small_mixer(name)
    past, follow = sequence(3, 5), sequence(4, 4, seed=6)
    order = torch.tensor([2, 0, 0, 1])
    _, state = mixer(past)
    got, after = mixer(follow, state.reorder(order))
    want, memory = mixer(follow, mixer(past[order])[1])
    assert difference(got, want) <= EXACT
    assert_same_memory(mixer, after, memory, EXACT)


@everywhere
def test_going_on_from_a_snapshot_repeats_what_came(name):
    mixer = small_mixer(name)
    _, state = mixer(sequence(2, 5))
    snapshot = state.snapshot()
    assert not any(tensor.requires_grad for tensor in snapshot.tensors().values())
    u = sequence(2, 6, seed=5)
    want, memory = mixer(u, state)
    got, after = mixer(u, snapshot)
    assert torch.equal(got, want)
    assert_states_agree(after, memory, 0.0)


@everywhere
def test_restoring_writes_into_the_same_tensors(name):
    mixer = small_mixer(name)
    if mixer.state_size is None:
        pytest.skip("its state grows, so an earlier one has other shapes")
    snapshot = used_state(mixer, 2).snapshot()
    with torch.no_grad():
        _, state = mixer(sequence(2, 6, seed=5), snapshot)
    addresses = [tensor.data_ptr() for tensor in state.tensors().values()]
    state.restore(snapshot)
    assert_states_agree(state, snapshot, 0.0)
    assert [tensor.data_ptr() for tensor in state.tensors().values()] == addresses


def test_a_snapshot_of_another_shape_is_not_restored(state):
    before = state.clone()
    with pytest.raises(ValueError, match="the snapshot does not fit this state: x differs"):
        state.restore(state[:2].snapshot())
    attention = small_mixer("attention", torch.float32)
    grown = attention(sequence(2, 2, torch.float32), used_state(attention, 2))[1]
    with pytest.raises(ValueError, match="rolled back by using the snapshot itself"):
        grown.restore(used_state(attention, 2))
    assert_states_agree(state, before, 0.0)


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_file_gives_back_every_bit(name, dtype, tmp_path):
    state = used_state(small_mixer(name, dtype), 3)
    path = tmp_path / "stream.safetensors"
    state.save(path)
    assert os.listdir(tmp_path) == [path.name]
    assert_states_agree(type(state).load(path), state, 0.0)
    assert_states_agree(State.load(str(path)), state, 0.0)


@everywhere
def test_a_state_before_the_first_token_can_be_kept_too(name, tmp_path):
    state = small_mixer(name).init_state(2)
    state.save(tmp_path / "state")
    assert_states_agree(State.load(tmp_path / "state"), state, 0.0)


def test_rows_of_a_state_and_a_state_without_tails_can_be_kept(state, tmp_path):
    state[1:3].save(tmp_path / "rows")
    assert_states_agree(NajuState.load(tmp_path / "rows"), state[1:3], 0.0)
    narrow = NajuMixer(8, d_conv=1, d_state=3)(torch.randn(2, 3, 8))[1]
    narrow.save(str(tmp_path / "narrow"))
    assert_states_agree(NajuState.load(tmp_path / "narrow"), narrow.detach(), 0.0)


@everywhere
def test_a_stream_resumes_from_a_file(name, tmp_path):
    mixer = small_mixer(name, torch.float32)
    u = sequence(2, 12, torch.float32)
    _, state = mixer(u[:, :7])
    state.save(tmp_path / "state")
    want, memory = mixer(u[:, 7:], state)
    got, after = mixer(u[:, 7:], State.load(tmp_path / "state"))
    assert torch.equal(got, want)
    assert_states_agree(after, memory, 0.0)


def test_a_truncated_file_is_refused(state, tmp_path):
    path, cut = tmp_path / "whole", tmp_path / "cut"
    state.save(path)
    content = path.read_bytes()
    for kept in range(0, len(content), 97):
        cut.write_bytes(content[:kept])
        with pytest.raises(ValueError, match=r"cut is not a readable safetensors file"):
            NajuState.load(cut)


@pytest.mark.parametrize("seed", range(5))
def test_random_bytes_are_refused(seed, tmp_path):
    path = tmp_path / "noise"
    generator = torch.Generator().manual_seed(seed)
    path.write_bytes(bytes(torch.randint(256, (500,), generator=generator).tolist()))
    with pytest.raises(ValueError, match="noise is not a readable safetensors file"):
        NajuState.load(path)


def test_another_safetensors_file_is_refused(tmp_path):
    save_file({"x": torch.zeros(2)}, tmp_path / "weights")
    with pytest.raises(ValueError, match=r"weights is not a naju state: its format is None"):
        NajuState.load(tmp_path / "weights")


@pytest.mark.parametrize("kind", ["", "[", "7", "null", '{"class": "Unknown", "fields": {}}', '{"class": "NajuState"}'])
def test_a_file_with_a_broken_description_is_refused(state, kind, tmp_path):
    tensors = {name: tensor.contiguous() for name, tensor in state.tensors().items()}
    save_file(tensors, tmp_path / "odd", metadata={"format": "naju-state-1", "kind": kind})
    with pytest.raises(ValueError, match="odd"):
        NajuState.load(tmp_path / "odd")


def test_a_file_without_one_of_the_tensors_is_refused(state, tmp_path):
    kind = '{"class": "NajuState", "fields": {"x": null, "u_tail": null, "h_tail": null}}'
    save_file({"x": state.x}, tmp_path / "part", metadata={"format": "naju-state-1", "kind": kind})
    with pytest.raises(ValueError, match="part does not hold a complete state: 'u_tail'"):
        NajuState.load(tmp_path / "part")


def test_another_kind_of_state_is_refused(tmp_path):
    used_state(small_mixer("attention"), 1).save(tmp_path / "state")
    with pytest.raises(ValueError, match="holds a AttentionState, but a NajuState was expected"):
        NajuState.load(tmp_path / "state")


def test_a_missing_file_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        NajuState.load(tmp_path / "nothing")


def test_saving_into_a_missing_folder_creates_nothing(state, tmp_path):
    with pytest.raises(FileNotFoundError):
        state.save(tmp_path / "missing" / "state")
    assert os.listdir(tmp_path) == []


def test_saving_over_a_folder_leaves_no_partial_file(state, tmp_path):
    (tmp_path / "state").mkdir()
    with pytest.raises(OSError, match="state"):
        state.save(tmp_path / "state")
    assert os.listdir(tmp_path) == ["state"]
    assert os.listdir(tmp_path / "state") == []


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX's")
def test_a_saved_state_is_as_readable_as_any_new_file(state, tmp_path):
    state.save(tmp_path / "state")
    (tmp_path / "other").touch()
    assert (tmp_path / "state").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_write_that_fails_halfway_leaves_the_old_file(state, tmp_path, monkeypatch):
    def full_disk(path, data):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError("no space left on device")

    state.save(tmp_path / "state")
    monkeypatch.setattr("pathlib.Path.write_bytes", full_disk)
    with pytest.raises(OSError, match="no space left"):
        state[:1].save(tmp_path / "state")
    assert os.listdir(tmp_path) == ["state"]
    assert_states_agree(NajuState.load(tmp_path / "state"), state, 0.0)
