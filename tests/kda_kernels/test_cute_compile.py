"""Kernels compile on a machine without a GPU, are kept, found again, shared out and bundled.

Every variant for every architecture: test_cute_matrix.py.
"""

import re
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass.cute", reason="needs CuTe DSL (nvidia-cutlass-dsl)")

from kda_kernels import artifacts
from kda_kernels._cute import bundle, packing, parallel, resources, runtime
from kda_kernels._cute import compile as backend
from kda_kernels._cute.target import TARGETS
from kda_kernels.packed_decode import launch
from kda_kernels.packed_decode.contract import CONTRACT
from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import Case, draw
from kda_kernels.testing.process import WITHOUT_CUTE_DSL, report_of

CUOBJDUMP = shutil.which("cuobjdump")
FEW, MANY = {"B": 1, "H": 1, "S": 2}, {"B": 700, "H": 1, "S": 700}
OPERATORS = [contract.name for contract in CONTRACTS]
RUN_ON = TARGETS[3]
"""The architecture that the kernels are claimed to run on."""


def variant(sizes, layout, state, **scalars):
    fields = {"scalars": {"state_layout": layout} | scalars, "state_dtype": state}
    return launch.variant_of(draw(CONTRACT, Case(sizes=sizes, **fields)), torch.bfloat16, 132)


@pytest.mark.parametrize("operator", OPERATORS)
def test_linking_changes_nothing_of_what_a_kernel_takes(operator, tmp_path):
    """So test_cute_matrix.py may judge kernels before they are linked."""
    launching = parallel.launch_of(operator)
    job = parallel.Job(operator, launching.matrix()[-1], RUN_ON)
    compiled = backend.compile_variant(job.variant, RUN_ON, launching.trace, tmp_path)
    (code,) = tmp_path.glob("*.cubin")
    asked = resources.shared_memory_of_launch(str(compiled.ir_module))
    found = replace(resources.read(code.read_bytes()), dynamic=asked)
    ((_, facts),) = launch_all([job])
    assert found.facts() == facts


def launch_all(jobs):
    """Compile jobs in this process: the suite's other worker has the other core."""
    return [(job, one.facts) for job, one in zip(jobs, parallel.build_all(jobs, 1), strict=True)]


@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump of a CUDA toolkit")
@pytest.mark.parametrize("target", [TARGETS[0], RUN_ON, TARGETS[-1]], ids=lambda t: t.arch)
def test_what_kernels_take_is_what_nvidia_s_tool_reads(target, tmp_path):
    wanted = variant(FEW, "kv", torch.float32)
    backend.compile_variant(wanted, target, launch.trace, tmp_path)
    (code,) = tmp_path.glob("*.cubin")
    assert target.arch in code.name
    command = [CUOBJDUMP, "--dump-resource-usage", str(code)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (line,) = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", said)
    ((_, facts),) = launch_all([parallel.Job("packed_decode", wanted, target)])
    registers, stack, shared, local = map(int, line)
    assert (facts["registers"], facts["shared"]) == (registers, shared)
    assert facts["local"] == max(stack, local)


def test_a_variant_is_compiled_once_and_found_again(monkeypatch, tmp_path):
    monkeypatch.setenv(artifacts.ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))
    traced = []

    def trace(wanted):
        traced.append(wanted)
        return launch.trace(wanted)

    wanted = variant(FEW, "vk", torch.float32, first_slot=None, lower_bound=None)
    for _ in range(2):
        monkeypatch.setattr(backend, "_LOADED", {})
        for _ in range(2):
            loaded = backend.load("packed_decode", wanted, RUN_ON, trace, launch.SOURCES)
            assert callable(loaded)
    assert traced == [wanted]


def test_the_key_names_the_architecture_and_changes_with_variant_and_sources():
    few, many = (variant(sizes, "vk", torch.float32) for sizes in (FEW, MANY))
    keys = {
        backend.key("packed_decode", wanted, target, sources)
        for wanted in (few, many)
        for target in TARGETS
        for sources in (launch.SOURCES, launch.SOURCES[:2])
    }
    assert len(keys) == 4 * len(TARGETS)
    assert all(any(f"-{t.arch}-" in key for t in TARGETS) for key in keys)


def test_processes_that_compile_together_fill_the_cache_with_loadable_objects(
    monkeypatch, tmp_path
):
    monkeypatch.setenv(artifacts.ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))
    jobs = [parallel.Job("packed_decode", v, RUN_ON) for v in launch.matrix()[:6]]
    shared_out = []
    share_out = parallel._share_out
    monkeypatch.setattr(
        parallel, "_share_out", lambda *given: shared_out.append(given) or share_out(*given)
    )
    # What workers leave undone would be compiled here.
    monkeypatch.setattr(parallel, "_build", parallel._found)
    made = parallel.build_all(jobs, processes=2)
    assert [len(given[0]) for given in shared_out] == [6]
    assert all(one.built and one.facts["registers"] for one in made)
    assert not any(one.built for one in parallel.build_all(jobs))
    for job in jobs:
        assert callable(
            backend.load("packed_decode", job.variant, RUN_ON, launch.trace, launch.SOURCES)
        )


LOAD_TWO = """
import json, os, sys
os.environ["PATH"] = ""
import kda_ops
from kda_kernels._cute import compile as backend
from kda_kernels._cute.target import TARGETS
from kda_kernels.errors import UnsupportedError
from kda_kernels.packed_decode import launch
found = kda_ops.load_bundle(sys.argv[1])
variants = launch.matrix()
load = lambda v: backend.load("packed_decode", v, TARGETS[3], launch.trace, launch.SOURCES)
facts = {"served": callable(load(variants[0])), "runtime": str(found.runtime)}
try:
    load(variants[1])
except UnsupportedError as error:
    facts["missing"] = str(error)
print(json.dumps(facts))
"""


@pytest.mark.parametrize("with_runtime", [False, True], ids=["installed", "own runtime"])
def test_a_bundle_is_loaded_where_neither_cute_dsl_nor_a_linker_is(with_runtime, tmp_path):
    job = parallel.Job("packed_decode", launch.matrix()[0], RUN_ON)
    (made,) = parallel.build_all([job])
    library = runtime.find()
    packing.write(
        tmp_path,
        bundle.versions(backend.dsl_version(), library.toolkit),
        {"packed_decode": bundle.source_hash(launch.SOURCES)},
        [(job.identity, made)],
        library.path if with_runtime else None,
    )
    facts = report_of(WITHOUT_CUTE_DSL + LOAD_TWO, str(tmp_path))
    assert facts["served"] is True
    assert facts["runtime"] == str(tmp_path / runtime.NAME if with_runtime else library.path)
    asked = "add it where it is: kda_ops.warmup('packed_decode', ..., arch='sm_90a'"
    assert asked in facts["missing"]
