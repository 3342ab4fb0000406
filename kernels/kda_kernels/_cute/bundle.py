"""Bundles: directories of compiled kernels that run where no compiler is.

Lives here: what a manifest says, checking a bundle against it, and which bundle this process uses.
A bundle's objects are the cache's own, named by content; its manifest says what they were built
from. Not here: writing a bundle (packing.py), compiling (compile.py), the cache (artifacts.py),
what goes into a bundle by default (<op>/launch.py).
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import kda_kernels
from kda_kernels import artifacts
from kda_kernels._cute import runtime
from kda_kernels.errors import ContractError

ENVIRONMENT_VARIABLE = "KDA_BUNDLE"
MANIFEST = "manifest.json"
FORMAT = 1

_PACKAGE = Path(__file__).parents[1]
_SHARED = ("contract/spec.py", "schedule.py")
# Files of this folder that no compiled code depends on.
_HOST_ONLY = ("__init__", "bundle", "packing", "parallel", "runtime", "target")
IDENTITY = ("operator", "arch", "variant")
"""What tells the objects of a bundle apart; all of it text."""


@dataclass(frozen=True)
class Bundle:
    """A bundle that was checked: whole, undamaged, and built from this version's sources.

    Attributes:
        directory: where it is.
        manifest: what its manifest says.
        runtime: CuTe DSL's runtime library that its objects are loaded behind.
        objects: paths by operator, architecture and variant.
        source: where the directory was named, for errors.
    """

    directory: Path
    manifest: Mapping[str, Any]
    runtime: Path
    objects: Mapping[tuple[str, str, str], Path]
    source: str = ""

    @property
    def architectures(self) -> tuple[str, ...]:
        """Return the architectures that it has objects for."""
        return tuple(sorted({arch for _, arch, _ in self.objects}))

    @property
    def operators(self) -> tuple[str, ...]:
        """Return the operators that it has objects of."""
        return tuple(sorted({operator for operator, _, _ in self.objects}))

    def find(self, operator: str, arch: str, variant: str) -> Path | None:
        """Return the object of a variant, None where the bundle has none for it.

        Raises:
            ContractError: the bundle has nothing for this architecture.
        """
        if arch not in self.architectures:
            fact = f"one for {', '.join(self.architectures) or 'nothing'}"
            raise _Check(self.directory, self.source).misfit(
                f"built for {arch}, this device's", fact
            )
        return self.objects.get((operator, arch, variant))


def source_files(sources: Sequence[str]) -> list[Path]:
    """Return the files that an operator's compiled code depends on.

    Args:
        sources: files of the operator, relative to the package; what all share is added.
    """
    shared = [p for p in sorted(_PACKAGE.glob("_cute/*.py")) if p.stem not in _HOST_ONLY]
    return [*shared, *(_PACKAGE / name for name in (*_SHARED, *sources))]


def source_hash(sources: Sequence[str]) -> str:
    """Return the hash of the files that an operator's compiled code depends on."""
    digest = hashlib.sha256()
    for file in source_files(sources):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def versions(dsl: str, toolkit: int | None) -> dict[str, Any]:
    """Return what objects that are built now depend on, as a manifest says it."""
    import tvm_ffi  # noqa: PLC0415 - importing kda_kernels loads no FFI

    return {
        "format": FORMAT,
        "kda_ops": kda_kernels.__version__,
        "cute_dsl": dsl,
        "cuda": toolkit,
        "tvm_ffi": tvm_ffi.__version__,
        "machine": platform.machine(),
    }


def read(directory: Path, source: str = "") -> Bundle:
    """Return a bundle once all of it is checked against this version and its own hashes.

    Args:
        directory: the bundle.
        source: where the directory was named, for errors.

    Raises:
        ContractError: it does not fit; the error says what does not.
    """
    check = _Check(directory, source)
    manifest = check.manifest()
    check.versions(manifest)
    check.sources(manifest)
    kept = manifest.get("runtime")
    for entry in [*manifest["objects"], *([kept] if kept else [])]:
        check.content(entry)
    library = directory / runtime.NAME if kept else check.installed_runtime(manifest)
    check.driver(manifest)
    objects = {
        (e["operator"], e["arch"], e["variant"]): directory / Path(e["file"]).name
        for e in manifest["objects"]
    }
    return Bundle(directory, manifest, library, objects, source)


