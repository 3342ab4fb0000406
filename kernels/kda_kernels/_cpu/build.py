"""From ``<op>/cpu.cc`` to a callable: find the compiler, compile into the cache, load.

Lives here: which compiler and flags, what a cache key is made of, loading through TVM-FFI.
Not here: the cache itself (artifacts.py) and what happens without a kernel (plan.py).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kda_kernels import artifacts

OPERATORS = ("packed_decode", "fused_decode", "packed_fused_decode")

# No contraction: a multiply-add happens where the source says so, and equal inputs give equal bits
# in every operator. No -ffast-math: NaN and infinity must stay what they are.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
)
HOW_TO_GET_THE_KERNEL = (
    "install a C++17 compiler (g++ or clang++, for instance `apt-get install g++`) or set CXX to "
    "one, then run `kda-ops build`"
)
_COMPILE_SECONDS = 300


class CompilerMissing(RuntimeError):
    """No CPU kernel can be had: there is no C++ compiler, or it failed; the text says which."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the command, and what it says about itself."""

    command: tuple[str, ...]
    version: str


@dataclass(frozen=True)
class Built:
    """What ``kda-ops build`` reports of one operator."""

    operator: str
    path: Path
    built: bool


def find_compiler() -> Compiler:
    """Return the C++ compiler: CXX if set, else the first of c++, g++ and clang++ on PATH.

    Raises:
        CompilerMissing: there is none, or the one that CXX names does not run.
    """
    named = os.environ.get("CXX", "").strip()
    candidates = [shlex.split(named)] if named else [["c++"], ["g++"], ["clang++"]]
    for command in candidates:
        program = shutil.which(command[0])
        if program is None:
            continue
        version = _version((program, *command[1:]))
        if version is not None:
            return Compiler((program, *command[1:]), version)
    what = f"CXX={named} does not run" if named else "there is no c++, g++ or clang++ on PATH"
    raise CompilerMissing(f"{what}; to get the CPU kernels, {HOW_TO_GET_THE_KERNEL}")


@cache
def _version(command: tuple[str, ...]) -> str | None:
    try:
        asked = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = asked.stdout.splitlines()
    return lines[0].strip() if lines else None


@cache
def cpu_features() -> str:
    """Return what the code is compiled for: the architecture and the processor's feature list."""
    features = platform.processor()
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    features = " ".join(sorted(value.split()))
                    break
    except OSError:
        pass
    return f"{platform.machine()} {features}"


def native_flag() -> str:
    """Return the flag that makes the compiler use everything this processor has."""
    return "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"


def _sources(operator: str) -> list[Path]:
    here = Path(__file__).parent
    return [here.parent / operator / "cpu.cc", *sorted(here.glob("*.h"))]


def _key_without_compiler(operator: str) -> str:
    import tvm_ffi  # noqa: PLC0415  (importing kda_kernels loads no FFI)

    digest = hashlib.sha256()
    for source in _sources(operator):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    for fact in (*FLAGS, native_flag(), cpu_features(), tvm_ffi.__version__):
        digest.update(fact.encode() + b"\0")
    return f"{operator}-{digest.hexdigest()[:24]}-"


def _key(operator: str, compiler: Compiler) -> str:
    said = "\0".join((*compiler.command, compiler.version))
    return _key_without_compiler(operator) + hashlib.sha256(said.encode()).hexdigest()[:12]


