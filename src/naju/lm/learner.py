"""A language model, its loss and its optimizer, an update of several micro-batches at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from naju.lm.batches import Batch, Packing
from naju.lm.config import Protocol
from naju.lm.context_parallel import read_stretch
from naju.lm.distributed import Place
from naju.lm.loss import chunked_cross_entropy
from naju.models import LanguageModel
from naju.models.backbone import ModelState
from naju.training import Learner


class Objective(nn.Module):
    """The model and its loss as one module. DDP and FSDP wrap this, so that both uses of a tied embedding lie inside.

    `empty` is the state before the first token of one sequence, made while the weights are still plain tensors.
    """

    def __init__(self, model: LanguageModel, place: Place) -> None:
        super().__init__()
        self.model, self.place = model, place
        self.empty = model.init_state(1)

    def forward(
        self, tokens: Tensor, targets: Tensor, state: ModelState | None, packing: Packing | None, divisor: float
    ) -> tuple[Tensor, ModelState | None]:
        """The summed loss of tokens and targets (b, l) divided by `divisor`, and the state after each row."""
        features, after = self._read(tokens, state, packing)
        weight = self.model.backbone.embedding.weight if self.model.head is None else self.model.head.weight
        features = features.view(*tokens.shape, -1)
        return chunked_cross_entropy(features, weight, targets, divisor=divisor), after

    def _read(
        self, tokens: Tensor, state: ModelState | None, packing: Packing | None
    ) -> tuple[Tensor, ModelState | None]:
        if self.place.context_ranks > 1:
            return read_stretch(self.model.backbone, tokens, packing, self.empty, self.place), None
        if packing is None:
            return self.model.backbone(tokens, state)  # type: ignore[no-any-return]
        opened = None if state is None else packing.open(state, self.empty)
        features, after = self.model.backbone(tokens.reshape(1, -1), opened, None, packing.cu_seqlens)
        return features, packing.close(after)


class LanguageLearner(Learner):
    """Updates by gradient accumulation, on one process or many; with `carry_state` each row's state goes on from one
    update to the next."""

    def __init__(self, objective: Objective, protocol: Protocol, *, bf16: bool) -> None:
        self.protocol, self.place = protocol, objective.place
        self.objective = self.place.wrap(objective)
        super().__init__(objective.model, protocol.training(bf16=bf16))
        self.own_rows = self.place.share_of(protocol.rows)
        rows = len(self.own_rows)
        self._empty = objective.empty.map(lambda t: t.expand(rows, *t.shape[1:]))
        self.carried = self._empty.clone() if protocol.carry_state else None

    def _groups(self) -> list[dict[str, Any]]:
        return [{**group, "betas": self.protocol.betas} for group in super()._groups()]

    def forget(self) -> None:
        """Empties the carried states, where there are any."""
        if self.carried is not None:
            self.carried.restore(self._empty)

    def update(self, batches: Iterable[Batch], count: int) -> None:
        """One step on the `count` micro-batches of this process."""
        self._begin_step()
        # Gradients of the processes are averaged, not added.
        divisor = self.protocol.tokens_per_update / self.place.world
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for place, batch in enumerate(batches):
            self.place.accumulate_only(self.objective, place + 1 < count)
            total += self._micro_step(batch, place, divisor)
        self.place.finish_gradients(self.model)
        self._end_step(self.place.sum(total) / self.place.world, 0)

    def _micro_step(self, batch: Batch, place: int, divisor: float) -> Tensor:
        rows = slice(place * len(batch.tokens), (place + 1) * len(batch.tokens))
        carried = None if self.carried is None else self.carried[rows]
        loss, after = self._loss_of(batch, carried, divisor)
        loss.backward()
        if carried is not None and after is not None:
            carried.restore(after.detach())
        return loss.detach()

    def _loss_of(self, batch: Batch, state: ModelState | None, divisor: float) -> tuple[Tensor, ModelState | None]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.bf16):
            return self.objective(batch.tokens, batch.targets, state, batch.packing, divisor)  # type: ignore[no-any-return]

    @torch.no_grad()
    def summed_loss(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """Loss and number of targets of all processes' batches, each row read from the empty state."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.objective.eval()
        for batch in batches:
            loss, _ = self._loss_of(batch, None, 1.0)
            sums += torch.stack([loss.double(), (batch.targets >= 0).sum().double()])
        self.objective.train()
        self.place.end_reading(self.objective)
        loss_sum, count = self.place.sum(sums).tolist()
        return loss_sum, int(count)

    def tensors(self) -> dict[str, Tensor]:
        """The carried states are those of all processes."""
        carried = {} if self.carried is None else self.carried.tensors()
        return {**super().tensors(), **{f"carried.{name}": self.place.all_rows(t) for name, t in carried.items()}}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        super().restore(tensors)
        if self.carried is not None:
            for name, tensor in self.carried.tensors().items():
                tensor.copy_(tensors[f"carried.{name}"][self.own_rows.start : self.own_rows.stop])


def compile_blocks(model: LanguageModel) -> None:
    """Block by block: equal blocks share their code, and it lies within what FSDP and context parallelism wrap."""
    for block in model.backbone.blocks:
        block.compile()
