"""Writing bundles: objects of the cache and a manifest that says what they were built from.

Lives here: one function, which also adds to a bundle that is there. Not here: reading and checking
(bundle.py), compiling (compile.py).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kda_kernels import artifacts
from kda_kernels._cute import runtime
from kda_kernels._cute.bundle import IDENTITY, MANIFEST
from kda_kernels.locks import locked


def write(
    directory: Path,
    made_by: Mapping[str, Any],
    sources: Mapping[str, str],
    entries: Iterable[tuple[Mapping[str, str], artifacts.Artifact]],
    library: Path | None = None,
) -> None:
    """Write a bundle, or put more into one that was built from the same sources and versions.

    Readers see the old bundle or the new one. What is there and does not fit is replaced.

    Args:
        directory: made if need be.
        made_by: as ``versions`` returns it.
        sources: by operator, as ``source_hash`` returns it.
        entries: what identifies an object (operator, arch, variant), and the cache's object.
        library: CuTe DSL's runtime library, to be copied into the bundle.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory / ".lock", artifacts.LOCK_WAIT_SECONDS):
        old = _kept(directory, made_by, sources)
        objects = {tuple(entry[k] for k in IDENTITY): entry for entry in old.get("objects", ())}
        for identity, made in entries:
            described = artifacts.describe(made.path)
            artifacts.put(directory / described["file"], made.path.read_bytes())
            objects[tuple(identity[k] for k in IDENTITY)] = {**identity, **described, **made.facts}
        manifest = {
            **made_by,
            "sources": {**old.get("sources", {}), **sources},
            "runtime": _put_runtime(directory, library) or old.get("runtime"),
            "objects": [objects[identity] for identity in sorted(objects)],
        }
        artifacts.put(directory / MANIFEST, json.dumps(manifest, indent=1).encode())
        _remove_unnamed(directory, manifest)


def _put_runtime(directory: Path, library: Path | None) -> dict[str, Any] | None:
    """Copy the runtime library, if it is wanted; return what the manifest says of it."""
    if library is None:
        return None
    artifacts.put(directory / runtime.NAME, library.read_bytes())
    return {**artifacts.describe(library), "file": runtime.NAME}


def _kept(
    directory: Path, made_by: Mapping[str, Any], sources: Mapping[str, str]
) -> Mapping[str, Any]:
    """Return the manifest that is there if what it names may stay, else an empty one."""
    with contextlib.suppress(OSError, ValueError):
        old = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        same = all(old.get(k) == v for k, v in made_by.items())
        if same and all(old["sources"].get(k, v) == v for k, v in sources.items()):
            return dict(old)
    return {}


def _remove_unnamed(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Remove objects of an older manifest; loaded ones stay mapped where they are in use."""
    named = {entry["file"] for entry in manifest["objects"]}
    for path in directory.glob("*.so"):
        if re.fullmatch(r"[0-9a-f]{64}\.so", path.name) and path.name not in named:
            path.unlink(missing_ok=True)
