"""What is on this machine, and what to do about what is missing.

Lives here: the examination and its report, `kda-ops doctor`. Every examiner stands on its own: one
that fails becomes a finding, so that a broken part never hides the others. Not here: building or
repairing anything.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_PROBE_SECONDS = 120
_CUTE_DSL_FLOOR = (4, 8, 1)
_OPERATORS = ("packed_decode", "fused_decode", "packed_fused_decode")

_PYTHON = "python"
_TORCH = "torch"
_TVM_FFI = "tvm-ffi"
_COMPILER = "C++ compiler"
_CACHE = "kernel cache"
_CPU_OPERATORS = "CPU operators"
_CUDA = "CUDA"
_CUTE_DSL = "CuTe DSL"
_GPU_OPERATORS = "GPU operators"
_BUNDLE = "bundle"
_BACKEND = "compile backend"

_GRAPHS = "graphs capture pools in buffers, StateCache or mark_state_static, else 'mutated inputs'"

_VITAL = (_TORCH, _CPU_OPERATORS)

_REMEDIES = {
    _TORCH: "install torch 2.11 or newer in this environment",
    _TVM_FFI: "pip install apache-tvm-ffi",
    _COMPILER: "install g++ or clang++ (Debian, Ubuntu: apt-get install g++) or point CXX at one",
    _CACHE: "set KDA_CACHE_DIR to a directory that only you can write",
    _CPU_OPERATORS: "reinstall this package; if that does not help, please report the line above",
    _CUDA: "for a GPU install a CUDA build of torch and NVIDIA's driver",
    _CUTE_DSL: "for GPU kernels: pip install 'kda-ops[cu13]' (or [cu12], as torch's CUDA version)",
    _BUNDLE: "build it again (kda-ops build --arch ... --out DIR), or unset KDA_BUNDLE",
    _BACKEND: "pip install -e . (torch reads the entry points of installed distributions)",
}


class State(Enum):
    """How a subject was found; the value is the word that the report prints."""

    GOOD = "ok"
    ABSENT = "absent"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """One subject of the examination.

    Attributes:
        subject: what was looked at.
        state: how it was found.
        fact: what was found, in one line.
        remedy: what to do, or an empty string where nothing needs doing.
    """

    subject: str
    state: State
    fact: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Look at everything the operators can use; never raises."""
    with warnings.catch_warnings():
        # What warnings would say is in the findings.
        warnings.simplefilter("ignore")
        return [_examined(subject, examiner) for subject, examiner in _EXAMINERS.items()]


def report(findings: list[Finding]) -> str:
    """Write findings as text, one line each and one more where there is something to do."""
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state.value:<6}  {finding.subject:<{width}}  {finding.fact}")
        if finding.remedy:
            lines.append(f"{'':<6}  {'':<{width}}  -> {finding.remedy}")
    return "\n".join(lines)


def status(findings: list[Finding]) -> int:
    """Return 1 when the operators cannot run on this machine at all, else 0."""
    return int(any(f.subject in _VITAL and f.state is State.BROKEN for f in findings))


def _examined(subject: str, examiner: Callable[[str], Finding]) -> Finding:
    try:
        return examiner(subject)
    except Exception as error:
        fact = f"{type(error).__name__}: {_first_line(error)}"
        return Finding(subject, State.BROKEN, fact, _REMEDIES.get(subject, ""))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python(subject: str) -> Finding:
    fact = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding(subject, State.GOOD, fact)


def _torch(subject: str) -> Finding:
    import torch

    fact = f"{torch.__version__}, {torch.get_num_threads()} threads"
    return Finding(subject, State.GOOD, fact)


def _tvm_ffi(subject: str) -> Finding:
    import tvm_ffi  # noqa: F401

    return Finding(subject, State.GOOD, _version("apache-tvm-ffi") or "version unknown")


def _compiler(subject: str) -> Finding:
    from kda_kernels._cpu import build

    try:
        compiler = build.find_compiler()
    except build.CompilerMissing as missing:
        fact = _first_line(missing).split(";")[0]
        return Finding(subject, State.ABSENT, fact, _REMEDIES[_COMPILER])
    vectors = build.describe()["vectors"]
    return Finding(subject, State.GOOD, f"{compiler.command[0]} ({compiler.version}); {vectors}")


def _cache(subject: str) -> Finding:
    """Look at the cache directory, and at what it holds."""
    from kda_kernels import artifacts
    from kda_kernels._cpu import build

    configured = os.environ.get(artifacts.ENVIRONMENT_VARIABLE, "")
    wanted = Path(configured).expanduser() if configured else artifacts.default_directory()
    used = artifacts.cache_directory()
    if used != wanted:
        where = f"{wanted} cannot be used" if wanted else "there is no home directory"
        fact = f"{where}: kernels are compiled again in every process"
        return Finding(subject, State.BROKEN, fact, _REMEDIES[_CACHE])
    facts = build.describe()
    missing = [name for name in _OPERATORS if facts[f"kernel {name}"] == "not built yet"]
    if missing:
        remedy = "nothing to do (built on first use), or build them now: kda-ops build"
        return Finding(subject, State.GOOD, f"{used}: not built yet: {', '.join(missing)}", remedy)
    return Finding(subject, State.GOOD, f"{used}: the kernels of all operators")


