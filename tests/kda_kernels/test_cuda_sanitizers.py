"""Compute Sanitizer finds nothing in small calls of every operator."""

import importlib
import itertools
import os
import shutil
import subprocess
import sys

import pytest
import torch

from kda_kernels.plan import CONTRACTS
from kda_kernels.schedule import every
from kda_kernels.testing import small_calls

OPERATORS = {contract.name: contract for contract in CONTRACTS}
CALLS = 32


@pytest.mark.parametrize("name", OPERATORS)
def test_the_small_calls_run(name):
    assert small_calls.run("cpu", OPERATORS[name]) == CALLS


@pytest.mark.parametrize("name", OPERATORS)
def test_the_small_calls_take_every_schedule(name):
    launch, config = (
        importlib.import_module(f"kda_kernels.{name}.{module}") for module in ("launch", "config")
    )
    taken = {
        (values["state_layout"], values["state"].itemsize, variant.schedule)
        for values in small_calls.calls(OPERATORS[name])
        for variant in [launch.variant_of(values, torch.bfloat16, processors=132)]
    }
    for layout, itemsize in itertools.product(("vk", "kv"), (4, 2)):
        wanted = every(config.SCHEDULES, layout, itemsize)
        assert taken >= {(layout, itemsize, schedule) for schedule in wanted}


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_sanitizer_finds_nothing(name, tool):
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("needs compute-sanitizer (CUDA toolkit)")
    # PyTorch itself asks the driver for functions that it may not have.
    checks = [program, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9"]
    calls = [sys.executable, "-m", "kda_kernels.testing.small_calls", "cuda", name]
    there = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*checks, *calls], check=False, capture_output=True, text=True, env=there, timeout=900
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{CALLS} calls" in done.stdout
