"""What ends a training whose loss or gradients are no longer finite, before the update that would spoil its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from naju.training.checkpoint import Checkpoints, read_checkpoint


class NotFiniteError(FloatingPointError):
    """Its first argument says what was not finite and at which step, and is the same however often a run was resumed;
    where there are checkpoints, the second names the last good one."""

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


class Watch:
    """Looks at every loss and every gradient without waiting for the device: only `check` reads what was found.

    `first` holds the step at which something was first not finite, in the places of all that was not at that step: the
    loss, then the parameters in their order; 0 elsewhere.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
        self.parameters = dict(parameters)
        self.first = torch.zeros(1 + len(parameters), dtype=torch.int64, device=device)

    def look(self, step: Tensor, loss: Tensor) -> Tensor:
        """With all gradients of this step there; returns their norm. A norm beyond the dtype's range counts as
        infinite."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters.values()]
        norms = _norms(gradients)
        total: Tensor = torch.linalg.vector_norm(norms)
        bad = ~torch.cat([loss.isfinite().reshape(1), norms.isfinite()])
        self.first.copy_(torch.where(bad & ~self.first.any(), step, self.first))
        return total

    def found(self) -> Tensor:
        """1.0 from the first step that was not finite, else 0.0: what makes a fused optimizer leave all as it is."""
        return self.first.any().float()

    def check(self) -> None:
        step = int(self.first.max())
        if step == 0:
            return
        loss, *gradients = self.first.tolist()
        what = self._at_loss() if loss else f"the gradient of {_named(self._names(gradients))}"
        raise NotFiniteError(f"{what} became infinite or NaN at step {step}; a lower lr or a tighter clip may help")

    def _at_loss(self) -> str:
        """A loss may be so because a weight is."""
        weights = (~_norms([parameter.detach() for parameter in self.parameters.values()]).isfinite()).tolist()
        return f"the loss and the weight {_named(self._names(weights))}" if any(weights) else "the loss"

    def _names(self, chosen: Sequence[float]) -> list[str]:
        return [name for name, it_is in zip(self.parameters, chosen, strict=True) if it_is]


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of each, also of tensors that are sharded over several processes."""
    norms = torch.stack(torch._foreach_norm(list(tensors)))
    return norms.full_tensor() if hasattr(norms, "full_tensor") else norms


def _named(names: Sequence[str]) -> str:
    """The last is the nearest to the loss, from where gradients come."""
    others = "" if len(names) == 1 else f" (and {len(names) - 1} more)"
    return f"{names[-1]}{others}"


@contextmanager
def naming(last_good: Callable[[], str]) -> Iterator[None]:
    """Inside, an error about what is not finite also says which checkpoint is the last good one."""
    try:
        yield
    except NotFiniteError as error:
        raise NotFiniteError(error.args[0], last_good()) from None


def last_good(checkpoints: Checkpoints) -> str:
    """The newest checkpoint that can be read, in words."""
    for path in checkpoints.paths:
        with suppress(OSError, ValueError):
            return f"the last good checkpoint is {path}, of step {read_checkpoint(path).facts['step']}"
    return "there is no checkpoint yet"
