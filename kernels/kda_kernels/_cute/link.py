"""From a compiled function to a shared object: which linker, and how it is called.

Lives here: the linker. Not here: compiling (compile.py) and where objects are kept (artifacts.py).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_LINK_SECONDS = 120


def link(operator: str, compiled: Any, linker: Sequence[str], path: Path) -> None:  # noqa: ANN401
    """Write a compiled function as a shared object that exports it under the operator's name.

    The object names the runtime library and TVM-FFI's library, and no folder: both are loaded
    before it.
    """
    room = path.with_suffix(".o")
    compiled.export_to_c(str(room), function_name=operator)
    command = [*linker, "-shared", "-s", "-o", str(path), str(room), *libraries()]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=_LINK_SECONDS, check=False
        )
    finally:
        room.unlink(missing_ok=True)
    if ran.returncode != 0:
        raise RuntimeError(f"{' '.join(linker)} cannot link kda::{operator}:\n{ran.stderr}")


def libraries() -> list[str]:
    """Return the libraries that every compiled kernel calls: CuTe DSL's runtime, then TVM-FFI's."""
    from cutlass.cute.runtime import find_runtime_libraries  # noqa: PLC0415

    found: list[str] = find_runtime_libraries(enable_tvm_ffi=True)
    return found


def find_linker() -> tuple[str, ...] | None:
    """Return the compiler driver that links: CC if set, else the first of the usual names."""
    named = os.environ.get("CC", "").strip()
    candidates = [shlex.split(named)] if named else [[n] for n in ("cc", "gcc", "clang")]
    for command in candidates:
        program = shutil.which(command[0])
        if program is not None:
            return (program, *command[1:])
    return None
