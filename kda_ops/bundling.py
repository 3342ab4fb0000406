"""``kda-ops build --arch``: the default variants compiled for architectures that need not be here.

Lives here: the command, and the page of what every kernel takes (docs/compiled.md). Not here: which
variants are the default (kda_kernels.<operator>.launch), compiling and bundles (ahead.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kda_kernels._cute import compile as backend
from kda_kernels._cute import runtime
from kda_kernels._cute.parallel import Job, launch_of
from kda_kernels._cute.target import TARGETS, Target
from kda_kernels.artifacts import Facts
from kda_kernels.errors import UnsupportedError
from kda_kernels.plan import CONTRACTS
from kda_ops.ahead import compile_jobs, pack, target_named


def run(args: argparse.Namespace) -> int:
    """Compile, say what came of it, write the bundle and the report that were asked for.

    Returns:
        The exit status: 1 where something cannot be compiled or a kernel needs local memory.
    """
    try:
        targets = targets_named(args.arch)
        jobs = [job for target in targets for job in matrix(target)]
        made = compile_jobs(jobs, args.processes)
        results = [(job, one.facts) for job, one in zip(jobs, made, strict=True)]
        print(summary(results, sum(one.built for one in made)))
        if args.report:
            Path(args.report).write_text(page(results), encoding="utf-8")
        found = spilling(results)
        for job, facts in found:
            said = f"{facts['local']} bytes of local memory: {job.variant}"
            print(f"kda-ops build: {job.target.arch} {job.operator} {said}", file=sys.stderr)
        if args.out and not found:
            pack(args.out, jobs, made, with_runtime=args.with_runtime)
            print(f"bundle of {len(jobs)} kernels in {args.out}")
    except (UnsupportedError, ValueError, OSError) as error:
        print(f"kda-ops build: {error}", file=sys.stderr)
        return 1
    return 1 if found else 0


def targets_named(names: str) -> list[Target]:
    """Return the architectures of a comma-separated list, or all of them.

    Raises:
        ValueError: there is no such architecture, or none is named.
    """
    if names.strip() == "all":
        return list(TARGETS)
    found = [target_named(name.strip()) for name in names.split(",") if name.strip()]
    if not found:
        raise ValueError(f"no architecture in {names!r}")
    return list(dict.fromkeys(found))


def matrix(target: Target) -> list[Job]:
    """Return the default variants of every operator."""
    return [
        Job(contract.name, variant, target)
        for contract in CONTRACTS
        for variant in launch_of(contract.name).matrix(overlap=target.can_overlap)
    ]


def spilling(results: Iterable[tuple[Job, Facts]]) -> list[tuple[Job, Facts]]:
    """Return the kernels that need local memory, which is where registers are spilled to."""
    return [(job, facts) for job, facts in results if facts["local"]]


def summary(results: Sequence[tuple[Job, Facts]], built: int) -> str:
    """Return a line for each architecture and operator."""
    groups: dict[tuple[str, str], list[Facts]] = {}
    for job, facts in results:
        groups.setdefault((job.target.arch, job.operator), []).append(facts)
    lines = [f"{len(results)} kernels, {built} of them compiled now"]
    for (arch, operator), group in groups.items():
        registers = [facts["registers"] for facts in group]
        local = max(facts["local"] for facts in group)
        lines.append(
            f"{arch:<8} {operator:<14} {len(group):>4} kernels, {min(registers)} to "
            f"{max(registers)} registers, at most {max(map(shared, group))} bytes of shared and "
            f"{local} of local memory"
        )
    return "\n".join(lines)


def shared(facts: Facts) -> int:
    """Return the shared memory of a block: what the code fixes and what the launch asks for."""
    return int(facts["shared"]) + int(facts["dynamic"] or 0)


def page(results: Sequence[tuple[Job, Facts]]) -> str:
    """Return the documentation page of what every kernel takes."""
    library = runtime.find()
    toolkit = library.toolkit if library is not None else None
    lines = [
        "# What the compiled GPU kernels take",
        "",
        "Written by `kda-ops build --arch all --report docs/compiled.md`, which needs no GPU and "
        f"compiles every default variant (CuTe DSL {backend.dsl_version()}, the compiler of CUDA "
        f"{toolkit}).",
        "Registers of a thread, and behind a stroke bytes of shared memory of a block, where it "
        "has any: what the launch asks for and what the code fixes (from compute capability 9.0 on "
        "with 1024 bytes of the system's).",
        f"Local memory of a thread, where spilled registers would be: "
        f"{max(facts['local'] for _, facts in results)} bytes at most, over "
        f"{len(results)} kernels.",
    ]
    for operator in dict.fromkeys(job.operator for job, _ in results):
        lines += [
            "",
            f"## {operator}",
            "",
            *_table([r for r in results if r[0].operator == operator]),
        ]
    return "\n".join([*lines, ""])


def _table(results: Sequence[tuple[Job, Facts]]) -> list[str]:
    """Return an operator's table: what tells its variants apart, then the architectures."""
    archs = list(dict.fromkeys(job.target.arch for job, _ in results))
    cells = {(repr(job.variant), job.target.arch): _cell(facts) for job, facts in results}
    variants = {repr(job.variant): dict(_flat(job.variant)) for job, _ in results}
    names = dict.fromkeys(name for fields in variants.values() for name in fields)
    varied = [n for n in names if len({str(fields.get(n)) for fields in variants.values()}) > 1]
    lines = [
        f"| {' | '.join([*varied, *archs])} |",
        f"|{'---|' * (len(varied) + len(archs))}",
    ]
    for variant, fields in variants.items():
        told = [str(fields.get(name, "")) for name in varied]
        found = [cells.get((variant, arch), "") for arch in archs]
        lines.append(f"| {' | '.join([*told, *found])} |")
    return lines


def _cell(facts: Facts) -> str:
    taken = shared(facts)
    return f"{facts['registers']} / {taken}" if taken else str(facts["registers"])


def _flat(value: object, name: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the fields of a variant, those of what it consists of too."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _flat(getattr(value, field.name), field.name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield f"{name}.{key}" if name == "ranks" else key, item
    else:
        yield name, value
