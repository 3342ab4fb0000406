"""Every default variant compiles for every declared architecture without a GPU, without spills.

Half of a compile is tracing Python, which does not ask for the architecture: a variant is traced
once, and what the compiler is then given becomes machine code for each architecture. That this is
the machine code that ships is a test of its own; that linking changes nothing of what a kernel
takes is one of test_cute_compile.py. One test a kernel, so that the suite's workers get this file
first.
"""

import contextlib
import functools
import importlib.util
import itertools
import re
from dataclasses import replace

import pytest

pytest.importorskip("cutlass.cute", reason="needs CuTe DSL (nvidia-cutlass-dsl)")

from cutlass._mlir import ir, passmanager
from cutlass.base_dsl.compiler import Compiler

from kda_kernels import artifacts
from kda_kernels._cute import compile as backend
from kda_kernels._cute import parallel, resources
from kda_kernels._cute.target import TARGETS
from kda_kernels.plan import CONTRACTS

OPERATORS = [
    contract.name
    for contract in CONTRACTS
    if importlib.util.find_spec(f"kda_kernels.{contract.name}.launch") is not None
]
REGISTERS = 65536
"""Of a processor, on every architecture."""


def jobs(operator):
    """Every default variant of an operator for every target, a variant's targets together."""
    matrix = parallel.launch_of(operator).matrix
    for number, pair in enumerate(zip(matrix(overlap=False), matrix(overlap=True), strict=True)):
        for target in TARGETS:
            job = parallel.Job(operator, pair[target.can_overlap], target)
            yield pytest.param(job, id=f"{operator}-{number}-{target.arch}")


def everything():
    return list(itertools.chain.from_iterable(map(jobs, OPERATORS)))


class Traced(Exception):
    """All that was asked for."""


@functools.lru_cache(maxsize=2)
def traced(operator, variant, arch):
    """What the compiler is given for a variant: its context, the module's text, the passes."""
    given = []

    def stop(compiler, module, pipeline, *_, **__):
        given.append((ir.Context.current, str(module), pipeline))
        raise Traced

    (target,) = (target for target in TARGETS if target.arch == arch)
    # Where the device is here to run the code, the exception arrives in another one.
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Exception):
        patch.setattr(Compiler, "compile", stop)
        backend.compile_variant(variant, target, parallel.launch_of(operator).trace)
    (found,) = given
    return found


def machine_code(job, traced_for):
    """Return the machine code of a kernel traced for another architecture, and its host's code."""
    context, module, pipeline = traced(job.operator, job.variant, traced_for)
    with context, ir.Location.unknown():
        compiled = ir.Module.parse(module.replace(traced_for, job.target.arch))
        passes = passmanager.PassManager.parse(pipeline.replace(traced_for, job.target.arch))
        passes.enable_verifier(False)
        passes.run(compiled.operation)
        host = str(compiled)
    (code,) = (text for text in re.findall(r'"((?:[^"\\]|\\.)*)"', host) if r"\7FELF" in text)
    return unescaped(code), host


def unescaped(text):
    """Return the bytes of a string as the intermediate language writes it."""
    either = re.compile(rb"\\([0-9A-F]{2})|\\(.)", re.DOTALL)
    byte = lambda found: bytes([int(found[1], 16)]) if found[1] else found[2]  # noqa: E731
    return either.sub(byte, text.encode("latin-1"))


def what_it_takes(job):
    """The facts of a job's kernel; a second run of the suite finds them again."""
    like = next(t.arch for t in TARGETS if t.can_overlap == job.target.can_overlap)

    def make(path):
        code, host = machine_code(job, like)
        path.write_bytes(code)
        asked = resources.shared_memory_of_launch(host)
        return replace(resources.read(code), dynamic=asked).facts()

    sources = parallel.launch_of(job.operator).SOURCES
    key = backend.key(job.operator, job.variant, job.target, sources)
    return artifacts.get_or_build(f"{key}-code", make).facts


@pytest.mark.parametrize("job", everything())
def test_a_kernel_compiles_spills_nothing_and_its_blocks_fit_a_processor(job):
    facts = what_it_takes(job)
    assert facts["local"] == 0
    assert facts["dynamic"] is not None
    cut = job.variant.schedule
    # sm_86 has room for 16 blocks whatever their size; asking for more bounds nothing.
    threads = 32 * cut.warps * min(cut.min_blocks, 16)
    assert facts["registers"] * threads <= REGISTERS


@pytest.mark.parametrize("target", [TARGETS[2], TARGETS[3], TARGETS[-1]], ids=lambda t: t.arch)
@pytest.mark.parametrize("operator", OPERATORS)
def test_machine_code_of_a_variant_traced_for_another_architecture_is_what_ships(
    operator, target, tmp_path
):
    launch = parallel.launch_of(operator)
    job = parallel.Job(operator, launch.matrix(overlap=target.can_overlap)[0], target)
    compiled = backend.compile_variant(job.variant, target, launch.trace, tmp_path)
    (shipped,) = tmp_path.glob("*.cubin")
    other = next(t.arch for t in TARGETS if t.can_overlap == target.can_overlap and t != target)
    code, host = machine_code(job, other)
    assert shipped.read_bytes() in code
    asked = resources.shared_memory_of_launch(host)
    assert asked == resources.shared_memory_of_launch(str(compiled.ir_module))
