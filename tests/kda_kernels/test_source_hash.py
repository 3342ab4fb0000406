"""What the hash of a kernel's sources covers, read off the imports of the code for GPUs."""

import importlib
import re
from pathlib import Path

import pytest

import kda_kernels
from kda_kernels._cute import bundle
from kda_kernels.plan import CONTRACTS

OPERATORS = [contract.name for contract in CONTRACTS]


@pytest.mark.parametrize("name", OPERATORS)
def test_the_source_hash_covers_whatever_code_for_gpus_imports(name):
    package = Path(kda_kernels.__file__).parent
    files = bundle.source_files(importlib.import_module(f"kda_kernels.{name}.launch").SOURCES)
    device_code = [p for p in files if re.search("^(import|from) cutlass", p.read_text(), re.M)]
    assert package / name / "cute.py" in device_code
    for file in device_code:
        for module, names in re.findall(
            r"^from kda_kernels([.\w]*) import ([\w, ]+)", file.read_text(), re.M
        ):
            folder = package.joinpath(*module.split(".")[1:])
            inner = [folder / f"{n.split(' ')[0]}.py" for n in names.split(", ")]
            assert set(inner if folder.is_dir() else [folder.with_suffix(".py")]) <= set(files)
