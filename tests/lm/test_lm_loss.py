"""The chunked cross-entropy against torch's, value and gradients."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from naju.lm.loss import IGNORED, chunked_cross_entropy


def inputs(dtype=torch.float32, tokens=37, vocabulary=101, width=12):
    features = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    return features, weight, torch.randint(vocabulary, (tokens,))


def value_and_gradients(loss, *tensors):
    return loss.detach(), *torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("chunk", [1, 8, 37, 1000, None])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_it_equals_torch_for_every_chunk(chunk, dtype, tolerance):
    features, weight, targets = inputs(dtype)
    targets[5:9] = IGNORED
    got = value_and_gradients(chunked_cross_entropy(features, weight, targets, chunk=chunk), features, weight)
    want = value_and_gradients(F.cross_entropy(features @ weight.T, targets), features, weight)
    for one, other in zip(got, want, strict=True):
        assert (one - other).abs().max() <= tolerance * max(1, other.abs().max())


def test_axes_are_the_features_and_a_divisor_replaces_the_count():
    features, weight, targets = inputs(tokens=24)
    flat = chunked_cross_entropy(features, weight, targets, divisor=48.0)
    folded = chunked_cross_entropy(features.view(2, 12, -1), weight, targets.view(2, 12))
    torch.testing.assert_close(2 * flat, folded)


def test_the_gradient_is_scaled_by_what_comes_after():
    features, weight, targets = inputs()
    loss = chunked_cross_entropy(features, weight, targets)
    thrice = torch.autograd.grad(3 * loss, (features, weight), retain_graph=True)
    for one, other in zip(thrice, torch.autograd.grad(loss, (features, weight)), strict=True):
        torch.testing.assert_close(one, 3 * other)


def test_large_logits_neither_overflow_nor_lose_the_loss():
    features, weight, targets = inputs()
    loss = chunked_cross_entropy(1e3 * features, weight, targets)
    torch.testing.assert_close(loss, F.cross_entropy(1e3 * features @ weight.T, targets))


def test_autocast_rounds_products_but_not_sums():
    """The gradient of a weight over many chunks: bfloat16 sums would lose a tenth of it."""
    features, weight, targets = inputs(tokens=4096, vocabulary=7)
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_cross_entropy(features, weight, targets, chunk=16)
    got = value_and_gradients(loss, features, weight)
    want = value_and_gradients(F.cross_entropy(features @ weight.T, targets), features, weight)
    assert got[0].dtype == torch.float32
    assert got[2].dtype == torch.float32
    for one, other in zip(got, want, strict=True):
        assert (one - other).norm() <= 2e-2 * other.norm()


def test_without_gradients_none_are_computed():
    features, weight, targets = inputs()
    with torch.no_grad():
        loss = chunked_cross_entropy(features, weight, targets)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, F.cross_entropy(features @ weight.T, targets).detach())


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.found = max(self.found, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)), 0)
        return out


def test_no_tensor_is_as_large_as_all_logits():
    features, weight, targets = inputs(tokens=64, vocabulary=500)
    with Largest() as ours:
        chunked_cross_entropy(features, weight, targets, chunk=4).backward()
    with Largest() as plain:
        F.cross_entropy(features @ weight.T, targets).backward()
    assert plain.found == 64 * 500
    assert ours.found == 12 * 500  # the weight and its gradient


def test_shapes_that_do_not_fit_are_refused():
    features, weight, targets = inputs()
    with pytest.raises(ValueError, match=r"targets must have shape \(37,\), but have \(36,\)"):
        chunked_cross_entropy(features, weight, targets[:-1])
    with pytest.raises(ValueError, match="chunk must be a positive integer or None, but is 0"):
        chunked_cross_entropy(features, weight, targets, chunk=0)
