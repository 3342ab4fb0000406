"""Many variants at once: worker processes that compile into the cache.

Lives here: sharing the work out. CuTe DSL's compiler belongs to one thread of a process, so each
worker is a process of its own; it is a fresh interpreter and no fork, because the caller may hold
CUDA, locks and threads. Not here: compiling (compile.py).
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import ModuleType

from kda_kernels import artifacts
from kda_kernels._cute import compile as backend
from kda_kernels._cute.link import find_linker
from kda_kernels._cute.target import Target

WORTH_A_WORKER = 3
"""Variants: a worker starts in as much time as it compiles so many."""


@dataclass(frozen=True)
class Job:
    """A variant of an operator to compile for an architecture."""

    operator: str
    variant: Hashable
    target: Target

    @property
    def identity(self) -> dict[str, str]:
        """What tells it apart in a bundle."""
        names = (self.operator, self.target.arch, repr(self.variant))
        return dict(zip(("operator", "arch", "variant"), names, strict=True))


def launch_of(operator: str) -> ModuleType:
    """Return an operator's launch module: ``variant_of``, ``matrix``, ``trace``, ``SOURCES``."""
    return importlib.import_module(f"kda_kernels.{operator}.launch")


def build_all(jobs: Sequence[Job], processes: int | None = None) -> list[artifacts.Artifact]:
    """Return the shared objects of jobs, in order; what the cache lacks is compiled.

    Args:
        jobs: what to compile.
        processes: at most so many at a time; by default as many as there are cores. A worker is
            started only where there is enough to do.

    Raises:
        UnsupportedError: nothing here links objects.
    """
    missing = [job for job in jobs if _found(job) is None]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    most = min(processes or cores or 1, len(missing) // WORTH_A_WORKER)
    if most > 1 and find_linker() is not None:
        _share_out(missing, most)
    fresh = {id(job) for job in missing}
    made = [_build(job) for job in jobs]
    return [
        artifacts.Artifact(m.path, built=id(job) in fresh, facts=m.facts)
        for job, m in zip(jobs, made, strict=True)
    ]


def _found(job: Job) -> artifacts.Artifact | None:
    return backend.find(job.operator, job.variant, job.target, launch_of(job.operator).SOURCES)


def _build(job: Job) -> artifacts.Artifact:
    launch = launch_of(job.operator)
    return backend.build(job.operator, job.variant, job.target, launch.trace, launch.SOURCES)


def _share_out(jobs: Sequence[Job], processes: int) -> None:
    """Let workers fill the cache. What one of them fails at is left to the caller, errors too."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        artifacts.ENVIRONMENT_VARIABLE: str(artifacts.cache_directory()),
    }
    workers = []
    for number in range(processes):
        worker = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        workers.append((worker, pickle.dumps(jobs[number::processes])))
    for worker, share in workers:
        if worker.stdin is not None:
            worker.stdin.write(share)
            worker.stdin.close()
    for worker, _ in workers:
        worker.wait()


def main() -> None:
    """Compile the jobs that stand on the standard input into the cache."""
    for job in pickle.load(sys.stdin.buffer):
        _build(job)


if __name__ == "__main__":
    main()
