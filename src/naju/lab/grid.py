"""Many runs at once: worker processes that take one cell after the other, in order, and tell how far they are."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from tqdm import tqdm

from naju.lab.lock import BusyError
from naju.lab.signals import Signals
from naju.training import Reporter, StoppedError
from naju.training.children import deaf_to_ctrl_c

TELLS_EVERY = 1.0  # seconds, while it examines


class Cell(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def steps(self) -> int: ...


C = TypeVar("C", bound=Cell)
Train = Callable[[C, Reporter], dict[str, Any]]


class Message(NamedTuple):
    """From a worker: `begin` and `progress` carry a step, `progress` a loss, the rest a sentence; the last four kinds
    end a cell, with its result where it is `done`."""

    kind: str  # begin, progress, examining, note, done, stopped, busy, failed
    step: int = 0
    loss: float = 0.0
    text: str = ""
    result: dict[str, Any] | None = None


class Outcome(NamedTuple):
    """How a cell ended: done, stopped, busy (elsewhere), failed, died, or untouched."""

    name: str
    kind: str
    text: str = ""


@dataclass
class Worker(Generic[C]):
    """A process, the line to it, and what it is doing."""

    process: SpawnProcess
    line: Connection
    cell: C | None = None
    step: int = 0

    def give(self, cell: C) -> None:
        """Also to a process that has just died: the end of its line tells that."""
        self.cell, self.step = cell, 0
        with contextlib.suppress(OSError):
            self.line.send(cell)


class Grid(Generic[C]):
    """Fills cells in order with `jobs` processes. A worker that dies is reported and replaced; its cell stays behind as
    its last checkpoint left it. SIGINT and SIGTERM let every worker save; a second one does not wait for that.

    `finish` hears of every result, with its cell's name, as soon as it is there, and says it in a sentence.
    """

    def __init__(self, train: Train[C], jobs: int, finish: Callable[[str, dict[str, Any]], str]) -> None:
        if jobs < 1:
            raise ValueError(f"jobs must be a positive integer, but is {jobs}")
        self.train, self.jobs, self.finish = train, jobs, finish
        self.workers: list[Worker[C]] = []
        self.outcomes: list[Outcome] = []

    def fill(self, cells: Sequence[C], signals: Signals) -> list[Outcome]:
        waiting = deque(cells)
        with tqdm(total=sum(cell.steps for cell in cells), unit="step", dynamic_ncols=True, disable=None) as self.bar:
            try:
                while self._assign(waiting, stopping=signals.received is not None):
                    for line in wait([worker.line for worker in self.workers if worker.cell is not None], timeout=0.5):
                        self._hear(next(worker for worker in self.workers if worker.line is line))
                    self._pass_on(signals)
            finally:
                self._dismiss()
        return [*self.outcomes, *(Outcome(cell.name, "untouched") for cell in waiting)]

    def _assign(self, waiting: deque[C], *, stopping: bool) -> bool:
        """Give every idle worker a cell; False when nothing is left to wait for."""
        self.workers = [worker for worker in self.workers if worker.cell is not None or worker.process.is_alive()]
        idle = [worker for worker in self.workers if worker.cell is None]
        while waiting and not stopping and (idle or len(self.workers) < self.jobs):
            worker = idle.pop() if idle else self._hire()
            worker.give(waiting.popleft())
        return any(worker.cell is not None for worker in self.workers)

    def _hire(self) -> Worker[C]:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, self.train), daemon=True)
        with deaf_to_ctrl_c():
            process.start()
        there.close()
        worker: Worker[C] = Worker(process, here)
        self.workers.append(worker)
        return worker

    def _hear(self, worker: Worker[C]) -> None:
        assert worker.cell is not None
        try:
            message: Message = worker.line.recv()
        except (EOFError, OSError):  # the latter if it was killed while it spoke
            worker.process.join()
            text = f"its process died with exit code {worker.process.exitcode}; the same command goes on with it"
            message = Message("died", text=text)
            self.workers.remove(worker)
        if message.kind in ("begin", "progress"):
            self._advance(worker, message)
        elif message.kind == "examining":
            self.bar.set_postfix_str(f"{worker.cell.name} examined {message.text}")
        elif message.kind == "note":
            self._say(f"{worker.cell.name}: {message.text}")
        else:
            self._end(worker, message)

    def _advance(self, worker: Worker[C], message: Message) -> None:
        assert worker.cell is not None
        if message.kind == "begin":
            self._shrink(message.step)
        else:
            self.bar.set_postfix_str(f"{worker.cell.name} loss {message.loss:.3f}", refresh=False)
            self.bar.update(message.step - worker.step)
        worker.step = message.step

    def _end(self, worker: Worker[C], message: Message) -> None:
        assert worker.cell is not None
        self._shrink(worker.cell.steps - worker.step)
        text = message.text if message.result is None else self.finish(worker.cell.name, message.result)
        self.outcomes.append(Outcome(worker.cell.name, message.kind, text))
        self._say(f"{worker.cell.name} {message.kind}: {text}")
        worker.cell = None

    def _shrink(self, steps: int) -> None:
        """Steps that need not be done any more leave the time that is left honest."""
        self.bar.total = (self.bar.total or 0) - steps
        self.bar.refresh()

    def _say(self, sentence: str) -> None:
        tqdm.write(sentence, file=sys.stdout)
        sys.stdout.flush()

    def _pass_on(self, signals: Signals) -> None:
        for worker in self.workers:
            if signals.received is not None and worker.cell is not None:
                (worker.process.kill if signals.insisted else worker.process.terminate)()

    def _dismiss(self) -> None:
        """Closing its line ends an idle worker; one that is still busy saves and ends when it next speaks."""
        for worker in self.workers:
            worker.line.close()
        for worker in self.workers:
            worker.process.join()


def _serve(line: Connection, train: Train[Any]) -> None:
    """A worker's life: cells from the line until it closes or a signal comes."""
    # A batch system that is about to end a job tells all of its processes; the grid's own decides what that means.
    if hasattr(signal, "SIGUSR2"):
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    torch.set_num_threads(1)  # models this small gain nothing from more, and one thread gives one order of summation
    with Signals() as signals:
        teller = _Teller(line, signals)
        while signals.received is None:
            try:
                cell = line.recv()
            except (EOFError, OSError):  # the grid is done, or gone
                return
            teller.tell(_outcome(cell, train, teller.reporter()))


