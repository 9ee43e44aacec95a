"""One run, one process: a lock that processes on one machine or on several that share a folder agree on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from naju.training.files import beside

LOCK = "lock.json"
HEARTBEAT_SECONDS = 15.0
STALE_SECONDS = 300.0
ATTEMPTS = 5


class BusyError(Exception):
    """Another process holds the lock; the message says which."""


class LockLostError(Exception):
    """The lock was taken over, as happens to a process that slept longer than STALE_SECONDS."""


@dataclass(frozen=True)
class Claim:
    """A file that says who wants the lock, at the place that it got."""

    place: Path
    content: bytes

    @property
    def next_place(self) -> Path:
        """That of the one claim that may follow this one; no two claims have the same."""
        digest = hashlib.blake2b(self.place.name.encode() + self.content, digest_size=16).hexdigest()
        return self.place.with_name(f"{LOCK}.after-{digest}")

    @property
    def owner(self) -> dict[str, Any] | None:
        """None where no process is named: where files have no hard links, it may have died as it wrote this."""
        try:
            owner = json.loads(self.content)
        except ValueError:
            return None
        named = isinstance(owner, dict) and isinstance(owner.get("host"), str) and isinstance(owner.get("pid"), int)
        return owner if named and 0 < owner["pid"] < 2**31 else None

    def is_dead(self) -> bool:
        return self.owner is not None and _is_dead(self.owner)


class RunLock:
    """Holds `folder/lock.json` while inside `with`, and touches it every few seconds.

    A claim is written aside and linked to its place: to `lock.json`, or, if a stale claim lies there, to the place
    named after that one. A link is there whole or not at all, and of all who try one gets the place. So claims form a
    chain, the last of which holds the lock: whoever is killed at whatever moment leaves a claim of a dead process at
    its end, which the next one follows at once. The new holder puts its claim in the place of the whole chain.

    A claim is stale when its process is known to be dead (same machine), or when its last touch is far from now by the
    file system's own clock, which no machine's clock can disturb, and no touch follows while we watch, which a jump of
    that clock cannot imitate.
    """

    def __init__(
        self, folder: Path, *, heartbeat: float = HEARTBEAT_SECONDS, stale_after: float = STALE_SECONDS
    ) -> None:
        self.path, self.heartbeat, self.stale_after = folder / LOCK, heartbeat, stale_after
        owner = {"host": _host(), "pid": os.getpid(), "started": _state_and_start(os.getpid())[1]}
        self.content = json.dumps({**owner, "token": uuid.uuid4().hex}).encode()
        self._aside = beside(self.path)
        self._done = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> RunLock:
        try:
            self._aside.write_bytes(self.content)
            self._acquire()
        except BaseException:
            self._release()
            raise
        finally:
            self._aside.unlink(missing_ok=True)
        self._beating.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        try:
            self._beating.join()
        finally:
            self._release()

    def is_held(self) -> bool:
        return [claim.content for claim in _chain(self.path)[-1:]] == [self.content]

    def check(self) -> None:
        if not self.is_held():
            raise LockLostError(f"the lock of {self.path.parent.name} was taken over by {holder(self.path.parent)}")

    def _beat(self) -> None:
        """A folder that cannot be reached for a moment is no reason to stop."""
        while not self._done.wait(self.heartbeat):
            with contextlib.suppress(OSError):
                if self.is_held():
                    os.utime(self.path)

    def _acquire(self) -> None:
        """One that was faster may be gone again already: then it is tried once more."""
        for _ in range(ATTEMPTS):
            if self._follow(_chain(self.path)):
                return
            owner = holder(self.path.parent)
            if owner is not None:
                break
        raise BusyError(f"{self.path.parent.name} is being trained by {owner or 'another process'}")

    def _follow(self, chain: list[Claim]) -> bool:
        """Take the place after a chain, if its end is stale, and then that of all of it."""
        if chain and not self._is_stale(chain[-1]):
            return False
        place = chain[-1].next_place if chain else self.path
        if not self._put(place):
            return False
        if not self.is_held():  # another has put its claim in the place of that chain before we followed it
            place.unlink(missing_ok=True)
            return False
        if place != self.path:
            os.replace(place, self.path)
            for claim in chain[1:]:
                claim.place.unlink(missing_ok=True)
        return True

    def _put(self, place: Path) -> bool:
        try:
            os.link(self._aside, place)
        except FileExistsError:
            return False
        except OSError:  # some file systems have no hard links: there a kill may leave a claim without a name
            with contextlib.suppress(FileExistsError), place.open("xb") as file:
                file.write(self.content)
                return True
            return False
        return True

    def _release(self) -> None:
        """With what was left by processes that were killed as they came too late to follow."""
        if not self.is_held():
            return
        mine = Claim(self.path, self.content).next_place
        for left in self.path.parent.glob(f"{LOCK}.after-*"):
            if left != mine:
                left.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def _is_stale(self, claim: Claim) -> bool:
        if claim.is_dead():
            return True
        self._aside.write_bytes(self.content)  # touches it, or writes it anew where the holder has cleared it away
        now, before = _touched(self._aside), _touched(claim.place)
        if now is None or before is None or abs(now - before) <= 1e9 * self.stale_after:
            return False
        time.sleep(2 * self.heartbeat)
        return _touched(claim.place) == before


def holder(folder: Path) -> str | None:
    """Who holds a run's lock, in words; None if nobody does or its process is known to be dead."""
    chain = _chain(folder / LOCK)
    if not chain or chain[-1].is_dead():
        return None
    owner = chain[-1].owner
    return (
        f"process {owner['pid']} on {owner['host'].split('/')[0]}" if owner else "a process that has not said its name"
    )


def _chain(place: Path) -> list[Claim]:
    """The claims from `lock.json` to the one that holds the lock."""
    claims: list[Claim] = []
    with contextlib.suppress(FileNotFoundError):
        while True:
            claims.append(Claim(place, place.read_bytes()))
            place = claims[-1].next_place
    return claims


def _touched(path: Path) -> int | None:
    """Nanoseconds; None if it is gone."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _is_dead(owner: dict[str, Any]) -> bool:
    """Known to be: it ran here, under this boot and among these processes, and its number is free or another's."""
    if owner["host"] != _host():
        return False
    with contextlib.suppress(PermissionError):
        try:
            os.kill(owner["pid"], 0)
        except ProcessLookupError:
            return True
    state, started = _state_and_start(owner["pid"])
    return state in ("Z", "X") or (started is not None and owner.get("started", started) != started)


def _state_and_start(pid: int) -> tuple[str | None, int | None]:
    """A letter, Z for one that has ended and is not yet cleared away, and ticks from the boot to its start; None where
    the system does not say it."""
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None, None
    return state, int(numbers[18])


def _host() -> str:
    """The machine's name and what tells its boots and its containers apart, where the system says it."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)
