"""CuTe DSL's runtime library, which every compiled kernel calls: where it is, and loading it.

Lives here: finding it without importing CuTe DSL, so that kernels that are compiled already need no
compiler. Objects name the library and no folder, so they run wherever it was loaded first.
Not here: compiling (compile.py) and loading kernels (compile.py, bundle.py).
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

NAME = "libcute_dsl_runtime.so"
ENVIRONMENT_VARIABLE = "CUTE_DSL_LIBS"
"""CuTe DSL's own variable; its libraries, separated by colons."""

TOOLKITS = (13, 12)
"""Major versions of CUDA that CuTe DSL is built for, the newest first."""


@dataclass(frozen=True)
class Library:
    """The runtime library.

    Attributes:
        path: where it is.
        toolkit: the major version of CUDA that it, and the compiler beside it, belong to; None
            where a variable names it.
        version: CuTe DSL's version that it belongs to; None where a variable names it.
    """

    path: Path
    toolkit: int | None
    version: str | None


def distribution(toolkit: int) -> str:
    """Return the distribution that holds the library for a major version of CUDA."""
    return f"nvidia-cutlass-dsl-libs-cu{toolkit}"


@cache
def driver() -> int | None:
    """Return the major version of CUDA that the driver is for, None where there is no driver."""
    version = ctypes.c_int(0)
    try:
        answer = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value // 1000 if answer == 0 else None


@cache
def find() -> Library | None:
    """Return the library that CuTe DSL would choose here, None where none is installed.

    That is what CUTE_DSL_LIBS names, else the newest that the driver can serve.
    """
    for name in os.environ.get(ENVIRONMENT_VARIABLE, "").split(os.pathsep):
        if name.endswith(NAME) and Path(name).exists():
            return Library(Path(name), None, None)
    most = driver()
    for toolkit in TOOLKITS:
        if most is not None and toolkit > most:
            continue
        try:
            wheel = importlib.metadata.distribution(distribution(toolkit))
        except importlib.metadata.PackageNotFoundError:
            continue
        path = Path(str(wheel.locate_file(f"nvidia_cutlass_dsl/cu{toolkit}/lib/{NAME}")))
        if path.exists():
            return Library(path, toolkit, wheel.version)
    return None


@cache
def load(path: Path) -> ctypes.CDLL:
    """Load the library once; what names it afterwards gets this one.

    Raises:
        OSError: it does not load.
    """
    return ctypes.CDLL(str(path))
