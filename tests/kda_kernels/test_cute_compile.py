"""Kernels compile for every declared architecture on a machine without a GPU, without spills."""

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
FEW, MANY = {"B": 1, "H": 1, "S": 2}, {"B": 600, "H": 1, "S": 600}


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


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_every_architecture_compiles_and_nothing_spills(target, state, layout, tmp_path):
    # Architectures share schedules: each is seen with few rows or with many, sm_90a with both.
    both = target.arch == "sm_90a"
    many = (state is torch.float32) == (layout == "vk")
    for sizes in (FEW, MANY) if both else (MANY,) if many else (FEW,):
        wanted = variant(sizes, layout, state)
        room = tmp_path / str(sizes["B"])
        room.mkdir()
        backend.compile_variant(wanted, target, launch._trace, room)
        (code,) = room.glob("*.cubin")
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
        return launch._trace(wanted)

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
