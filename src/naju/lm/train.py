"""Training a language model: the loop, its validation, and the one look at the test split."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from naju.lm.batches import Batch, Offsets, Order, read_batch
from naju.lm.config import LanguageRun, Protocol
from naju.lm.distributed import Place, load_full_weights
from naju.lm.folder import load_model
from naju.lm.learner import LanguageLearner, Objective, compile_blocks
from naju.lm.loss import perplexity
from naju.lm.record import BEST, Record
from naju.lm.recorded import RecordedUpdates, records
from naju.lm.token_files import TokenSplit, open_split, read_manifest
from naju.models import LanguageModel
from naju.training import Reporter, Rhythm, StoppedError, seeded_initialisation
from naju.training.checkpoint import Checkpoints
from naju.training.compiled import compiling
from naju.training.finite import NotFiniteError, last_good, naming
from naju.training.loop import SILENT

TRAINING, VALIDATION, TEST = "train", "validation", "test"
Splits = Mapping[str, TokenSplit]


def train_language_model(
    run: LanguageRun,
    folder: Path,
    place: Place,
    reporter: Reporter = SILENT,
    allow: Callable[[], None] = lambda: None,
    validated: Callable[[Mapping[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Begin a run in `folder`, or go on with it, to its end; its result, with test loss where there is a test split.

    On the CPU the outcome, metrics included, is the same bit for bit however often the run was stopped or killed on the
    way. `allow` is called before every checkpoint and may refuse it by raising; `validated` hears every line of metrics
    that has a validation in it.
    """
    splits = _open(run.data)
    reader = Reader(run, place)
    learner = build_learner(run, splits[TRAINING].vocab_size, place)
    folder.mkdir(parents=True, exist_ok=True)
    keep, data = run.execution.keep, run.data
    within = compiling() if run.execution.compile else nullcontext()
    with within, Record(folder, learner, data=data, keep=keep, allow=allow, note=reporter.note) as record:
        with naming(lambda: _last_good(record)):
            speed = Training(run, learner, record, reader, splits, validated).run(reporter)
        _load_best(learner, folder)
        test = reader.loss(learner, splits[TEST]) if TEST in splits else None
        return {**_measured(record, test), **speed.measured(), "parameters": _parameters(learner.model)}


def check_run(run: LanguageRun, place: Place) -> None:
    """Refuse what cannot be trained, before anything is written: once begun, a run's folder is for that run alone."""
    splits = _open(run.data)
    Reader(run, place)
    records(run, place)
    _order(run.protocol, splits[TRAINING])
    for name, split in splits.items():
        if len(split.tokens) < 2:
            raise ValueError(f"the {name} split must have two tokens at least, but has {len(split.tokens)}")
    with torch.device("meta"):
        build_model(run, splits[TRAINING].vocab_size)


def _open(folder: Path) -> Splits:
    """The test split is opened only if there is one; without the others there is no run."""
    there = read_manifest(folder)["splits"]
    return {name: open_split(folder, name) for name in (TRAINING, VALIDATION, TEST) if name != TEST or name in there}


def _order(protocol: Protocol, text: TokenSplit) -> Order:
    return Order(
        len(text.tokens),
        length=protocol.length,
        rows=protocol.rows,
        seed=protocol.seed,
        lanes=protocol.carry_state,
    )


def build_model(run: LanguageRun, vocab_size: int) -> LanguageModel:
    with seeded_initialisation(run.protocol.seed):
        model = LanguageModel(run.model.config(vocab_size))
    if run.protocol.carry_state and any(block.mixer.state_size is None for block in model.backbone.blocks):  # type: ignore[union-attr]
        raise ValueError(f"carry_state must be off with mixer {run.model.mixer!r}, whose state grows with the text")
    return model


def build_learner(run: LanguageRun, vocab_size: int, place: Place) -> LanguageLearner:
    model = build_model(run, vocab_size).to(place.device)
    if run.execution.compile and not records(run, place):  # a graph is recorded of compiled blocks
        compile_blocks(model)
    objective = Objective(model, place)
    return LanguageLearner(objective, run.protocol, bf16=run.execution.uses_bf16(place.device))


