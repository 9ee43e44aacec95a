"""Ctrl-C and `kill` as a note that is looked at between two steps."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

HEARD = (signal.SIGINT, signal.SIGTERM)
# `timeout` and terminals signal a process and its whole group: that is one request, not two.
ONE_REQUEST_SECONDS = 1.0


class Signals:
    """Inside `with`, SIGINT and SIGTERM end nothing: the first is kept in `received`; `insisted` says that someone lost
    patience and sent another."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.insisted = False
        self._first = 0.0

    def __enter__(self) -> Signals:
        self._before: dict[signal.Signals, Any] = {which: signal.signal(which, self._note) for which in HEARD}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for which, handler in self._before.items():
            signal.signal(which, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._first = signal.Signals(number), time.monotonic()
        elif time.monotonic() - self._first > ONE_REQUEST_SECONDS:
            self.insisted = True
