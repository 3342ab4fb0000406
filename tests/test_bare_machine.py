"""Importing and calling where something is missing or broken: compiler, driver, CuTe DSL.

Every test runs a process of its own, because what is asked is what a fresh interpreter does.
"""

import os
import re
import subprocess
import sys

import pytest

# A legal call, the same call with fake tensors, an illegal call; prints what came of them.
CALLS = """
import sys, warnings
import torch, kda_ops
from torch._subclasses.fake_tensor import FakeTensorMode

def arguments(rows=3, heads=2):
    torch.manual_seed(0)
    activations = [(rows, 3 * heads * 128), (rows, heads * 128), (rows, heads)]
    return [
        *(torch.randn(shape).to(torch.bfloat16) for shape in activations),
        torch.randn(heads), torch.randn(heads * 128), torch.randn(5, heads, 128, 128),
        torch.tensor([3, -1, 0], dtype=torch.int32),
    ]

values = arguments()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        output = kda_ops.packed_kda_decode(*values)
print("sums:", output.double().abs().sum().item(), values[5].double().abs().sum().item())
print("null row is zero:", bool((output[1] == 0).all()))
print("warnings:", [str(w.message) for w in caught if "kda" in str(w.message)])
with FakeTensorMode() as mode:
    fake = kda_ops.packed_kda_decode(*map(mode.from_tensor, arguments()))
    print("fake:", list(fake.shape), fake.dtype)
try:
    kda_ops.packed_kda_decode(*arguments()[:3], torch.randn(7), *arguments()[4:])
except ValueError as error:
    print("refused:", error)
print("cutlass:", any(name.split(".")[0] == "cutlass" for name in sys.modules))
print("cuda:", torch.cuda.is_initialized())
"""
IMPORTS = """
import sys
import torch, kda_kernels, kda_kernels.plan, kda_ops, kda_ops.passes
print("cutlass:", any(name.split(".")[0] == "cutlass" for name in sys.modules))
print("cuda:", torch.cuda.is_initialized())
"""


def run(code, *options, without=(), **environment):
    """Run code in a fresh interpreter; what it printed as `fact: value` lines, as a dictionary."""
    environment = {k: v for k, v in {**os.environ, **environment}.items() if k not in without}
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^([a-z ]+): (.*)$", done.stdout, re.MULTILINE))


@pytest.fixture(scope="module")
def here():
    """What the calls give on this machine as it is."""
    return run(CALLS)


def test_a_fresh_process_calls_fakes_and_refuses_as_the_contract_says(here):
    assert here["null row is zero"] == "True"
    assert here["warnings"] == "[]"
    assert here["fake"] == "[3, 1, 2, 128] torch.bfloat16"
    assert here["refused"].startswith("kda::packed_decode: A_log must be")
    assert (here["cutlass"], here["cuda"]) == ("False", "False")


def test_importing_builds_nothing_and_wakes_neither_cutlass_nor_cuda(tmp_path):
    cache = tmp_path / "cache"
    assert run(IMPORTS, KDA_CACHE_DIR=str(cache)) == {"cutlass": "False", "cuda": "False"}
    assert not cache.exists()


def test_the_cpu_needs_no_driver_and_never_touches_a_broken_cute_dsl(here, tmp_path):
    touched = tmp_path / "touched"
    (tmp_path / "cutlass").mkdir()
    # Whatever error a broken installation raises, it is not met: nothing imports it.
    stub = f"open({str(touched)!r}, 'w').close()\nraise RuntimeError('broken on purpose')\n"
    (tmp_path / "cutlass" / "__init__.py").write_text(stub)
    bare = {"PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "LD_LIBRARY_PATH": ""}
    assert run(CALLS, **bare) == here
    assert not touched.exists()


def test_without_a_compiler_the_reference_serves_with_one_warning(here, tmp_path):
    facts = run(CALLS, PATH=str(tmp_path), KDA_CACHE_DIR=str(tmp_path / "cache"), without=["CXX"])
    assert facts["warnings"].count("kda::packed_decode runs as its slow PyTorch reference") == 1
    assert "compiler" in facts["warnings"]
    kernel, reference = ([float(x) for x in f["sums"].split()] for f in (here, facts))
    assert reference == pytest.approx(kernel, rel=1e-3)
    same = here.keys() - {"warnings", "sums"}
    assert {k: facts[k] for k in same} == {k: here[k] for k in same}


@pytest.mark.parametrize("option", ["-O", "-OO"])
def test_an_optimised_interpreter_changes_nothing(option, here):
    assert run(CALLS, option) == here
