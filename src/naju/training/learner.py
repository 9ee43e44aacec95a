"""A model and its optimizer, one step at a time, all of it on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from naju.training.config import TrainConfig
from naju.training.finite import Watch
from naju.training.optimizer import everything, is_matrix, parameter_groups
from naju.training.questions import right_answers
from naju.training.schedule import cosine_with_warmup


class Window(NamedTuple):
    """Sums over the steps since the last look."""

    loss: float
    correct: float


class Learner:
    """`learn` waits for nothing and branches on no value, so that it can also be recorded once as a CUDA graph and
    replayed: learning rates come from a table on the device at the place where `steps_done` points, and losses and
    right answers add up there until `window` fetches them. From the first loss or gradient that is not finite on, steps
    change no weight, and the next look is an error.

    `factor` gives the factor on the learning rate at step 0, 1, …; by default the config's warm-up and cosine.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, factor: Callable[[int], float] | None = None) -> None:
        self.model, self.config = model, config
        self.factor = factor or (lambda step: cosine_with_warmup(step, config.steps, config.warmup_ratio))
        self.device = next(model.parameters()).device
        self.optimizer = torch.optim.AdamW(
            self._groups(),
            fused=True,
            capturable=self.device.type == "cuda",
        )
        self._rates = self._rates_on_device()
        self._create_moments()
        self.steps_done = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._loss, self._correct = (torch.zeros(1, dtype=torch.float64, device=self.device) for _ in range(2))
        learned = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._watch = Watch(learned, self.device)

    def _groups(self) -> list[dict[str, Any]]:
        config = self.config
        decays = everything if config.decay_all else is_matrix
        return parameter_groups(self.model, lr=config.lr, weight_decay=config.weight_decay, decays=decays)

    def _rates_on_device(self) -> list[tuple[Tensor, Tensor]]:
        """For each parameter group its rate, a tensor from now on, and the rates of all steps to copy from."""
        factors = [self.factor(step) for step in range(self.config.steps)]
        dtype = torch.float64 if self.device.type == "cpu" else torch.float32  # what the fused kernels read
        rates = []
        for group in self.optimizer.param_groups:
            table = torch.tensor([group["lr"] * factor for factor in factors], dtype=dtype, device=self.device)
            group["lr"] = torch.zeros((), dtype=dtype, device=self.device)
            rates.append((group["lr"], table))
        return rates

    def _create_moments(self) -> None:
        """A step at rate 0 with gradients of 0 makes AdamW create its state and changes nothing; its count goes back
        to 0. From then on everything that training changes exists and keeps its address."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for moments in self.optimizer.state.values():
            moments["step"].zero_()

    def learn(self, *batch: Tensor) -> Tensor:
        """One step on one batch, the model's inputs and last the targets; the loss before it, on the device."""
        *inputs, targets = batch
        self._begin_step()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.bf16):
            logits = self.model(*inputs)
        loss = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())
        loss.backward()
        self._end_step(loss.detach(), right_answers(logits.detach(), targets).sum())
        return loss.detach()

    def _begin_step(self) -> None:
        for rate, table in self._rates:
            rate.copy_(table.index_select(0, self.steps_done).squeeze(0))
        self.optimizer.zero_grad(set_to_none=True)

    def _end_step(self, loss: Tensor, correct: Tensor | float) -> None:
        """With all gradients there."""
        self.steps_done += 1
        norm = self._watch.look(self.steps_done, loss)
        if self.config.clip is not None:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self.config.clip, norm)
        self.optimizer.found_inf = self._watch.found()  # type: ignore[attr-defined]
        self.optimizer.step()
        self._loss += loss
        self._correct += correct

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 1, for parameters that are stored as they act."""
        return self.config.lr * self.factor(step - 1)

    def window(self) -> Window:
        """Waits for the device, and begins a new window; what was not finite is an error that names it and its step."""
        self.check_finite()
        window = Window(*torch.cat([self._loss, self._correct]).tolist())
        self._loss.zero_()
        self._correct.zero_()
        return window

    def check_finite(self) -> None:
        self._watch.check()

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a step changes, by name: to be saved, or copied into."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        model = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        moments = {
            f"optimizer.{kind}.{names[parameter]}": tensor
            for parameter, state in self.optimizer.state.items()
            for kind, tensor in state.items()
        }
        loop = {
            "steps_done": self.steps_done,
            "loss": self._loss,
            "correct": self._correct,
            "broken": self._watch.first,
        }
        return {**model, **moments, **{f"loop.{name}": tensor for name, tensor in loop.items()}}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies into the tensors that are there, so that a recorded graph goes on from them."""
        own = self.tensors()
        strangers = sorted(set(own) ^ set(tensors))
        if strangers:
            raise ValueError(
                f"tensors do not belong to this model and optimizer; the first that differs: {strangers[0]}"
            )
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
