"""Something goes wrong at the n-th operation on files below a folder: Python's audit events come before each of them.

Only for processes that are about to end: nobody can take back what listens to them.
"""

import contextlib
import errno
import os
import signal
import sys

CHANGES = ("os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "os.utime")


def kill_at(number, folder):
    """SIGKILL before the operation, counted from 1, or, where that creates or empties a file, right after it, when
    nothing is written yet."""
    passed = 0

    def act(event, arguments):
        nonlocal passed
        passed += 1
        if passed == number:
            if event == "open" and arguments[2] & os.O_CREAT:
                with contextlib.suppress(OSError):
                    os.open(arguments[0], arguments[2])
            os.kill(os.getpid(), signal.SIGKILL)

    _listen(folder, act)


def full_from(number, folder):
    """From the n-th file that is opened for writing on there is no room; renaming and removing needs none."""
    passed = 0

    def act(event, arguments):
        nonlocal passed
        if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            passed += 1
            if passed >= number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    _listen(folder, act)


def _listen(folder, act):
    def listen(event, arguments):
        if event != "open" and event not in CHANGES:
            return
        path = arguments[0]
        if isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path).startswith(str(folder)):
            act(event, arguments)

    sys.addaudithook(listen)
