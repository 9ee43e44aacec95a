"""One run, one process: a lock that processes on one machine or on several that share a folder agree on."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

from naju.training.files import write_json

LOCK = "lock.json"
HEARTBEAT_SECONDS = 15.0
STALE_SECONDS = 300.0


class BusyError(Exception):
    """Another process holds the lock; the message says which."""


class LockLostError(Exception):
    """The lock was taken over, as happens to a process that slept longer than STALE_SECONDS."""


class RunLock:
    """Holds `folder/lock.json` while inside `with`, and touches it every few seconds.

    The file is created with O_EXCL, so one process wins. It is taken over when its process is known to be dead (same
    machine), or when its last touch is too long ago by the file system's own clock, which neither machine's clock can
    disturb, and no touch follows while we watch, which a jump of that clock cannot imitate.
    """

    def __init__(
        self, folder: Path, *, heartbeat: float = HEARTBEAT_SECONDS, stale_after: float = STALE_SECONDS
    ) -> None:
        self.path, self.heartbeat, self.stale_after = folder / LOCK, heartbeat, stale_after
        self.owner = {"host": _host(), "pid": os.getpid(), "token": uuid.uuid4().hex}
        self._done = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> RunLock:
        if not self._create() and not self._take_over(_read(self.path)):
            owner = holder(self.path.parent) or "another process"
            raise BusyError(f"{self.path.parent.name} is being trained by {owner}")
        self._beating.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._beating.join()
        if self.is_held():
            self.path.unlink(missing_ok=True)

    def is_held(self) -> bool:
        return _read(self.path) == self.owner

    def check(self) -> None:
        if not self.is_held():
            raise LockLostError(f"the lock of {self.path.parent.name} was taken over by {holder(self.path.parent)}")

    def _beat(self) -> None:
        while not self._done.wait(self.heartbeat):
            if self.is_held():
                with contextlib.suppress(FileNotFoundError):
                    os.utime(self.path)

    def _create(self) -> bool:
        try:
            handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        with os.fdopen(handle, "w") as file:
            json.dump(self.owner, file)
        return True

    def _take_over(self, held: dict[str, Any] | None) -> bool:
        """Put our lock in the place of the one that was read, if that is stale and still there. A second file lets one
        process at a time do this; one left by a process that died right here is removed when it is old."""
        if not self._is_stale(held):
            return False
        guard = self.path.with_name(f"{LOCK}.takeover")
        try:
            os.close(os.open(guard, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            if seconds_since_touch(guard) > self.stale_after:
                guard.unlink(missing_ok=True)
            return False
        try:
            if _read(self.path) != held:
                return False
            write_json(self.path, self.owner)
            return True
        finally:
            guard.unlink(missing_ok=True)

    def _is_stale(self, held: dict[str, Any] | None) -> bool:
        if held is not None and _is_dead(held):
            return True
        if seconds_since_touch(self.path) <= self.stale_after:
            return False
        before = _touched(self.path)
        time.sleep(2 * self.heartbeat)
        return _touched(self.path) == before


def holder(folder: Path) -> str | None:
    """Who holds a run's lock, in words; None if nobody does or its process is known to be dead."""
    held = _read(folder / LOCK)
    if held is None:
        return "a process that has not said its name" if (folder / LOCK).exists() else None
    if _is_dead(held):
        return None
    return f"process {held['pid']} on {held['host'].split('/')[0]}"


def seconds_since_touch(path: Path) -> float:
    """By the clock that stamps files in this folder: a file touched now is the reference. 0 if it is gone."""
    probe = path.with_name(f".now.{uuid.uuid4().hex}")
    probe.touch()
    try:
        now, then = _touched(probe), _touched(path)
    finally:
        probe.unlink()
    return 0.0 if now is None or then is None else (now - then) / 1e9


def _touched(path: Path) -> int | None:
    """Nanoseconds; None if it is gone."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _read(path: Path) -> dict[str, Any] | None:
    """None also where nothing is written yet: its process has created it this very moment, or died in it."""
    try:
        held = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return held if isinstance(held, dict) and {"host", "pid"} <= set(held) else None


def _is_dead(held: dict[str, Any]) -> bool:
    """Known to be: it ran here, under this boot and among these processes, and its number is free."""
    if held["host"] != _host():
        return False
    try:
        os.kill(held["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _host() -> str:
    """The machine's name and what tells its boots and its containers apart, where the system says it."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)
