"""Compiles the C++ scan with the machine's own compiler, once, into the user's cache, and loads it.

The file's name carries a digest of everything that shapes it (source, flags, compiler, processor), so a stale one is
never found; a second file holds the checksum of its bytes, so a damaged one is never loaded. Two processes that arrive
together take turns at a lock file, and the library appears under its name only when it is complete.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("scan.cpp")
HEADERS = sorted(SOURCE.parent.glob("*.h"))
FLAGS = ["-O3", "-march=native", "-shared", "-fPIC", "-pthread", "-w"]
TIMEOUT_S = 120


class BuildError(RuntimeError):
    """Why the library cannot be had on this machine, as the end of a sentence."""


@functools.cache
def library() -> ctypes.CDLL | str:
    """The loaded library, or the reason there is none. Decided once a process."""
    try:
        return ctypes.CDLL(str(compiled_library()))
    except (BuildError, OSError) as error:
        return str(error)


def cache_folder() -> Path:
    """`$NAJU_CACHE`, else the user's cache folder; where neither can be written, a private temporary one."""
    named, base = os.environ.get("NAJU_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(named) if named else (Path(base) if base else Path.home() / ".cache") / "naju"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # the latter when the user has no home
        return Path(tempfile.mkdtemp(prefix="naju-cache-"))


def compiled_library() -> Path:
    """The path of an intact library for this machine, compiled now if there is none."""
    if sys.platform == "win32":
        raise BuildError("it needs POSIX threads, which Windows does not have")
    return compiled([SOURCE, *HEADERS], [find_compiler(), *FLAGS], _processor())


def compiled(sources: Sequence[Path], command: Sequence[str], target: str) -> Path:
    """The path of what `command` makes of the first source; the others are its headers.

    `target` says what else the result depends on: the machine that it is for.
    """
    path = cache_folder() / f"scan-{_digest(sources, command, target)}.so"
    if not _intact(path):
        with _locked(path.with_suffix(".lock")):
            if not _intact(path):
                _compile(sources[0], command, path)
    return path


def find_compiler() -> str:
    """`$CXX` where it is set, else the first C++ compiler on the path."""
    named = os.environ.get("CXX")
    for name in [named] if named else ["c++", "g++", "clang++"]:
        found = shutil.which(name)
        if found:
            return os.path.abspath(found)  # not the real path: compiler caches are links that go by their own name
    raise BuildError(
        f"the compiler CXX={named!r} was not found" if named else "no C++ compiler (c++, g++ or clang++) was found"
    )


def _digest(sources: Sequence[Path], command: Sequence[str], target: str) -> str:
    compiler = os.stat(command[0])
    parts = [path.read_bytes() for path in sources] + [word.encode() for word in command]
    parts += [f"{compiler.st_size} {compiler.st_mtime_ns}".encode(), target.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by machines with different processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return " ".join([platform.machine(), platform.processor(), *sorted(told)])


def _compile(source: Path, command: Sequence[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        built = Path(folder) / path.name
        whole = [*command, str(source), "-o", str(built)]
        try:
            done = subprocess.run(whole, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"{command[0]} could not be run: {error}") from error
        if done.returncode != 0:
            said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
            reason = next((line for line in said if "error" in line or "fatal" in line), said[0])
            raise BuildError(f"{command[0]} could not compile it: {reason}")
        checksum = Path(folder) / "checksum"
        checksum.write_text(_checksum(built))
        os.replace(checksum, _checksum_file(path))
        os.replace(built, path)


def _intact(path: Path) -> bool:
    try:
        return _checksum(path) == _checksum_file(path).read_text()
    except (OSError, UnicodeDecodeError):
        return False


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _checksum_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl  # not on Windows, which compiled_library turns away

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
