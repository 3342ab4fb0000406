"""From a variant to a callable: compile for an architecture, link, keep in the cache, load.

Lives here: what a key is made of, compiling without a GPU, linking, loading through TVM-FFI, and
the errors of a machine or a moment where that cannot be done. Not here: the cache itself
(artifacts.py), kernels and variants (<op>/), the choice of a backend (plan.py).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kda_kernels import artifacts
from kda_kernels._cute.target import TARGETS, Target, target_of
from kda_kernels.errors import UnsupportedError

DISTRIBUTION = "nvidia-cutlass-dsl"
FLOOR = (4, 8, 1)
HOW_TO_GET_IT = "pip install 'kda-ops[cu13]' (or [cu12], as torch's CUDA version)"

Trace = Callable[[Any], tuple[Any, tuple[Any, ...]]]
_LOADED: dict[Hashable, Callable[..., None]] = {}
_LOCK = threading.Lock()
_LINK_SECONDS = 120


def target_for(operator: str, argument: str, device: torch.device) -> Target:
    """Return the target of a device.

    Raises:
        UnsupportedError: its architecture is none that kernels are compiled for.
    """
    capability = torch.cuda.get_device_capability(device)
    target = target_of(capability)
    if target is None:
        known = ", ".join(t.arch for t in TARGETS)
        rule = f"on cpu or on a GPU of {known}"
        fact = f"{device} of compute capability {capability[0]}.{capability[1]}"
        raise UnsupportedError(operator, argument, rule, fact)
    return target


def require(operator: str, argument: str, device: torch.device) -> None:
    """Raise UnsupportedError unless CuTe DSL is installed, new enough, and imports.

    The error names what is missing, the version that was found and how to get the right one.
    """
    missing = _missing()
    if missing:
        floor = ".".join(map(str, FLOOR))
        rule = f"on cpu, or CuTe DSL {floor} or newer be installed ({HOW_TO_GET_IT})"
        raise UnsupportedError(operator, argument, rule, f"{device} and {missing}")


@cache
def _missing() -> str:
    """Return what is wrong with CuTe DSL in words, an empty string where nothing is."""
    version = dsl_version()
    if version is None and importlib.util.find_spec("cutlass") is None:
        return f"no {DISTRIBUTION}"
    said = f"{DISTRIBUTION} {version or 'of unknown version'}"
    if version is not None and _numbers(version) < FLOOR:
        return said
    try:
        import cutlass.cute  # noqa: F401, PLC0415 - on the first call that needs it
    except Exception as error:  # a broken installation raises anything
        return f"{said}, which does not import: {type(error).__name__}: {error}"
    return ""


def dsl_version() -> str | None:
    """Return the version of CuTe DSL that is installed, None where there is none."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def load(
    operator: str, variant: Hashable, target: Target, trace: Trace, sources: Sequence[str]
) -> Callable[..., None]:
    """Return the compiled function of a variant: from this process, the cache, or the compiler.

    Args:
        operator: its name; also the exported function's.
        variant: what the function is fixed to; its repr is part of the key.
        target: the architecture.
        trace: from the variant to the function to compile and its arguments.
        sources: files of the operator that the code depends on, relative to the package.

    Raises:
        UnsupportedError: the function is not loaded yet and a CUDA graph is being captured, which
            neither compiling nor loading may happen in.
    """
    known = (operator, repr(variant), target)
    found = _LOADED.get(known)
    if found is not None:
        return found
    _refuse_while_capturing(operator)
    with _LOCK:
        if known not in _LOADED:
            _LOADED[known] = _load(operator, variant, target, trace, sources)
        return _LOADED[known]


def _refuse_while_capturing(operator: str) -> None:
    """Raise while the current stream is being captured."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        rule = (
            "compiled before a CUDA graph is captured: call the operator once outside of the "
            "capture with the same shapes, dtypes and layouts"
        )
        raise UnsupportedError(operator, "the kernel", rule, "a first use during stream capture")


def _load(
    operator: str, variant: Hashable, target: Target, trace: Trace, sources: Sequence[str]
) -> Callable[..., None]:
    """Find or build a variant's shared object and load it."""
    import tvm_ffi  # noqa: PLC0415

    linker = find_linker()
    if linker is None:
        _warn_that_nothing_is_kept()
        return compile_variant(variant, target, trace)
    made = artifacts.get_or_build(
        key(operator, variant, target, sources),
        lambda path: build(operator, compile_variant(variant, target, trace), linker, path),
    )
    return tvm_ffi.load_module(str(made.path))[operator]


def key(operator: str, variant: Hashable, target: Target, sources: Sequence[str]) -> str:
    """Return the cache key: sources, versions, where the runtime library is, target, variant."""
    import tvm_ffi  # noqa: PLC0415

    here = Path(__file__).parents[1]
    files = [*sorted(here.glob("_cute/*.py")), *(here / name for name in sources)]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    facts = (str(dsl_version()), tvm_ffi.__version__, *runtime_libraries(), repr(variant))
    for fact in facts:
        digest.update(fact.encode() + b"\0")
    return f"{operator}-{target.arch}-{digest.hexdigest()[:32]}"


def compile_variant(
    variant: Hashable, target: Target, trace: Trace, machine_code: Path | None = None
) -> Any:  # noqa: ANN401
    """Compile a variant for an architecture; needs neither a GPU nor a driver.

    With ``machine_code``, a directory, the GPU's code is left there too, to be looked at.
    """
    from cutlass import cute  # noqa: PLC0415 - imported on the first call that compiles

    function, arguments = trace(variant)
    options = f"--enable-tvm-ffi --gpu-arch {target.arch}"
    if machine_code is not None:
        options += f" --keep-cubin --dump-dir={machine_code}"
    return cute.compile(function, *arguments, options=options)


def build(operator: str, compiled: Any, linker: Sequence[str], path: Path) -> None:  # noqa: ANN401
    """Write a compiled function as a shared object that exports it under the operator's name."""
    room = path.with_suffix(".o")
    compiled.export_to_c(str(room), function_name=operator)
    libraries = runtime_libraries()
    # The runtime library is found where it was when the object was linked; the key holds the place.
    places = [f"-Wl,-rpath,{Path(library).parent}" for library in libraries]
    command = [*linker, "-shared", "-s", "-o", str(path), str(room), *libraries, *places]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=_LINK_SECONDS, check=False
        )
    finally:
        room.unlink(missing_ok=True)
    if ran.returncode != 0:
        raise RuntimeError(f"{' '.join(linker)} cannot link kda::{operator}:\n{ran.stderr}")


def runtime_libraries() -> list[str]:
    """Return the libraries that every compiled kernel is linked against."""
    from cutlass.cute.runtime import find_runtime_libraries  # noqa: PLC0415

    libraries: list[str] = find_runtime_libraries(enable_tvm_ffi=True)
    return libraries


def find_linker() -> tuple[str, ...] | None:
    """Return the compiler driver that links: CC if set, else the first of the usual names."""
    named = os.environ.get("CC", "").strip()
    candidates = [shlex.split(named)] if named else [[n] for n in ("cc", "gcc", "clang")]
    for command in candidates:
        program = shutil.which(command[0])
        if program is not None:
            return (program, *command[1:])
    return None


@cache
def _warn_that_nothing_is_kept() -> None:
    """Say once that kernels are compiled again in every process."""
    warnings.warn(
        "kda_ops cannot keep compiled GPU kernels, because linking them needs cc, gcc or clang on "
        "PATH (or CC); they are compiled again in every process.",
        RuntimeWarning,
        stacklevel=2,
    )
