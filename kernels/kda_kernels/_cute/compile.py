"""From a variant to a callable: find it in a bundle or the cache, else compile, link, keep; load.

Lives here: what a key is made of, compiling without a GPU, loading through TVM-FFI, and the
errors of a machine or a moment where that cannot be done. Not here: the cache itself
(artifacts.py), linking (link.py), bundles (bundle.py), many variants at once (parallel.py), kernels
and variants (<op>/), the choice of a backend (plan.py).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kda_kernels import artifacts
from kda_kernels._cute import bundle, resources, runtime
from kda_kernels._cute.link import find_linker, libraries, link
from kda_kernels._cute.target import TARGETS, Target, target_of
from kda_kernels.errors import UnsupportedError

DISTRIBUTION = "nvidia-cutlass-dsl"
FLOOR = (4, 8, 1)
HOW_TO_GET_IT = "pip install 'kda-ops[cu13]' (or [cu12], as torch's CUDA version)"

Trace = Callable[[Any], tuple[Any, tuple[Any, ...]]]
_LOADED: dict[Hashable, Callable[..., None]] = {}
_LOCK = threading.Lock()


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

    With a bundle in use it may be missing. The error names what is missing, the version that was
    found and how to get the right one.

    Raises:
        ContractError: KDA_BUNDLE names a bundle that does not fit.
    """
    lack = "" if bundle.selected() is not None else missing()
    if lack:
        floor = ".".join(map(str, FLOOR))
        rule = f"on cpu, or CuTe DSL {floor} or newer be installed ({HOW_TO_GET_IT})"
        raise UnsupportedError(operator, argument, rule, f"{device} and {lack}")


@cache
def missing() -> str:
    """Return what is wrong with CuTe DSL in words, an empty string where nothing is."""
    version = dsl_version()
    if version is None and importlib.util.find_spec("cutlass") is None:
        return f"no {DISTRIBUTION}"
    said = f"{DISTRIBUTION} {version or 'of unknown version'}"
    if version is not None and bundle.numbers(version) < FLOOR:
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


def load(
    operator: str, variant: Hashable, target: Target, trace: Trace, sources: Sequence[str]
) -> Callable[..., None]:
    """Return the compiled function of a variant: of this process, the bundle, the cache, or new.

    Args:
        operator: its name; also the exported function's.
        variant: what the function is fixed to; its repr is part of the key.
        target: the architecture.
        trace: from the variant to the function to compile and its arguments.
        sources: files of the operator that the code depends on, relative to the package.

    Raises:
        UnsupportedError: the function is not loaded yet and a CUDA graph is being captured, which
            neither compiling nor loading may happen in; or it is not in the bundle and cannot be
            compiled here.
        ContractError: the bundle does not fit this machine or this version.
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
            "compiled and loaded before a CUDA graph is captured: run kda_ops.warmup(...) for "
            "these shapes, dtypes and layouts, or call the operator once outside of the capture"
        )
        raise UnsupportedError(operator, "the kernel", rule, "a first use during stream capture")


def _load(
    operator: str, variant: Hashable, target: Target, trace: Trace, sources: Sequence[str]
) -> Callable[..., None]:
    """Find or build a variant's shared object and load it."""
    chosen = bundle.selected()
    if chosen is not None:
        path = chosen.find(operator, target.arch, repr(variant))
        if path is not None:
            return _open(operator, path, chosen.runtime)
        if missing():
            rule = (
                f"in the bundle {chosen.directory} where CuTe DSL is not installed; add it where "
                f"it is: kda_ops.warmup('{operator}', ..., arch='{target.arch}', bundle=...)"
            )
            raise UnsupportedError(operator, "the kernel", rule, f"{variant} for {target.arch}")
    if find_linker() is None:
        _warn_that_nothing_is_kept()
        return compile_variant(variant, target, trace)
    made = build(operator, variant, target, trace, sources)
    library = runtime.find()
    return _open(operator, made.path, library.path if library else Path(libraries()[0]))


def _open(operator: str, path: Path, library: Path) -> Callable[..., None]:
    """Load a shared object behind the runtime library that it calls."""
    import tvm_ffi  # noqa: PLC0415 - importing kda_kernels loads no FFI

    runtime.load(library)
    return tvm_ffi.load_module(str(path))[operator]


def is_loaded(operator: str, variant: Hashable, target: Target) -> bool:
    """Tell whether this process has a variant's function."""
    return (operator, repr(variant), target) in _LOADED


def key(operator: str, variant: Hashable, target: Target, sources: Sequence[str]) -> str:
    """Return the cache key: sources, versions, the compiler's toolkit, target, variant."""
    import tvm_ffi  # noqa: PLC0415

    library = runtime.find()
    toolkit = library.toolkit if library is not None else None
    facts = (str(dsl_version()), str(toolkit), tvm_ffi.__version__, repr(variant))
    digest = hashlib.sha256(bundle.source_hash(sources).encode())
    for fact in facts:
        digest.update(fact.encode() + b"\0")
    return f"{operator}-{target.arch}-{digest.hexdigest()[:32]}"


def find(
    operator: str, variant: Hashable, target: Target, sources: Sequence[str]
) -> artifacts.Artifact | None:
    """Return what the cache has of a variant, None where it has nothing; compiles nothing."""
    return artifacts.look_up(key(operator, variant, target, sources))


def build(
    operator: str, variant: Hashable, target: Target, trace: Trace, sources: Sequence[str]
) -> artifacts.Artifact:
    """Return the shared object of a variant from the cache, compiled if it is not there.

    What it takes of a processor is in the artifact's facts (resources.py).

    Raises:
        UnsupportedError: nothing here links objects.
    """
    linker = find_linker()
    if linker is None:
        rule = "linked by cc, gcc or clang on PATH (or CC)"
        raise UnsupportedError(operator, "the kernel", rule, "a machine without one")

    def make(path: Path) -> artifacts.Facts:
        compiled = compile_variant(variant, target, trace)
        link(operator, compiled, linker, path)
        found = resources.read(path.read_bytes())
        asked = resources.shared_memory_of_launch(str(compiled.ir_module))
        return replace(found, dynamic=asked).facts()

    return artifacts.get_or_build(key(operator, variant, target, sources), make)


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


@cache
def _warn_that_nothing_is_kept() -> None:
    """Say once that kernels are compiled again in every process."""
    warnings.warn(
        "kda_ops cannot keep compiled GPU kernels, because linking them needs cc, gcc or clang on "
        "PATH (or CC); they are compiled again in every process.",
        RuntimeWarning,
        stacklevel=2,
    )
