"""Where a process stands among others: data parallel (DDP), sharded (FSDP2), or sharing one sequence.

Run alone, a process is a world of one. Under `torchrun` the environment says the rest, and the command is the same:

    1 GPU     naju lm train --data DIR --out RUN …
    8 GPUs    torchrun --nproc-per-node 8 -m naju.cli lm train --data DIR --out RUN …
    64 GPUs   on each of 8 machines: torchrun --nnodes 8 --nproc-per-node 8 --rdzv-backend c10d
              --rdzv-endpoint HOST:29500 -m naju.cli lm train --data DIR --out RUN
              --tokens-per-update 524288 --parallel fsdp …

The data folder has to be there on every machine, and with `fsdp` the run's folder has to be one that all of them share.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from naju.lm.config import Execution


@dataclass(frozen=True)
class Place:
    """One process of `world`; those of one sequence are neighbours. `kind` is alone, ddp, fsdp or context."""

    device: torch.device
    rank: int = 0
    world: int = 1
    kind: str = "alone"
    context_ranks: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        return self.rank // self.context_ranks

    @property
    def data_ranks(self) -> int:
        return self.world // self.context_ranks

    @property
    def context_rank(self) -> int:
        return self.rank % self.context_ranks

    def context_neighbour(self, step: int) -> int | None:
        """The process that has the next stretch of this one's sequences, or with -1 the one before; None at the end."""
        return self.rank + step if 0 <= self.context_rank + step < self.context_ranks else None

    def share_of(self, rows: int) -> range:
        """The rows of an update that this process reads."""
        if rows % self.data_ranks != 0:
            raise ValueError(
                f"an update must have a multiple of {self.data_ranks} sequences for as many processes, but has {rows}"
            )
        share = rows // self.data_ranks
        return range(self.data_rank * share, (self.data_rank + 1) * share)

    def wrap(self, objective: nn.Module) -> nn.Module:
        """The module to call for a loss, in place of the one given."""
        if self.kind == "ddp":
            return DistributedDataParallel(objective)
        if self.kind == "fsdp":
            shard(objective, self.device)
        return objective

    def accumulate_only(self, objective: nn.Module, more: bool) -> None:
        """Whether the gradients of the next backward pass stay here because more will be added to them."""
        if isinstance(objective, DistributedDataParallel):
            objective.require_backward_grad_sync = not more
        elif isinstance(objective, FSDPModule):
            objective.set_requires_gradient_sync(not more)

    def end_reading(self, objective: nn.Module) -> None:
        """After forward passes without backward ones: FSDP would leave the outermost weights gathered."""
        if isinstance(objective, FSDPModule):
            objective.reshard()

    def finish_gradients(self, model: nn.Module) -> None:
        """Average what nobody has averaged yet: with context parallelism, messages between neighbours and reductions
        among all would cross if these began during the backward pass."""
        if self.kind != "context":
            return
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, mean in zip(gradients, (flat / self.world).split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def sum(self, tensor: Tensor) -> Tensor:
        """Over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, mine: bool) -> bool:
        """Whether it is so on any process: decided on the CPU, so that nobody waits for a GPU."""
        return bool(self.sum(torch.tensor(int(mine))))

    def all_rows(self, own: Tensor) -> Tensor:
        """Rows of every process's share, in the order of the update."""
        if self.world == 1:
            return own
        parts = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts[:: self.context_ranks])

    def spread(self, tensors: dict[str, Tensor]) -> None:
        """What the first process has becomes what all have."""
        if self.world > 1:
            for tensor in tensors.values():
                dist.broadcast(tensor, 0)

    def agree(self, value: Any) -> Any:
        """The first process's object, on all."""
        held = [value]
        if self.world > 1:
            dist.broadcast_object_list(held, 0, device=torch.device("cpu"))
        return held[0]

    def wait_for_all(self) -> None:
        self.any(False)


def shard(objective: nn.Module, device: torch.device) -> None:
    """FSDP2: every block is gathered when it is its turn, the embedding and the rest with the whole."""
    # Tails in states are views of outputs; nothing writes to them.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(\w+\) returned a view tensor", UserWarning)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in objective.model.backbone.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(objective, mesh=mesh)


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """The whole model on the CPU of the first process, also of one that is sharded; every process has to ask."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))  # type: ignore[return-value]


def load_full_weights(model: nn.Module, weights: dict[str, Tensor], place: Place) -> None:
    """Put the first process's `weights` into the model on all."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=place.world > 1)
    set_model_state_dict(model, dict(weights), options=options)


@contextmanager
def joined(execution: Execution) -> Iterator[Place]:
    """This process's place while inside; a process group that is there already is used and left alone."""
    device = execution.chosen_device(int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    begun = not dist.is_initialized() and _begin_group(execution, device)
    try:
        yield _place(execution, device)
    finally:
        if begun:
            dist.destroy_process_group()


@contextmanager
def clear_about_lost_processes(place: Place) -> Iterator[None]:
    """Where one process of several dies, the next message of the others fails: inside, that is a ConnectionError."""
    try:
        yield
    except RuntimeError as error:
        if place.world == 1 or not (isinstance(error, dist.DistError) or "gloo/" in str(error)):
            raise
        raise ConnectionError(
            f"process {place.rank} of {place.world} cannot reach another one, which may have died "
            f"({str(error).splitlines()[0]}); the same command goes on from the last checkpoint"
        ) from error


def _begin_group(execution: Execution, device: torch.device) -> bool:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(backend)
    elif execution.parallel == "fsdp":
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    else:
        return False
    return True


def _place(execution: Execution, device: torch.device) -> Place:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    context = execution.context_ranks
    if world % context != 0:
        raise ValueError(f"context_ranks must divide the {world} processes, but is {context}")
    kind = "context" if context > 1 else execution.parallel
    return Place(device, rank, world, "alone" if world == 1 and kind == "ddp" else kind, context)
