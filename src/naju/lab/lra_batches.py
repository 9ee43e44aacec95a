"""Batches of sequences that differ in length: like goes with like, padded to one of a few widths."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from naju.tasks.lra import Examples, LraTask
from naju.training import seeded_generator
from naju.training.evaluate import evaluating

BUCKETS = 4  # widths: so many equal parts of the task's length, and their multiples
POOL = 64  # batches whose sequences are sorted by length together; large enough to fill, small enough to mix


class DeviceExamples:
    """Examples on a device, from which rows are gathered and padded there."""

    def __init__(self, task: LraTask, examples: Examples, device: torch.device) -> None:
        self.task, self.width = task, examples.width
        self.values = torch.from_numpy(examples.values).to(device)
        self.starts = torch.from_numpy(examples.starts).to(device)
        self.labels = torch.from_numpy(examples.labels).to(device)

    def gather(self, rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Tokens (b, length), for pairs (b, 2, length), and targets (b,); what is longer is cut off."""
        sequences = rows.unsqueeze(1) * self.width + torch.arange(self.width, device=rows.device)  # (b, 1 or 2)
        places = torch.arange(length, device=rows.device)
        starts = self.starts[sequences]
        cells = (starts.unsqueeze(-1) + places).clamp_max(len(self.values) - 1)
        tokens = self.values[cells].int()
        if self.task.is_padded:
            real = places < (self.starts[sequences + 1] - starts).unsqueeze(-1)
            tokens = torch.where(real, tokens + 1, 0)
        return (tokens if self.task.has_pairs else tokens.squeeze(1)), self.labels[rows]


class BucketedSet:
    """A training set for `fit`; the kind of a batch is its width."""

    def __init__(self, task: LraTask, examples: Examples, *, batch_size: int, seed: int, device: torch.device) -> None:
        if len(examples) < batch_size:
            raise ValueError(f"examples must fill a batch of {batch_size}, but are {len(examples)}")
        self.seed, self.batch_size = seed, batch_size
        self.data = DeviceExamples(task, examples, device)
        self.lengths = torch.from_numpy(examples.lengths)
        self.widths = bucket_widths(task, examples)
        self.order = torch.zeros(len(examples) // batch_size, batch_size, dtype=torch.int64, device=device)
        self._kinds = [0] * len(self.order)

    @property
    def epoch_steps(self) -> int:
        return len(self.order)

    @property
    def kinds(self) -> int:
        return len(self.widths)

    def kind(self, step: int) -> int:
        return self._kinds[(step - 1) % self.epoch_steps]

    def shuffle(self, epoch: int) -> None:
        """The order of one epoch follows from the seed and its number, on every device alike."""
        generator = seeded_generator(self.seed, f"order of epoch {epoch}")
        shuffled = torch.randperm(len(self.lengths), generator=generator)[: self.order.numel()]
        pools = shuffled.split(POOL * self.batch_size)
        batches = torch.cat([pool[self.lengths[pool].argsort(stable=True)] for pool in pools]).view_as(self.order)
        batches = batches[torch.randperm(len(batches), generator=generator)]
        longest = self.lengths[batches].amax(1)
        self._kinds = torch.bucketize(longest, torch.tensor(self.widths)).tolist()
        self.order.copy_(batches)

    def batch(self, steps_done: Tensor, kind: int) -> tuple[Tensor, Tensor]:
        rows = self.order.index_select(0, steps_done % len(self.order)).squeeze(0)
        return self.data.gather(rows, self.widths[kind])


def bucket_widths(task: LraTask, examples: Examples) -> list[int]:
    """Those of the BUCKETS widths that some example needs; sequences of one length need one."""
    if not task.is_padded:
        return [task.length]
    step = -(-task.length // BUCKETS)
    needed = np.maximum(1, -(-examples.lengths // step))
    return [int(min(number * step, task.length)) for number in np.unique(needed)]


@torch.no_grad()
def accuracy(
    model: nn.Module,
    task: LraTask,
    examples: Examples,
    *,
    tokens_at_once: int,
    device: torch.device,
    bf16: bool = False,
    examined: Callable[[float], None] = lambda share: None,
) -> float:
    """The share of right answers, width by width; the model's mode is left as it was. `examined` hears before every
    batch which share of the examples is done."""
    data = DeviceExamples(task, examples, device)
    right = torch.zeros((), dtype=torch.int64, device=device)
    done = 0
    with evaluating(model):
        for rows, width in _portions(task, examples, tokens_at_once):
            examined(done / len(examples))
            tokens, targets = data.gather(rows.to(device), width)
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                logits = model(tokens)
            right += (logits.argmax(-1) == targets).sum()
            done += len(rows)
    return int(right) / len(examples)


def _portions(task: LraTask, examples: Examples, tokens: int) -> Iterator[tuple[Tensor, int]]:
    """All rows once, in portions of so many tokens with their padding, each with its width."""
    widths = bucket_widths(task, examples)
    kinds = torch.bucketize(torch.from_numpy(examples.lengths), torch.tensor(widths))
    for kind, width in enumerate(widths):
        for rows in (kinds == kind).nonzero().squeeze(1).split(max(1, tokens // (width * examples.width))):
            yield rows, width
