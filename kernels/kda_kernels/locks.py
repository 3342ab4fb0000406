"""Locks on files between processes: they save work, and nothing depends on them for being right.

Lives here: taking a lock with a bound on the wait. Not here: what is locked (artifacts.py).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # no flock on this system: every process builds for itself
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def locked(path: Path, wait_seconds: float) -> Iterator[None]:
    """Hold the lock file, or go on without it after ``wait_seconds``.

    The kernel drops the lock of a killed process; the bound is for one that is stopped, or whose
    forked child still holds the descriptor. The file is never removed: removing a lock that
    somebody is about to take gives two holders.
    """
    if fcntl is None:
        yield
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + wait_seconds
        pause = 0.005
        while not _try_lock(descriptor) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Return True when waiting is over: the lock is ours, or this file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
