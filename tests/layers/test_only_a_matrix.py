"""What kernels may take for its weight alone, and that a mixer hands them nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, prune
from torch.testing._internal.two_tensor import TwoTensor

from naju.layers.only_a_matrix import is_only_a_matrix
from numerics import TOLERANCE, relative_rms
from step_cases import draw

Change = Callable[[nn.Module, str], object]


def linear(module: nn.Module, name: str) -> nn.Linear:
    found = module.get_submodule(name)
    assert isinstance(found, nn.Linear)
    return found


def replace(module: nn.Module, name: str, by: nn.Module) -> None:
    owner, _, last = name.rpartition(".")
    setattr(module.get_submodule(owner), last, by)


def with_a_bias(module: nn.Module, name: str) -> None:
    old = linear(module, name)
    replace(module, name, nn.Linear(old.in_features, old.out_features))


def with_another_forward(module: nn.Module, name: str) -> None:
    part = linear(module, name)
    before = part.forward
    part.forward = lambda h: 3 * before(h)  # type: ignore[method-assign]


def pruned_and_trained_on(module: nn.Module, name: str) -> None:
    """The mask is applied to the new weight when the module is called."""
    part = linear(module, name)
    prune.l1_unstructured(part, "weight", 0.5)
    part.get_parameter("weight_orig").data.mul_(-2)


class Doubled(Tensor):
    """A weight that has its own way to multiply."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * result.as_subclass(Tensor) if func is nn.functional.linear else result


def with_a_weight_of_its_own_kind(module: nn.Module, name: str) -> None:
    part = linear(module, name)
    part.weight = nn.Parameter(part.weight.detach().as_subclass(Doubled))


CHANGES: dict[str, Change] = {
    "hook": lambda module, name: linear(module, name).register_forward_hook(lambda _, __, out: 2 * out),
    "hook before": lambda module, name: linear(module, name).register_forward_pre_hook(lambda _, h: (3 * h[0],)),
    "bias": with_a_bias,
    "forward": with_another_forward,
    "pruning": pruned_and_trained_on,
    "parametrization": lambda module, name: parametrizations.spectral_norm(linear(module, name)),
    "module": lambda module, name: replace(module, name, nn.Sequential(linear(module, name), nn.ReLU())),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_linear_layer_to_which_something_was_added_is_more_than_its_matrix(change: Change) -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False))
    assert is_only_a_matrix(module[0])
    change(module, "0")
    assert not is_only_a_matrix(module[0])


def test_gradients_that_are_watched_and_weights_that_wrap_others() -> None:
    watched, wraps = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    watched.register_full_backward_hook(lambda *_: None)
    weight = wraps.weight.detach()
    wraps.weight = nn.Parameter(TwoTensor(weight, weight.clone()))
    assert not is_only_a_matrix(watched)
    assert not is_only_a_matrix(wraps)


def test_hooks_on_all_modules_are_seen() -> None:
    handle = register_module_forward_hook(lambda *_: None)
    try:
        assert not is_only_a_matrix(nn.Identity())
    finally:
        handle.remove()
    assert is_only_a_matrix(nn.Identity())


@pytest.mark.parametrize("change", [*CHANGES.values(), with_a_weight_of_its_own_kind], ids=[*CHANGES, "weight"])
@pytest.mark.parametrize("part", ["project_BC", "write.weight"])
@pytest.mark.parametrize("name", ["naju", "coupled"])
def test_a_step_does_what_was_added_to_a_projection(name: str, part: str, change: Change) -> None:
    mixer, _, before = draw(name, 2, d_state=5)
    u = torch.randn(2, 6, 12)
    with torch.no_grad():
        plain, _ = mixer(u, before)
        change(mixer.eval(), part)
        whole, _ = mixer(u, before)
        state, outs = before, []
        for token in u.unbind(1):
            out, state = mixer.step(token, state)
            outs.append(out)
    assert relative_rms(whole, plain) > 1e-3
    assert relative_rms(torch.stack(outs, dim=1), whole) <= TOLERANCE[torch.float32, "law"]


@pytest.mark.parametrize("part", ["project_in", "project_BC", "write.weight"])
def test_a_projection_of_another_size_is_refused_before_anything_is_read_by_its_address(part: str) -> None:
    mixer, u, state = draw("naju", 2, d_state=5)
    old = linear(mixer, part)
    replace(mixer, part, nn.Linear(old.in_features, old.out_features - 2, bias=False))
    with torch.no_grad():
        with pytest.raises(ValueError, match="must have shape"):
            mixer(u.unsqueeze(1), state)
        with pytest.raises((ValueError, RuntimeError), match=r"shape|size"):
            mixer.step(u, state)


@pytest.mark.parametrize("name", ["D", "conv.weight", "conv.bias", "forget.conv.weight", "write.bias"])
def test_a_parameter_of_another_size_is_refused_before_it_is_read_by_its_address(name: str) -> None:
    mixer, u, state = draw("naju", 2, d_state=5)
    owner, _, last = name.rpartition(".")
    setattr(mixer.get_submodule(owner), last, nn.Parameter(mixer.get_parameter(name)[:3].detach()))
    with torch.no_grad():
        with pytest.raises(ValueError, match="must have shape"):
            mixer(u.unsqueeze(1), state)
        with pytest.raises((ValueError, RuntimeError), match=r"shape|size"):
            mixer.step(u, state)
