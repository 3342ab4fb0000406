"""GPU kernels ahead of their first call: compiling variants, keeping them in bundles, loading them.

Lives here: what warm-up (warming.py) and ``kda-ops build --arch`` (bundling.py) share. Not here:
which calls are meant (calls.py), how kernels are compiled and kept (kda_kernels._cute).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from kda_kernels._cute import bundle as bundles
from kda_kernels._cute import compile as backend
from kda_kernels._cute import packing, parallel, runtime
from kda_kernels._cute.link import find_linker
from kda_kernels._cute.parallel import Job
from kda_kernels._cute.target import TARGETS, Target
from kda_kernels.artifacts import Artifact
from kda_kernels.contract.example import blank
from kda_kernels.errors import UnsupportedError
from kda_kernels.plan import cuda_kernel
from kda_ops.calls import Call


def target_named(arch: str) -> Target:
    """Return an architecture by its name.

    Raises:
        ValueError: kernels are not compiled for it.
    """
    for target in TARGETS:
        if target.arch == arch:
            return target
    known = ", ".join(t.arch for t in TARGETS)
    raise ValueError(f"kernels are not compiled for {arch!r}; they are for {known}")


def jobs_of(calls: Iterable[Call], target: Target, processors: int) -> dict[Job, Call]:
    """Return the variants that serve calls, each with one of its calls.

    Raises:
        UnsupportedError: no CUDA kernel serves a call.
    """
    found: dict[tuple[str, str], tuple[Job, Call]] = {}
    for call in calls:
        if not call.facts.dims[call.operator.rows]:
            continue
        launch = parallel.launch_of(call.operator.name)
        dtype, overlap = call.facts.output_dtype, target.can_overlap
        variant = launch.variant_of(call.values, dtype, processors, overlap=overlap)
        job = Job(call.operator.name, variant, target)
        found.setdefault((job.operator, repr(variant)), (job, call))
    return dict(found.values())


def require_compiler(operator: str, where: str) -> None:
    """Raise UnsupportedError where CuTe DSL cannot compile."""
    missing = backend.missing()
    if missing:
        rule = f"compiled by CuTe DSL ({backend.HOW_TO_GET_IT})"
        raise UnsupportedError(operator, "the kernel", rule, f"{where} and {missing}")


def compile_jobs(jobs: Sequence[Job], processes: int | None = None) -> list[Artifact]:
    """Return the shared objects of jobs, in order; what the cache lacks is compiled.

    Raises:
        UnsupportedError: CuTe DSL or a linker is missing.
    """
    if jobs:
        require_compiler(jobs[0].operator, jobs[0].target.arch)
    return parallel.build_all(jobs, processes)


def pack(
    directory: str | os.PathLike[str],
    jobs: Sequence[Job],
    made: Sequence[Artifact],
    *,
    with_runtime: bool = False,
) -> None:
    """Put compiled kernels into a bundle.

    Raises:
        UnsupportedError: CuTe DSL's runtime library was not found, and the bundle should have it.
    """
    library = runtime.find()
    if with_runtime and library is None:
        rule = f"beside {runtime.NAME} ({backend.HOW_TO_GET_IT})"
        raise UnsupportedError("load_bundle", "a bundle with its runtime library", rule, "none")
    toolkit = library.toolkit if library is not None else None
    operators = dict.fromkeys(job.operator for job in jobs)
    packing.write(
        Path(directory).expanduser(),
        bundles.versions(str(backend.dsl_version()), toolkit),
        {name: bundles.source_hash(parallel.launch_of(name).SOURCES) for name in operators},
        [(job.identity, one) for job, one in zip(jobs, made, strict=True)],
        library.path if with_runtime and library is not None else None,
    )


def prepare(jobs: Sequence[Job], processes: int | None = None) -> set[Job]:
    """Compile what this process could not load now; return which jobs were not there before.

    Without a linker nothing is kept, so that loading compiles.
    """
    chosen = bundles.selected()
    lacking = [
        job
        for job in jobs
        if not backend.is_loaded(job.operator, job.variant, job.target)
        and (chosen is None or chosen.find(*job.identity.values()) is None)
    ]
    if find_linker() is None:
        return set(lacking)
    if not lacking or (chosen is not None and backend.missing()):
        return set()  # loading says what is missing
    made = compile_jobs(lacking, processes)
    return {job for job, one in zip(lacking, made, strict=True) if one.built}


def launch_once(call: Call, device: torch.device) -> None:
    """Load a call's kernel and launch it on zeros, which puts its code onto the device.

    CUDA loads code lazily, which it must not while a graph is captured. Pools without slots are
    behind the launch, so all that is written is an output that nobody sees.
    """
    operator = call.operator
    with torch.cuda.device(device), torch.no_grad():
        values = blank(operator, call.values, device)
        shape, dtype = call.facts.output_shape, call.facts.output_dtype
        output = torch.empty(shape, dtype=dtype, device=device)
        kernel = cuda_kernel(operator, values, replace(call.facts, device=device))
        kernel(*[values[argument.name] for argument in operator.abi], output)
