"""Whether a module does what its class says and nothing else, so that a kernel may do it instead."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_only_a_matrix(module: nn.Module) -> bool:
    """True of a linear layer, or of none, to which nobody has added anything: no adapter in its place, no bias, hook
    or other forward, and no weight that has its own way to multiply, as a quantised one has."""
    if type(module) not in (nn.Linear, nn.Identity) or is_watched(module):
        return False
    return type(module) is nn.Identity or (module.bias is None and not is_traceable_wrapper_subclass(module.weight))


def is_watched(module: nn.Module) -> bool:
    """Whether somebody has to see every call of it: by a hook, which old-style weight norms and pruning masks are, too,
    or by another forward in place of its class's, as accelerate has."""
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(own or "forward" in module.__dict__ or torch_module._has_any_global_hook())