def _compile(operator: str, compiler: Compiler, path: Path) -> None:
    from tvm_ffi import libinfo  # noqa: PLC0415

    library = Path(libinfo.find_libtvm_ffi())
    tail = [
        *(f"-I{directory}" for directory in _include_directories()),
        "-o",
        str(path),
        str(_sources(operator)[0]),
        f"-L{library.parent}",
        "-ltvm_ffi",
    ]
    said = ""
    for flags in ((*FLAGS, native_flag()), FLAGS):  # a compiler may know no such processor
        try:
            ran = subprocess.run(
                [*compiler.command, *flags, *tail],
                capture_output=True,
                text=True,
                timeout=_COMPILE_SECONDS,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            said = str(error)
            continue
        if ran.returncode == 0 and path.exists():
            return
        said = said or ran.stderr.strip()
    shown = "\n".join(said.splitlines()[:12])
    raise CompilerMissing(
        f"{' '.join(compiler.command)} ({compiler.version}) cannot compile {operator}; to get the "
        f"CPU kernels, {HOW_TO_GET_THE_KERNEL}. It said:\n{shown}"
    )


def _include_directories() -> list[str]:
    from tvm_ffi import libinfo  # noqa: PLC0415

    return [
        str(Path(__file__).parent),
        libinfo.find_include_path(),
        libinfo.find_dlpack_include_path(),
    ]


def _object(operator: str) -> artifacts.Artifact:
    """Return the operator's shared object from the cache, compiled if it is not there.

    A machine without a compiler still gets what a compiler built for the same sources, processor
    and TVM-FFI: an image can be filled by ``kda-ops build`` and shipped without one.
    """
    try:
        compiler = find_compiler()
    except CompilerMissing:
        shipped = artifacts.find_like(_key_without_compiler(operator))
        if shipped is None:
            raise
        return artifacts.Artifact(shipped, built=False)
    return artifacts.get_or_build(
        _key(operator, compiler), lambda path: _compile(operator, compiler, path)
    )


@cache
def load(op_name: str) -> Callable[..., None]:
    """Return the kernel of ``op_name``: a TVM-FFI function with the contract's ABI.

    The first call in a process finds or compiles the object (seconds), later ones return the same
    function.

    Raises:
        CompilerMissing: the kernel is not in the cache and cannot be compiled here.
        ValueError: there is no such operator.
    """
    if op_name not in OPERATORS:
        raise ValueError(f"there is no CPU kernel {op_name!r}; there are {', '.join(OPERATORS)}")
    import tvm_ffi  # noqa: PLC0415

    module = tvm_ffi.load_module(str(_object(op_name).path))
    addresses = _torch_threads()
    if addresses is not None:
        module["set_threads"](*addresses)
    return module[op_name]


@cache
def _torch_threads() -> tuple[int, ...] | None:
    """Return the addresses of torch's parallel loop and thread count, None where not exported.

    They come from torch's stable C interface, so kernels share torch's threads (and follow
    torch.set_num_threads) without being linked against torch.
    """
    import torch  # noqa: PLC0415

    directory = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            library = ctypes.CDLL(str(directory / name))
            functions = (library.torch_parallel_for, library.torch_get_num_threads)
        except (OSError, AttributeError):
            continue
        return tuple(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
    return None


def build_all() -> list[Built]:
    """Find or compile the kernels of all operators; return what was found and what was built.

    Raises:
        CompilerMissing: one of them is not in the cache and cannot be compiled here.
    """
    with ThreadPoolExecutor(max_workers=len(OPERATORS)) as compilers:
        objects = list(compilers.map(_object, OPERATORS))
    return [
        Built(operator, artifact.path, artifact.built)
        for operator, artifact in zip(OPERATORS, objects, strict=True)
    ]


def describe() -> dict[str, str]:
    """Return the facts that ``kda-ops doctor`` shows, by name; never raises, never compiles.

    Keys: ``compiler``, ``vectors``, ``cache``, ``threads``, and ``kernel <op>`` per operator.
    """
    facts: dict[str, str] = {}
    try:
        compiler = find_compiler()
        facts["compiler"] = f"{compiler.command[0]} ({compiler.version})"
        keys = {operator: _key(operator, compiler) for operator in OPERATORS}
    except CompilerMissing as missing:
        facts["compiler"] = f"missing: {missing}"
        keys = {}
    facts["vectors"] = _vectors()
    facts["cache"] = str(artifacts.cache_directory())
    facts["threads"] = "torch's own" if _torch_threads() is not None else "one"
    for operator in OPERATORS:
        if operator in keys:
            path = artifacts.find(keys[operator])
        else:
            path = artifacts.find_like(_key_without_compiler(operator))
        facts[f"kernel {operator}"] = str(path) if path else "not built yet"
    return facts


def _vectors() -> str:
    """Return the vector width that the kernels take on this processor (as vector.h chooses it)."""
    features = cpu_features().split()
    if "avx512f" in features:
        return "AVX-512, 16 floats"
    if "avx2" in features and "fma" in features:
        return "AVX2, 8 floats"
    if features[0] in ("aarch64", "arm64"):
        return "NEON, 4 floats"
    return "portable, 4 floats"
