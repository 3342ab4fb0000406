"""What every test runs under: caches of its own, cores shared, GPU tests skipped with a reason.

No inputs and no comparisons live here: those are in kda_kernels.testing, next to the contracts.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_RUN_DIRECTORY = "KDA_TEST_RUN_DIRECTORY"


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment once, in the first process; xdist workers and subprocesses inherit it."""
    if _is_worker(config) or _RUN_DIRECTORY in os.environ:
        return
    run = Path(tempfile.mkdtemp(prefix="kda-tests-"))
    os.environ[_RUN_DIRECTORY] = str(run)
    # Kernels are found again by content, so the directory may outlive the run: a second run then
    # compiles no C++. It is never the user's own cache.
    kernels = Path(config.rootpath, ".pytest_cache", "kda")
    if not _writable(kernels):
        kernels = run / "kda"
        kernels.mkdir(mode=0o700)
    os.environ["KDA_CACHE_DIR"] = str(kernels)
    # Compiled graphs depend on the pass under test, so they live for one run only.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(run / "inductor")
    os.environ["HF_HOME"] = str(run / "huggingface")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(run / "hypothesis")
    # One process compiles, no pool of helpers is left behind.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    workers = getattr(config.option, "numprocesses", None) or 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // workers)))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove what lived for this run only."""
    if _is_worker(config):
        return
    run = os.environ.pop(_RUN_DIRECTORY, None)
    if run is not None:
        shutil.rmtree(run, ignore_errors=True)


def _writable(directory: Path) -> bool:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need more CUDA devices than there are, and say how many there are."""
    needed = {"gpu": 1, "multigpu": 2}
    marked = [
        (item, n) for item in items for name, n in needed.items() if item.get_closest_marker(name)
    ]
    if not marked:
        return
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item, n in marked:
        if found < n:
            item.add_marker(pytest.mark.skip(reason=f"needs {n} CUDA device(s), found {found}"))


@pytest.fixture(autouse=True, scope="module")
def _dynamo_starts_empty_in_every_module() -> Iterator[None]:
    """Compiled code is shared by the tests of one file and by no others.

    Once a file, not once a test: fixtures hold compiled functions, and a reset would compile them
    again. A test that counts compilations resets for itself.
    """
    yield
    if "torch._dynamo" in sys.modules:
        import torch

        torch._dynamo.reset()
