"""What a report on a GPU says about where its figures come from: device, versions, hashes.

Lives here: facts of the machine, a hash of each operator's sources, the hash of every compiled
kernel in the process. Not here: the CPU's facts (harness.py).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import kda_kernels
from kda_kernels import artifacts

_DISTRIBUTIONS = ("triton", "apache-tvm-ffi", "nvidia-cutlass-dsl", "kda-ops")


def machine() -> dict[str, Any]:
    """Return what the figures depend on: device, driver, versions."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "processors": properties.multi_processor_count,
        "memory GiB": round(properties.total_memory / 2**30),
        "CUDA driver": _driver(),
        "CUDA": torch.version.cuda,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: version(name) for name in _DISTRIBUTIONS},
    }


def version(distribution: str) -> str | None:
    """Return the version of an installed distribution, None where there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Return the version of CUDA that the driver serves, such as 13.0."""
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    number = ask() if ask is not None else 0
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def source_hashes(operators: Iterable[str]) -> dict[str, str]:
    """Return a hash of each operator's sources and the device functions that it shares."""
    here = Path(kda_kernels.__file__).parent
    found = {}
    for operator in operators:
        digest = hashlib.sha256()
        for folder in ("_cute", operator):
            for file in sorted((here / folder).glob("*.py")):
                digest.update(f"{folder}/{file.name}\0".encode() + file.read_bytes() + b"\0")
        found[operator] = digest.hexdigest()
    return found


def kernel_hashes() -> dict[str, str]:
    """Return the SHA-256 of every compiled kernel that this process has loaded.

    By its key in the cache, or by its file where it came from a bundle: both name it by content.
    """
    hashes = {path.stem for path in _mapped() if re.fullmatch("[0-9a-f]{64}", path.stem)}
    keys = {}
    for manifest in sorted(artifacts.cache_directory().glob("*.json")):
        keys[json.loads(manifest.read_text(encoding="utf-8")).get("sha256")] = manifest.stem
    return {keys.get(found, found): found for found in sorted(hashes)}


def _mapped() -> set[Path]:
    """Return the files that are mapped into this process; empty where the system does not say."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return set()
    fields = (line.split(maxsplit=5) for line in maps.read_text(encoding="utf-8").splitlines())
    return {Path(field[5]) for field in fields if len(field) == 6}