def _cpu_operators(subject: str) -> Finding:
    """Run one small step by the reference, and by the kernel if it is built; they must agree."""
    import torch

    from kda_kernels import plan
    from kda_kernels._cpu import build

    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 384), (2, 128), (2, 1), (1,), (128,), (2, 1, 128, 128)]
    call = [torch.randn(shape, generator=generator) for shape in shapes]
    scalars = (None, None, -5.0, 0, "vk")
    state, expected = call[5].clone(), torch.empty(2, 1, 1, 128)
    plan.reference("packed_decode")(*call, *scalars, expected)
    found = [name for name in _OPERATORS if build.describe()[f"kernel {name}"] != "not built yet"]
    if "packed_decode" in found:
        call[5], output = state, torch.empty_like(expected)
        torch.ops.kda.packed_decode.out(*call, None, output=output)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        return Finding(subject, State.GOOD, "compiled kernel and PyTorch reference agree")
    try:
        build.find_compiler()
    except build.CompilerMissing:
        fact = "run as their PyTorch reference, which is right and slow"
        return Finding(subject, State.ABSENT, fact, _REMEDIES[_COMPILER])
    return Finding(subject, State.GOOD, "PyTorch reference runs; kernels are built on first use")


def _cuda(subject: str) -> Finding:
    import torch

    if torch.version.cuda is None:
        fact = "this torch was built without CUDA"
        return Finding(subject, State.ABSENT, fact, _gpu_remedy(subject))
    if not torch.cuda.is_available():
        fact = f"torch was built for CUDA {torch.version.cuda}, but no driver or no device answers"
        return Finding(subject, State.ABSENT, fact, _gpu_remedy(subject))
    devices = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        devices.append(f"{facts.name} (sm_{facts.major}{facts.minor})")
    return Finding(subject, State.GOOD, f"CUDA {torch.version.cuda}: {', '.join(devices)}", _GRAPHS)


def _cute_dsl(subject: str) -> Finding:
    """Look at CuTe DSL in a process of its own: a broken one has been seen to end the process."""
    found = _version("nvidia-cutlass-dsl")
    present = found is not None or importlib.util.find_spec("cutlass") is not None
    if not present:
        return Finding(subject, State.ABSENT, "not installed", _gpu_remedy(subject))
    probe = subprocess.run(
        [sys.executable, "-c", "import cutlass.cute"],
        capture_output=True,
        text=True,
        timeout=_PROBE_SECONDS,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    version = found or "of unknown version"
    if probe.returncode != 0:
        last = (probe.stderr.strip().splitlines() or [f"exit status {probe.returncode}"])[-1]
        fact = f"{version} is installed but does not import: {last}"
        return Finding(subject, State.BROKEN, fact, _REMEDIES[_CUTE_DSL])
    if found is not None and _numbers(found) < _CUTE_DSL_FLOOR:
        floor = ".".join(map(str, _CUTE_DSL_FLOOR))
        fact = f"{version} is older than {floor}"
        return Finding(subject, State.BROKEN, fact, _REMEDIES[_CUTE_DSL])
    return Finding(subject, State.GOOD, version)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _with_gpu_kernel() -> list[str]:
    return [name for name in _OPERATORS if importlib.util.find_spec(f"kda_kernels.{name}.cute")]


def _gpu_remedy(subject: str) -> str:
    """Nobody needs a GPU's software for a version without GPU kernels."""
    return f"not needed on CPUs; {_REMEDIES[subject]}" if _with_gpu_kernel() else ""


def _gpu_operators(subject: str) -> Finding:
    """Say which GPU kernels there are, operator by operator."""
    with_kernel = _with_gpu_kernel()
    if not with_kernel:
        fact = "no GPU kernels in this version; a CUDA tensor gets an UnsupportedError"
        return Finding(subject, State.ABSENT, fact)
    return Finding(subject, State.GOOD, f"GPU kernels for {', '.join(with_kernel)}")


def _bundle(subject: str) -> Finding:
    """Look at the bundle of compiled GPU kernels that is in use, if one is."""
    from kda_kernels._cute import bundle

    found = bundle.selected()  # raises what does not fit
    if found is None:
        return Finding(
            subject, State.ABSENT, "KDA_BUNDLE is not set: GPU kernels are compiled here"
        )
    kernels = f"{len(found.objects)} GPU kernels for {', '.join(found.architectures)}"
    return Finding(subject, State.GOOD, f"{found.directory}: {kernels}")


def _backend(subject: str) -> Finding:
    names = {
        point.name: point.value
        for point in importlib.metadata.entry_points(group="torch_dynamo_backends")
    }
    if "kda" not in names:
        return Finding(subject, State.ABSENT, "torch does not see it", _REMEDIES[_BACKEND])
    return Finding(subject, State.GOOD, f"torch.compile(backend='kda') is {names['kda']}")


_EXAMINERS = {
    _PYTHON: _python,
    _TORCH: _torch,
    _TVM_FFI: _tvm_ffi,
    _COMPILER: _compiler,
    _CACHE: _cache,
    _CPU_OPERATORS: _cpu_operators,
    _CUDA: _cuda,
    _CUTE_DSL: _cute_dsl,
    _GPU_OPERATORS: _gpu_operators,
    _BUNDLE: _bundle,
    _BACKEND: _backend,
}
