"""What an installation contains: the wheel's files and entry points, the editable install's too."""

import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The project's wheel, built offline from a copy of what git would hand over."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for folder in ("kda_ops", "kernels/kda_kernels"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                copy = source / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(path.read_bytes())
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(target), str(source)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    (path,) = target.glob("kda_ops-*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_wheel_holds_every_source_file_of_both_packages(wheel):
    wanted = {
        path.relative_to(folder).as_posix()
        for folder, package in ((ROOT, "kda_ops"), (ROOT / "kernels", "kda_kernels"))
        for path in (folder / package).rglob("*")
        if path.suffix in (".py", ".cc", ".h") or path.name == "py.typed"
    }
    assert {"kda_ops/py.typed", "kda_kernels/py.typed"} <= wanted
    held = {name for name in wheel.namelist() if not name.startswith("kda_ops-")}
    assert held == wanted


def test_the_wheel_installs_the_command_and_the_compile_backend(wheel):
    (name,) = [n for n in wheel.namelist() if n.endswith("entry_points.txt")]
    text = wheel.read(name).decode()
    assert "kda-ops = kda_ops.__main__:main" in text
    assert "kda = kda_ops.passes.backend:kda" in text


def test_an_unpacked_wheel_runs_the_compiled_kernel_from_its_own_files(wheel, tmp_path):
    wheel.extractall(tmp_path)
    code = (
        "import kda_ops, kda_kernels; from kda_kernels._cpu import build;"
        "build.load('packed_decode'); print(kda_ops.__file__, kda_kernels.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(Path(file).is_relative_to(tmp_path) for file in done.stdout.split())


def test_torch_finds_the_backend_of_the_installed_project():
    import torch

    assert "kda" in torch._dynamo.list_backends()


def test_installed_metadata_and_package_agree_on_the_version():
    import kda_ops

    assert importlib.metadata.version("kda-ops") == kda_ops.__version__
    declared = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert declared.group(1) == kda_ops.__version__


def test_only_torch_and_the_ffi_are_required_and_cute_dsl_is_split_by_cuda_version():
    required = importlib.metadata.requires("kda-ops") or []
    names = sorted(re.split(r"[<>=\[; ]", r)[0] for r in required if "extra ==" not in r)
    assert names == ["apache-tvm-ffi", "torch"]
    extras = {r.split(";")[0].strip() for r in required if "cutlass" in r}
    assert extras == {"nvidia-cutlass-dsl>=4.8.1", "nvidia-cutlass-dsl[cu13]>=4.8.1"}