def _outcome(cell: Any, train: Train[Any], reporter: Reporter) -> Message:
    try:
        return Message("done", result=train(cell, reporter))
    except StoppedError as stop:
        return Message("stopped", text=str(stop))
    except BusyError as busy:
        return Message("busy", text=str(busy))
    except Exception as error:  # whatever goes wrong in one cell, the others go on
        return Message("failed", text=f"{type(error).__name__}: {error}")


class _Teller:
    """Speaks to the grid; when nobody listens any more, or the grid is dead, the run is asked to stop."""

    def __init__(self, line: Connection, signals: Signals) -> None:
        self.line, self.signals, self.heard = line, signals, True
        self.last_told = 0.0

    def tell(self, message: Message) -> None:
        try:
            self.line.send(message)
        except OSError:
            self.heard = False

    def examining(self, share: float) -> None:
        """Not every batch: there can be many in a second."""
        if time.monotonic() - self.last_told > TELLS_EVERY:
            self.last_told = time.monotonic()
            self.tell(Message("examining", text=f"{share:.0%}"))

    def reporter(self) -> Reporter:
        return Reporter(
            begin=lambda step: self.tell(Message("begin", step=step)),
            progress=lambda step, loss: self.tell(Message("progress", step=step, loss=loss)),
            examining=self.examining,
            note=lambda text: self.tell(Message("note", text=text)),
            stop=lambda: self.signals.received is not None or not self.heard or not _grid_lives(),
        )


def _grid_lives() -> bool:
    """Else a killed grid's worker would hold its cell until it next speaks, and a new grid would find it busy."""
    parent = multiprocessing.parent_process()
    return parent is None or parent.is_alive()
