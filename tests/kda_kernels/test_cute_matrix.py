"""Every default variant compiles for every declared architecture without a GPU, without spills.

Most of a compile is tracing Python and lowering what that gives, and neither asks for the
architecture: both are done once a variant, and only the last step, from LLVM's language to machine
code, for each architecture. That this is the machine code that ships is a test of its own; that
linking changes nothing of what a kernel takes is one of test_cute_compile.py. One test a kernel, so
that the suite's workers get this file first.
"""

import contextlib
import functools
import itertools
import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass.cute", reason="needs CuTe DSL (nvidia-cutlass-dsl)")

from cutlass._mlir import ir, passmanager
from cutlass.base_dsl.compiler import Compiler

from kda_kernels import artifacts
from kda_kernels._cute import compile as backend
from kda_kernels._cute import parallel, resources
from kda_kernels._cute.target import TARGETS
from kda_kernels.contract.example import Kinds, example
from kda_kernels.packed_fused_decode.config import SCHEDULES
from kda_kernels.plan import CONTRACTS
from kda_kernels.schedule import REGISTERS

OPERATORS = [contract.name for contract in CONTRACTS]
LAST_STEP = "cuda-to-binary"
MACHINE, NOWHERE = "nvptx64-nvidia-cuda", "nowhere64-none-none"
LET_START = "griddepcontrol.launch_dependents;"
UNPACK = "shl.b32 $0, $1, 16;"
"""How a bfloat16 state becomes float32 first (device.py)."""


def jobs(operator):
    """Every default variant of an operator for every target, a variant's targets together."""
    matrix = parallel.launch_of(operator).matrix
    every = [(n, v, t) for t in TARGETS for n, v in enumerate(matrix(overlap=t.can_overlap))]
    for number, variant, target in sorted(every, key=lambda job: (job[0], job[2].can_overlap)):
        job = parallel.Job(operator, variant, target)
        yield pytest.param(job, id=f"{operator}-{number}-{target.arch}")


def everything():
    return list(itertools.chain.from_iterable(map(jobs, OPERATORS)))


class Traced(Exception):
    """All that was asked for."""


def traced(operator, variant, target):
    """What the compiler is given for a variant: its context, the module's text, the passes."""
    given = []

    def stop(compiler, module, pipeline, *_, **__):
        given.append((ir.Context.current, str(module), pipeline))
        raise Traced

    # Where the device is here to run the code, the exception arrives in another one.
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Exception):
        patch.setattr(Compiler, "compile", stop)
        backend.compile_variant(variant, target, parallel.launch_of(operator).trace)
    (found,) = given
    return found


def run(module, passes):
    """Run passes, given as text, on a module in place."""
    manager = passmanager.PassManager.parse(passes)
    manager.enable_verifier(False)
    manager.run(module.operation)


@functools.lru_cache(maxsize=2)
def lowered(operator, variant, target):
    """A variant in LLVM's language: its context, the module's text, the passes that are left.

    The passes before the last step have no name that they could be asked for by. So all are run for
    a machine that does not exist, and the last step stops there.
    """
    context, text, pipeline = traced(operator, variant, target)
    with context, ir.Location.unknown():
        _, left = str(passmanager.PassManager.parse(pipeline)).split(f",{LAST_STEP}")
        module = ir.Module.parse(text)
        with contextlib.suppress(ir.MLIRError):
            run(module, pipeline.replace("cubin-chip", f"cubin-triple={NOWHERE} cubin-chip", 1))
        text = str(module)
    assert f'triple = "{NOWHERE}"' in text
    return context, text.replace(NOWHERE, MACHINE), f"builtin.module({LAST_STEP}{left}"


def machine_code(job, like):
    """Return a kernel's machine code, lowered for another architecture, and its host's code."""
    context, text, passes = lowered(job.operator, job.variant, like)
    text = text.replace(like.arch, job.target.arch)
    # Specific architectures are also told by their number alone.
    text = text.replace(f"[{like.arch.rstrip('a')}]", f"[{job.target.arch.rstrip('a')}]")
    with context, ir.Location.unknown():
        module = ir.Module.parse(text)
        run(module, passes)
        host = str(module)
    (code,) = (text for text in re.findall(r'"((?:[^"\\]|\\.)*)"', host) if r"\7FELF" in text)
    return unescaped(code), host


def unescaped(text):
    """Return the bytes of a string as the intermediate language writes it."""
    either = re.compile(rb"\\([0-9A-F]{2})|\\(.)", re.DOTALL)
    byte = lambda found: bytes([int(found[1], 16)]) if found[1] else found[2]  # noqa: E731
    return either.sub(byte, text.encode("latin-1"))


def what_it_takes(job):
    """The facts of a job's kernel; a second run of the suite finds them again."""
    like = next(t for t in TARGETS if t.can_overlap == job.target.can_overlap)

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
def test_machine_code_of_a_variant_lowered_for_another_architecture_is_what_ships(
    operator, target, tmp_path
):
    launch = parallel.launch_of(operator)
    matrix = launch.matrix(overlap=target.can_overlap)
    job = parallel.Job(operator, matrix[TARGETS.index(target) - 4], target)  # of both layouts
    compiled = backend.compile_variant(job.variant, target, launch.trace, tmp_path)
    (shipped,) = tmp_path.glob("*.cubin")
    other = next(t for t in TARGETS if t.can_overlap == target.can_overlap and t != target)
    code, host = machine_code(job, other)
    assert shipped.read_bytes() in code
    asked = resources.shared_memory_of_launch(host)
    assert asked == resources.shared_memory_of_launch(str(compiled.ir_module))


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_next_kernel_is_let_start_before_the_state_is_used(operator, layout, monkeypatch):
    """No instruction moves across that, so a state used before it is waited for there."""
    monkeypatch.setenv("KDA_PDL", "1")
    launch = parallel.launch_of(operator)
    variant = [
        v
        for v in launch.matrix(overlap=True)
        if v.layout == layout and (getattr(v, "state", None) or v.types["state"]) == "bfloat16"
    ][-1]
    _, text, _ = traced(operator, variant, TARGETS[-1])
    assert text.count(LET_START) >= 1
    assert text.index(LET_START) < text.index(UNPACK)


@pytest.mark.parametrize("window", ["SD", "DS"])
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_eight_tokens_a_sequence_take_no_local_memory(state, layout, window):
    """Tokens are made side by side, and long windows written whole, where registers are left."""
    contract = next(c for c in CONTRACTS if c.name == "packed_fused_decode")
    scalars = {"state_layout": layout, "lower_bound": -5.0}
    values = example(contract, {"T": 8}, Kinds(state=state, window=window), scalars)
    launch = parallel.launch_of(contract.name)
    _, schedule = SCHEDULES[layout, state.itemsize][-1]
    variant = launch.variant_of(values, torch.bfloat16, processors=1)
    many = replace(variant, schedule=schedule)
    target = next(t for t in TARGETS if t.arch == "sm_90a")
    assert what_it_takes(parallel.Job(contract.name, many, target))["local"] == 0
