"""`naju lm train`: a language-model run in a folder of its own, on one process or many, stopped and resumed at will."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from naju.lab.lock import BusyError, RunLock
from naju.lab.runs import RunFolder, machine, versions
from naju.lab.signals import Signals
from naju.lm.config import LanguageRun
from naju.lm.token_files import read_manifest
from naju.training import Reporter, StoppedError

if TYPE_CHECKING:
    from naju.lm.distributed import Place

EXPERIMENT = "language-model"


@dataclass(frozen=True, kw_only=True)
class TrainCommand(LanguageRun):
    """Train a language model on prepared text; the same command goes on with a run that was stopped or killed.

    Under `torchrun` the same command trains on many processes. SIGTERM and Ctrl-C save a checkpoint and end the run.
    """

    out: Path
    """folder of the run: config, metrics, checkpoints, the best model in best/, and at the end result.json"""


def run_train(command: TrainCommand) -> None:
    """Exit codes: 0 trained to the end, 1 another process was lost, 2 refused, 128 + n stopped by signal n with
    everything saved."""
    # torch's distributed part takes a second to load: not for every command
    from naju.lm.distributed import clear_about_lost_processes, joined

    with joined(command.execution) as place, Signals() as signals:  # a signal ends those who still wait for others
        try:
            with clear_about_lost_processes(place):
                result = carry_out(command, RunFolder(command.out), place, _reporter(command, place, signals))
        except BusyError as busy:
            raise ValueError(f"out cannot be used: {busy}") from busy
        except StoppedError as stop:
            if place.is_first:
                print(stop, file=sys.stderr)
            sys.exit(143 if signals.received is None else 128 + signals.received)
        except ConnectionError as lost:  # said while signals are held off: torchrun is about to send one
            print(f"naju: {lost}", file=sys.stderr)
            sys.exit(1)
    if place.is_first:
        print(_in_words(result, command.out))


def carry_out(run: LanguageRun, folder: RunFolder, place: Place, reporter: Reporter) -> dict[str, Any]:
    """The result of a run that is finished, or that this makes. The first process writes, the others take part."""
    from naju.lm.train import check_run, train_language_model

    config = _config(run)
    check_run(run, place)
    folder.path.mkdir(parents=True, exist_ok=True)
    lock = RunLock(folder.path) if place.is_first else None
    with lock or nullcontext():
        if place.is_first:
            folder.begin(config)
        found: dict[str, Any] | None = place.agree(folder.result())
        if found is not None:
            return found
        allow = (lambda: None) if lock is None else lock.check
        result = train_language_model(
            run, folder.path, place, reporter, allow, validated=lambda row: reporter.note(_validation(row, run))
        )
        result |= {"experiment": EXPERIMENT, "config": config, "processes": place.world, "parallel": place.kind}
        result |= {"machine": machine(), "versions": versions()}
        result["when"] = datetime.now(UTC).isoformat(timespec="seconds")
        if lock is not None:
            lock.check()
            folder.finish(result)
        return result


def _config(run: LanguageRun) -> dict[str, Any]:
    """What determines the run; the text counts by its content, wherever it lies."""
    files = read_manifest(run.data)["files"]
    text = {name: facts["sha256"] for name, facts in sorted(files.items())}
    return {"experiment": EXPERIMENT, **run.to_json(), "steps": run.protocol.updates, "text": text}


def _reporter(command: TrainCommand, place: Place, signals: Signals) -> Reporter:
    if not place.is_first:
        return Reporter(stop=lambda: signals.received is not None)
    bar = tqdm(total=command.protocol.tokens, unit="token", unit_scale=True, dynamic_ncols=True, disable=None)
    size = command.protocol.tokens_per_update

    def begin(step: int) -> None:
        if step > 0:
            tqdm.write(f"goes on after update {step:,}", file=sys.stderr)
        bar.update(step * size)
        bar.unpause()

    def progress(step: int, loss: float) -> None:
        bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
        bar.update(step * size - bar.n)

    return Reporter(
        begin=begin,
        progress=progress,
        note=lambda sentence: tqdm.write(sentence, file=sys.stderr),
        stop=lambda: signals.received is not None,
    )


def _validation(row: Mapping[str, Any], run: LanguageRun) -> str:
    """A line of metrics in words."""
    from naju.lm.loss import perplexity

    where = f"update {row['step']:,} of {run.protocol.updates:,}"
    return f"{where}: loss {row['loss']:.3f}, validation perplexity {perplexity(row['validation_loss']):.2f}"


def _in_words(result: dict[str, Any], out: Path) -> str:
    test = result["test_perplexity"]
    tested = "no test split" if test is None else f"test perplexity {test:.2f}"
    speed = result["tokens_per_second"]
    fast = "" if speed is None else f", {speed:,.0f} tokens/s"
    return (
        f"validation perplexity {result['validation_perplexity']:.2f} at update {result['best_step']}, {tested}; "
        f"{result['parameters']:,} parameters, {result['seconds']:.0f} s{fast}. The model: {out / 'best'}"
    )
