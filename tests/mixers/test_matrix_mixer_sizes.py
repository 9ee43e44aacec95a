"""State sizes and parameter counts of the matrix memories beside those the paper prints for its diagnostic suite."""

from __future__ import annotations

import pytest
import torch

from naju.mixers import build_mixer

D_MODEL, LAYERS = 128, 4
# The paper's counts fit the smaller tasks' vocabulary (11 special tokens, 64 entities, 16 values) and a hidden layer in
# the head: embedding, five norms, and two linear maps with biases.
AROUND = 91 * D_MODEL + (LAYERS + 1) * D_MODEL + (D_MODEL + 1) * D_MODEL + (D_MODEL + 1) * 16
# State/layer, parameters of one layer, millions of parameters as printed.
PRINTED = {
    "mamba2": (16_384, 117_388, 0.50),
    "gla": (2_048, 68_704, 0.31),
    "rwkv": (2_048, 119_936, 0.51),
    "retnet": (8_192, 131_136, 0.56),
    "mlstm": (16_384, 109_320, 0.46),
}


@pytest.fixture(params=PRINTED)
def sizes(request):
    with torch.device("meta"):
        mixer = build_mixer(request.param, D_MODEL)
    return mixer, *PRINTED[request.param]


def count(mixer):
    return sum(parameter.numel() for parameter in mixer.parameters())


def test_the_memory_is_as_large_as_printed(sizes):
    mixer, state_size, _, _ = sizes
    assert mixer.state_size == state_size


def test_the_parameters_are_within_two_percent_of_the_print(sizes):
    mixer, _, layer, millions = sizes
    assert count(mixer) == layer
    assert LAYERS * layer + AROUND == pytest.approx(1e6 * millions, rel=0.02)


@pytest.mark.parametrize(("d_model", "millions"), [(256, 2.6), (512, 9.9), (1024, 38.8)])
def test_mamba2_has_the_size_of_the_language_models(d_model, millions):
    with torch.device("meta"):
        mixer = build_mixer("mamba2", d_model)
    assert round(6 * (count(mixer) + d_model) / 1e6, 1) == millions


def test_the_recall_task_has_the_same_mlstm():
    with torch.device("meta"):
        assert build_mixer("mlstm", 256).state_size == 65_536


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gla", {"n_heads": 3}, r"expand_k \* d_model must be a positive multiple of n_heads = 3, but is 64"),
        ("rwkv", {"expand_v": 0.51}, r"expand_v \* d_model must be a positive multiple of n_heads = 4, but is 65\.28"),
        (
            "retnet",
            {"n_heads": 128},
            r"expand_k \* d_model / 2 must be a positive multiple of n_heads = 128, but is 64",
        ),
        ("mlstm", {"n_heads": 0}, r"expand \* d_model must be a positive multiple of n_heads = 0, but is 256"),
        ("mlstm", {"qkv_block": 5}, r"qkv_block must divide expand \* d_model = 256"),
        (
            "mamba2",
            {"d_head": 60},
            r"multiple of d_head, and d_state and d_conv positive, but they are 256, 60, 64 and 4",
        ),
        ("mamba2", {"d_state": 0}, r"but they are 256, 64, 0 and 4"),
        ("rwkv", {"shift_rank": 0}, r"shift_rank and decay_rank must be positive, but are 0 and 64"),
        ("rwkv", {"decay_rank": -1}, r"shift_rank and decay_rank must be positive, but are 32 and -1"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        build_mixer(name, D_MODEL, **options)


@pytest.mark.parametrize(
    ("name", "other", "tensor"),
    [
        ("gla", {"expand_v": 0.5}, "x"),
        ("retnet", {"expand_k": 0.5}, "x"),
        ("rwkv", {"n_heads": 2}, "x"),
        ("mlstm", {"n_heads": 2}, "C"),
        ("mlstm", {"d_conv": 2}, "tail"),
        ("mamba2", {"d_conv": 6}, "tail"),
    ],
)
def test_a_state_of_another_mixer_is_refused(name, other, tensor):
    state = build_mixer(name, 16, **other).init_state(2)
    with pytest.raises(ValueError, match=f"state does not fit this mixer: {tensor} must have shape"):
        build_mixer(name, 16)(torch.randn(2, 5, 16), state)
