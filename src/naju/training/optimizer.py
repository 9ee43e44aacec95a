"""AdamW parameter groups, with what the gate reparameterisation asks of the optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn

from naju.layers.gate import GateLogit


def parameter_groups(model: nn.Module, *, lr: float, weight_decay: float, eps: float = 1e-8) -> list[dict[str, Any]]:
    """Groups for `torch.optim.AdamW` in which a reparameterised gate learns exactly as the plain one would.

    A parameter that is stored s times larger than it acts gets `lr * s`, `weight_decay / s` and `eps / s`: its step,
    its decay and Adam's noise floor are then s, 1 and 1/s times the plain ones, as its value and its gradient are.
    Clipping by the global gradient norm still sees the smaller gradients and so remains the one difference.
    """
    scales: dict[int, float] = {}
    for module in model.modules():
        if isinstance(module, GateLogit) and module.scale != 1.0:
            scales.update({id(parameter): module.scale for parameter in module.scaled_parameters()})
    groups: dict[float, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault(scales.get(id(parameter), 1.0), []).append(parameter)
    return [
        {"params": parameters, "lr": lr * scale, "weight_decay": weight_decay / scale, "eps": eps / scale}
        for scale, parameters in sorted(groups.items())
    ]
