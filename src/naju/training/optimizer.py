"""AdamW parameter groups, with what the gate reparameterisation asks of the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from naju.layers.gate import GateLogit


def everything(name: str, parameter: nn.Parameter) -> bool:
    return True


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Not biases, D and norms, also those that a head has of its own, nor what has no neutral zero: A_log of Mamba, the
    shares of mixed tokens and the bonus of RWKV."""
    *_, owner, own = ("", *name.split("."))
    return parameter.dim() > 1 and owner != "norm" and own not in ("bias", "A_log", "mix", "bonus")


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    eps: float = 1e-8,
    decays: Callable[[str, nn.Parameter], bool] = everything,
) -> list[dict[str, Any]]:
    """Groups for `torch.optim.AdamW` in which a reparameterised gate learns exactly as the plain one would.

    A parameter that is stored s times larger than it acts gets `lr * s`, `weight_decay / s` and `eps / s`: its step,
    its decay and Adam's noise floor are then s, 1 and 1/s times the plain ones, as its value and its gradient are.
    Clipping by the global gradient norm still sees the smaller gradients and so remains the one difference. `decays`
    says of a parameter and its name whether it has weight decay at all.
    """
    scales: dict[int, float] = {}
    for module in model.modules():
        if isinstance(module, GateLogit) and module.scale != 1.0:
            scales.update({id(parameter): module.scale for parameter in module.scaled_parameters()})
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            key = scales.get(id(parameter), 1.0), decays(name, parameter)
            groups.setdefault(key, []).append(parameter)
    return [
        {"params": parameters, "lr": lr * scale, "weight_decay": has_decay * weight_decay / scale, "eps": eps / scale}
        for (scale, has_decay), parameters in sorted(groups.items())
    ]
