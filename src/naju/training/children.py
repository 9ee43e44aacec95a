"""Processes that this one starts."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.process import BaseProcess


@contextlib.contextmanager
def deaf_to_ctrl_c() -> Iterator[None]:
    """Processes that are started in here ignore Ctrl-C until they ask for it: it goes to the whole process group, and
    this process, not its children, says so and ends them. Only a main thread can arrange that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, heard)


def end_with_parent() -> None:
    """Called first in a child: it ends when its parent was killed, and does not wait for work that never comes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)