class _Check:
    """The checks of one bundle; each raises ContractError with what does not fit."""

    def __init__(self, directory: Path, source: str = "") -> None:
        """Keep what every error names."""
        self.directory = directory
        self.source = source

    def misfit(self, rule: str, fact: str) -> ContractError:
        """Return the error of a bundle that is not what it must be."""
        named = f"the bundle {self.directory}"
        return ContractError("load_bundle", named, rule, fact, self.source)

    def manifest(self) -> dict[str, Any]:
        """Read the manifest and see that everything in it is there."""
        try:
            manifest = json.loads((self.directory / MANIFEST).read_text(encoding="utf-8"))
            needed = (*IDENTITY, "file", "size", "sha256")
            if all(
                isinstance(entry[k], (str, int)) for entry in manifest["objects"] for k in needed
            ):
                return dict(manifest)
        except OSError as error:
            fact = f"{MANIFEST}: {error.strerror or error}"
            raise self.misfit("a directory with a manifest", fact) from None
        except (ValueError, KeyError, TypeError):
            pass
        raise self.misfit(f"one whose {MANIFEST} is whole", "a damaged one")

    def versions(self, manifest: Mapping[str, Any]) -> None:
        """Refuse what another version or machine built; TVM-FFI may be newer than the builder's."""
        here = versions(manifest.get("cute_dsl", ""), manifest.get("cuda"))
        for name, wanted in here.items():
            found = manifest.get(name)
            fits = found == wanted
            if name == "tvm_ffi" and isinstance(found, str):
                built, installed = numbers(found), numbers(wanted)
                fits = built[:2] == installed[:2] and built <= installed
            if not fits:
                said = name.replace("_", "-")
                raise self.misfit(f"built for {said} {wanted}", f"one for {said} {found}")

    def sources(self, manifest: Mapping[str, Any]) -> None:
        """Refuse kernels that other sources were compiled to."""
        for operator, found in manifest.get("sources", {}).items():
            launch = importlib.import_module(f"kda_kernels.{operator}.launch")
            wanted = source_hash(launch.SOURCES)
            if found != wanted:
                rule = f"built from this version's sources of {operator} ({wanted[:12]})"
                raise self.misfit(rule, f"one from other sources ({found[:12]})")

    def content(self, entry: Mapping[str, Any]) -> None:
        """Refuse a file that is not what the manifest says."""
        damage = artifacts.damage(self.directory / Path(entry["file"]).name, entry)
        if damage:
            raise self.misfit("undamaged", f"{entry['file']}: {damage}")

    def installed_runtime(self, manifest: Mapping[str, Any]) -> Path:
        """Return the installed runtime library, refused where it is of another version."""
        found, wanted = runtime.find(), manifest["cute_dsl"]
        if found is not None and found.version in (None, wanted):
            return found.path
        wheel = f"{runtime.distribution(manifest['cuda'] or runtime.TOOLKITS[0])}=={wanted}"
        rule = (
            f"beside CuTe DSL's runtime library {wanted} (pip install --no-deps {wheel}, or build "
            "the bundle with --with-runtime)"
        )
        raise self.misfit(rule, f"version {found.version}" if found else "none installed")

    def driver(self, manifest: Mapping[str, Any]) -> None:
        """Refuse code of a CUDA version that the driver is too old for."""
        most, built = runtime.driver(), manifest["cuda"]
        if most is not None and isinstance(built, int) and built > most:
            raise self.misfit(f"built with CUDA {most} or older", f"one built with CUDA {built}")


def numbers(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


_CHOSEN: list[Bundle] = []


def load_bundle(directory: str | os.PathLike[str]) -> Bundle:
    """Take compiled GPU kernels from a bundle from now on, as KDA_BUNDLE does from the start.

    Every file is checked now. Kernels that this process has loaded already stay. What is not in the
    bundle is compiled where CuTe DSL is installed, and is an UnsupportedError elsewhere. Nothing
    touches CUDA before the first call; a device whose architecture the bundle does not have is
    refused then.

    Args:
        directory: what ``kda-ops build --arch ... --out`` has written.

    Returns:
        The bundle: its directory, architectures and operators.

    Raises:
        ContractError: (ValueError) the bundle does not fit: damaged, of another version of kda_ops,
            TVM-FFI or CuTe DSL's runtime library, built from other sources, for another kind of
            machine, or for a newer CUDA than the driver's.
    """
    found = read(Path(directory))
    _CHOSEN[:] = [found]
    return found


def selected() -> Bundle | None:
    """Return the bundle in use, None where there is none.

    Raises:
        ContractError: KDA_BUNDLE names one that does not fit.
    """
    if _CHOSEN:
        return _CHOSEN[0]
    named = os.environ.get(ENVIRONMENT_VARIABLE, "")
    return _named(named) if named else None


@cache
def _named(directory: str) -> Bundle:
    return read(Path(directory).expanduser(), f"from {ENVIRONMENT_VARIABLE}")
