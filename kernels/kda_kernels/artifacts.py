"""The cache of compiled kernels: found again by key, verified on load, safe for many processes.

Lives here: where the cache directory is, how an entry is written, verified and found; files that
name their content, which bundles are made of too (_cute/bundle.py). Not here: locks (locks.py),
what a key is made of and how a kernel is compiled (_cpu/build.py, _cute/).

An entry is two files: ``<key>.json``, the manifest, and ``<sha256><suffix>``, the object that it
names by content. Both are written to a temporary name, synchronised and renamed, the object first,
so that a reader sees a whole entry or none. A lock file per key lets one process build while the
others wait; it only saves work, and nothing depends on it for being right.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from kda_kernels.locks import locked

ENVIRONMENT_VARIABLE = "KDA_CACHE_DIR"
LOCK_WAIT_SECONDS = 120.0
"""How long a process waits for another one's build before it builds for itself."""

_STALE_SECONDS = 24 * 3600.0
_TEMPORARY = ".tmp-"


Facts = Mapping[str, Any]
"""What the builder of an object says about it; kept in the manifest, as JSON."""


@dataclass(frozen=True)
class Artifact:
    """A verified entry: the object's path, whether this call built it, what its builder said."""

    path: Path
    built: bool
    facts: Facts = field(default_factory=dict)


@dataclass(frozen=True)
class _Rejected:
    """Why a directory cannot hold the cache."""

    reason: str


def default_directory() -> Path | None:
    """Return the user's own cache directory, or None where no home directory is known.

    ``$XDG_CACHE_HOME/kda_ops`` when that variable holds an absolute path, else
    ``$HOME/.cache/kda_ops``. An unset HOME means None: the password database is not asked, because
    the accounts of services and containers have homes there that nobody meant to be written to.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base and Path(base).is_absolute():
        return Path(base, "kda_ops")
    home = os.environ.get("HOME", "")
    if home and Path(home).is_absolute():
        return Path(home, ".cache", "kda_ops")
    return None


def cache_directory() -> Path:
    """Return the directory in use: KDA_CACHE_DIR, else the user's, else a temporary one.

    The first call creates it with mode 0700. Where that is impossible, or the directory belongs to
    somebody else or is open to everybody's writing, a private temporary directory serves until the
    process ends, and one warning says why. A directory that can be read and not written is used
    for what it holds.
    """
    configured = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if configured:
        return _usable(Path(configured).expanduser(), configured=True)
    default = default_directory()
    if default is None:
        return _temporary("neither HOME nor XDG_CACHE_HOME is set")
    return _usable(default, configured=False)


@cache
def _usable(directory: Path, *, configured: bool) -> Path:
    rejected = _reject(directory, configured=configured)
    if rejected is None:
        return directory
    return _temporary(f"{directory} {rejected.reason}")


def _reject(directory: Path, *, configured: bool) -> _Rejected | None:
    """Create the directory if need be; return why it must not be used, or None."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.stat()
        if not stat.S_ISDIR(found.st_mode):
            return _Rejected("is not a directory")
        owner = os.getuid() if hasattr(os, "getuid") else found.st_uid
        # A directory that the user names may be an administrator's, prepared and read-only.
        if found.st_uid != owner and not (configured and found.st_uid == 0):
            return _Rejected(f"belongs to user {found.st_uid}, not to user {owner}")
        if not configured and found.st_mode & 0o077:
            directory.chmod(0o700)
        elif found.st_mode & stat.S_IWOTH:
            return _Rejected("can be written by everybody")
        next(directory.iterdir(), None)
    except OSError as error:
        return _Rejected(f"cannot be used: {error.strerror or error}")
    return None


@cache
def _temporary(reason: str) -> Path:
    """Return this process's private directory; made, and warned about, once."""
    directory = _temporary_directory()
    warnings.warn(
        f"kda_ops keeps compiled kernels in a temporary directory, because {reason}; they are "
        f"compiled again in the next process. Set {ENVIRONMENT_VARIABLE} to a directory of your "
        "own to keep them.",
        RuntimeWarning,
        stacklevel=2,
    )
    return directory


@cache
def _temporary_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="kda_ops-"))  # mkdtemp makes it 0700
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child still shares the directory with its parent
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
    return directory


def find(key: str, directory: Path | None = None) -> Path | None:
    """Return the verified object of ``key``, or None when it is missing or damaged."""
    found = look_up(key, directory)
    return found.path if found is not None else None


