"""Kernels compile for every declared architecture on a machine without a GPU, without spills."""

import itertools
import re
import shutil
import subprocess

import pytest
import torch

pytest.importorskip("cutlass.cute", reason="needs CuTe DSL (nvidia-cutlass-dsl)")

from kda_kernels import artifacts
from kda_kernels._cute import compile as backend
from kda_kernels._cute.target import TARGETS
from kda_kernels.packed_decode import launch
from kda_kernels.packed_decode.contract import CONTRACT
from kda_kernels.testing.cases import Case, draw

CUOBJDUMP = shutil.which("cuobjdump")
FEW, MANY = {"B": 1, "H": 1, "S": 2}, {"B": 700, "H": 1, "S": 700}
LOADS = (1, 100, 160, 250, 400, 600, 1000, 4000)
"""Rows of one head that reach every schedule of 132 processors."""


def variant(sizes, layout, state, **scalars):
    fields = {"scalars": {"state_layout": layout} | scalars, "state_dtype": state}
    return launch.variant_of(draw(CONTRACT, Case(sizes=sizes, **fields)), torch.bfloat16, 132)


def resources(code):
    """Registers, stack, shared memory and local memory of the only kernel of an object."""
    said = subprocess.run(
        [CUOBJDUMP, "--dump-resource-usage", str(code)], capture_output=True, text=True, check=True
    ).stdout
    (line,) = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", said)
    return dict(zip(("registers", "stack", "shared", "local"), map(int, line), strict=True))


def matrix():
    """Every schedule on sm_90a, one of few and one of many rows on the other architectures."""
    for target in TARGETS:
        for layout, state in itertools.product(("vk", "kv"), (torch.float32, torch.bfloat16)):
            many = (state is torch.float32) == (layout == "vk")
            loads = LOADS if target.arch == "sm_90a" else (LOADS[-1],) if many else (LOADS[0],)
            wanted = [variant({"B": b, "H": 1, "S": b}, layout, state) for b in loads]
            # Ranks are a dictionary, so variants are told apart by what they print.
            for found in {repr(v): v for v in wanted}.values():
                cut = found.schedule
                name = f"{target.arch}-{layout}-{found.state}-{cut.warps}x{cut.tile}"
                yield pytest.param(target, found, id=name)


@pytest.mark.parametrize(("target", "wanted"), list(matrix()))
def test_every_architecture_compiles_and_nothing_spills(target, wanted, tmp_path):
    backend.compile_variant(wanted, target, launch.trace, tmp_path)
    (code,) = tmp_path.glob("*.cubin")
    assert target.arch in code.name
    if CUOBJDUMP is not None:
        found = resources(code)
        assert (found["stack"], found["local"]) == (0, 0), found
        # sm_86 has room for 16 blocks whatever their size; asking for more bounds nothing.
        threads = 32 * wanted.schedule.warps * min(wanted.schedule.min_blocks, 16)
        assert found["registers"] * threads <= 65536


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
            loaded = backend.load("packed_decode", wanted, TARGETS[3], trace, launch.SOURCES)
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