class Reader:
    """What this process reads of a split: its rows, and of them its stretch."""

    def __init__(self, run: LanguageRun, place: Place) -> None:
        self.place, self.protocol = place, run.protocol
        if run.protocol.length % place.context_ranks != 0:
            raise ValueError(
                f"length must be a multiple of context_ranks {place.context_ranks}, but is {run.protocol.length}"
            )
        self.stretch = run.protocol.length // place.context_ranks
        self.own = place.share_of(run.protocol.rows)
        most = max(1, run.execution.micro_tokens // self.stretch)
        self.micro_rows = max(n for n in range(1, len(self.own) + 1) if len(self.own) % n == 0 and n <= most)

    @property
    def micro_steps(self) -> int:
        return len(self.own) // self.micro_rows

    def update(self, split: TokenSplit, starts: Offsets) -> Iterator[Batch]:
        """This process's micro-batches of an update."""
        yield from self._batches(split, starts[self.own.start : self.own.stop])

    def loss(self, learner: LanguageLearner, split: TokenSplit) -> float:
        """Mean loss over a whole split in windows, each from the empty state, however the model was trained."""
        starts = np.arange(0, len(split.tokens) - 1, self.protocol.length)
        missing = -len(starts) % (self.place.data_ranks * self.micro_rows)
        beyond = np.full(missing, len(split.tokens))  # nothing counts there, but all processes have as much to do
        portions = np.concatenate([starts, beyond]).reshape(-1, self.place.data_ranks, self.micro_rows)
        mine = portions[:, self.place.data_rank].flatten()
        total, count = learner.summed_loss(self._batches(split, mine))
        return total / count

    def _batches(self, split: TokenSplit, starts: Offsets) -> Iterator[Batch]:
        starts, reset = starts + self.place.context_rank * self.stretch, self.protocol.documents == "reset"
        for part in starts.reshape(-1, self.micro_rows):
            yield read_batch(split, part, self.stretch, reset=reset).to(self.place.device)


@dataclass
class Speed:
    """Tokens and seconds of training, window by window; the first has compilation and memory to set up in it."""

    windows: list[tuple[int, float]] = field(default_factory=list)

    def measured(self) -> dict[str, Any]:
        tokens, seconds = (sum(column) for column in zip((0, 0.0), *self.windows[1:], strict=True))
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
        return {"tokens_per_second": tokens / seconds if seconds else None, "peak_memory_gib": peak}


class Training:
    """The loop, from wherever the learner stands to the last update."""

    def __init__(
        self,
        run: LanguageRun,
        learner: LanguageLearner,
        record: Record,
        reader: Reader,
        splits: Splits,
        validated: Callable[[Mapping[str, Any]], None],
    ) -> None:
        protocol, execution = run.protocol, run.execution
        self.learner, self.record, self.reader, self.last = learner, record, reader, protocol.updates
        self.compiles, self.records = execution.compile, records(run, reader.place)
        self.text, self.validation, self.speed = splits[TRAINING], splits[VALIDATION], Speed()
        self.validated, self.order = validated, _order(protocol, self.text)
        self.rhythm = Rhythm(
            log_every=execution.log_every,
            validate_every=-(-self.last // execution.validations),
            save_seconds=execution.save_seconds,
        )

    def run(self, reporter: Reporter) -> Speed:
        done = int(self.learner.steps_done)
        reporter.begin(done)
        self._since = time.perf_counter()
        update = self._updates(done, reporter.note)
        for step in range(done, self.last):
            if self.order.begins(step):
                self.learner.forget()
            update(self.reader.update(self.text, self.order.starts(step)))
            if self.rhythm.logs(step + 1, self.last):
                reporter.progress(step + 1, self._look(step + 1))
            if step + 1 < self.last and self.reader.place.any(reporter.stop()):
                self.record.save(step + 1)
                raise StoppedError(
                    f"stopped after update {step + 1:,} of {self.last:,}; the same command goes on from there"
                )
        return self.speed

    def _updates(self, done: int, note: Callable[[str], None]) -> Callable[[Iterable[Batch]], None]:
        if not self.records or done == self.last:
            return partial(self.learner.update, count=self.reader.micro_steps)
        first = list(self.reader.update(self.text, self.order.starts(done)))
        return RecordedUpdates(self.learner, first, note, compiles=self.compiles)

    def _look(self, step: int) -> float:
        """What a log point does: a line of metrics, perhaps a validation, a checkpoint and the best model. Returns the
        mean loss since the last."""
        count, per_update = step - self.record.last_logged, self.learner.protocol.tokens_per_update
        loss = self.learner.window().loss / count
        self.speed.windows.append((count * per_update, time.perf_counter() - self._since))
        validates = self.rhythm.validates(step, self.last)
        row = {
            "step": step,
            "tokens": step * per_update,
            "loss": loss,
            "lr": self.learner.rate(step),
            "validation_loss": self._validation_loss(step) if validates else None,
        }
        self.record.log(row)
        self.record.save_if_older(-1 if validates else self.rhythm.save_seconds, step)
        if self.record.best_step == step:
            self.record.save_best()
        if validates:
            self.validated(row)
        self._since = time.perf_counter()
        return loss

    def _validation_loss(self, step: int) -> float:
        """It may be infinite where no training loss was, and could not be the best of any."""
        loss = self.reader.loss(self.learner, self.validation)
        if not math.isfinite(loss):
            raise NotFiniteError(f"the validation loss became {loss} at step {step}; a lower lr may help")
        return loss


def _last_good(record: Record) -> str:
    """The newest of the checkpoints, which are whole as soon as they have a name, on every process."""
    kept = record.checkpoints
    if isinstance(kept, Checkpoints):
        return str(record.place.agree(last_good(kept) if record.place.is_first else None))
    there = kept.found()
    return f"the last good checkpoint is {there[0]}" if there else "there is no checkpoint yet"


def _load_best(learner: LanguageLearner, folder: Path) -> None:
    weights = load_model(folder / BEST).state_dict() if learner.place.is_first else {}
    load_full_weights(learner.model, weights, learner.place)


def _measured(record: Record, test: float | None) -> dict[str, Any]:
    best = next(row for row in record.rows if row["step"] == record.best_step)
    validation = best["validation_loss"]
    return {
        "best_step": best["step"],
        "validation_loss": validation,
        "validation_perplexity": perplexity(validation),
        "test_loss": test,
        "test_perplexity": None if test is None else perplexity(test),
        "seconds": record.seconds,
    }


def _parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