def look_up(key: str, directory: Path | None = None) -> Artifact | None:
    """Return the verified entry of ``key``, or None when it is missing or damaged."""
    directory = directory or cache_directory()
    try:
        manifest = json.loads((directory / f"{key}.json").read_text(encoding="utf-8"))
        path = directory / Path(manifest["file"]).name
        if not damage(path, manifest):
            return Artifact(path, built=False, facts=manifest.get("facts", {}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def damage(path: Path, manifest: Facts) -> str:
    """Return how a file differs from the size and sha256 of its manifest; empty if it does not."""
    try:
        content = path.read_bytes()
    except OSError as error:
        return error.strerror or str(error)
    if len(content) != manifest["size"]:
        return f"{len(content)} bytes, not {manifest['size']}"
    return "" if _digest(content) == manifest["sha256"] else "another content (sha256)"


def find_like(prefix: str) -> Path | None:
    """Return the newest verified object whose key starts with ``prefix``, or None."""
    directory = cache_directory()
    with contextlib.suppress(OSError):
        manifests = [p for p in directory.iterdir() if p.name.startswith(prefix)]
        newest_first = sorted(
            (p for p in manifests if p.suffix == ".json"),
            key=lambda p: p.stat().st_mtime,
            reverse=True,
        )
        for manifest in newest_first:
            path = find(manifest.stem, directory)
            if path is not None:
                return path
    return None


def get_or_build(
    key: str,
    build: Callable[[Path], Facts | None],
    *,
    suffix: str = ".so",
    wait_seconds: float | None = None,
) -> Artifact:
    """Return the object of ``key``, built by ``build(path)`` unless a verified one is there.

    Args:
        key: names content and everything that the content depends on; letters, digits, - and _.
        build: writes the object to the path that it is given and may return facts about it. Its
            errors pass through, and then nothing is left behind.
        suffix: of the object's file name.
        wait_seconds: how long to wait for another process's build; LOCK_WAIT_SECONDS by default.

    Any number of processes and threads may call this at once. Where the directory cannot be
    written the object is built in a private temporary directory, with one warning.
    """
    directory = cache_directory()
    found = look_up(key, directory)
    if found is not None:
        return found
    wait = LOCK_WAIT_SECONDS if wait_seconds is None else wait_seconds
    try:
        _probe(directory)
    except OSError as error:
        directory = _temporary(f"{directory} cannot be written: {error.strerror or error}")
    with locked(directory / f"{key}.lock", wait):
        found = look_up(key, directory)
        if found is not None:
            return found
        _remove_stale(directory)
        return _build(directory, key, build, suffix)


def _probe(directory: Path) -> None:
    handle, name = tempfile.mkstemp(dir=directory, prefix=_TEMPORARY)
    os.close(handle)
    Path(name).unlink()


def _build(
    directory: Path, key: str, build: Callable[[Path], Facts | None], suffix: str
) -> Artifact:
    with tempfile.TemporaryDirectory(dir=directory, prefix=_TEMPORARY) as room:
        fresh = Path(room, f"object{suffix}")
        facts = build(fresh) or {}
        manifest = describe(fresh, suffix)
        path = directory / manifest["file"]
        _publish(fresh, path)
    put(directory / f"{key}.json", json.dumps({**manifest, "facts": facts}).encode())
    return Artifact(path, built=True, facts=facts)


def describe(path: Path, suffix: str = ".so") -> dict[str, Any]:
    """Return what a manifest says of a file: a name made of its content, size and sha256."""
    content = path.read_bytes()
    digest = _digest(content)
    return {"file": f"{digest}{suffix}", "size": len(content), "sha256": digest}


def put(path: Path, content: bytes) -> None:
    """Write a file so that readers see all of it or what was there before."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_TEMPORARY) as room:
        fresh = Path(room, path.name)
        fresh.write_bytes(content)
        _publish(fresh, path)


def _publish(temporary: Path, final: Path) -> None:
    """Rename a finished file into place once its bytes are on the disk."""
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    temporary.replace(final)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _remove_stale(directory: Path) -> None:
    """Remove what killed writers left more than a day ago."""
    limit = time.time() - _STALE_SECONDS
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if path.name.startswith(_TEMPORARY) and path.stat().st_mtime < limit:
                shutil.rmtree(path, ignore_errors=True)
                path.unlink(missing_ok=True) if path.is_file() else None
