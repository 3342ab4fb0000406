"""Compiling before the first call: what a description or a function's calls need.

Lives here: ``warmup``. Not here: which calls those are (calls.py), how kernels are compiled
(kda_kernels) and bundles by command (bundling.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kda_kernels._cpu import build
from kda_kernels._cute import compile as backend
from kda_kernels._cute.parallel import Job
from kda_kernels.plan import cpu_kernel
from kda_ops.ahead import compile_jobs, jobs_of, launch_once, pack, prepare, target_named
from kda_ops.calls import Call, described, operator_named, seen

PROCESSORS = {
    "sm_80": 108,
    "sm_86": 84,
    "sm_89": 142,
    "sm_90a": 132,
    "sm_100a": 148,
    "sm_103a": 148,
    "sm_120a": 188,
}
"""Streaming multiprocessors of the largest common part of each architecture: A100, A40, L40S,
H100 and H200, B200, B300, RTX PRO 6000. The choice of a schedule depends on their number."""


@dataclass(frozen=True)
class Warmed:
    """A kernel that is ready.

    Attributes:
        operator: its name.
        arch: the architecture, ``"cpu"`` for the CPU's.
        variant: what the kernel is fixed to; empty for the CPU's, which serve every call.
        built: it was compiled now, and not found in the process, a bundle or the cache.
    """

    operator: str
    arch: str
    variant: str
    built: bool


def warmup(
    what: str | Callable[..., Any],
    *inputs: Any,  # noqa: ANN401
    heads: int | Iterable[int] | None = None,
    rows: int | Iterable[int] | None = None,
    device: torch.device | str | int | None = None,
    arch: str | None = None,
    processors: int | None = None,
    bundle: str | os.PathLike[str] | None = None,
    processes: int | None = None,
    **options: Any,  # noqa: ANN401
) -> tuple[Warmed, ...]:
    """Compile and load the kernels that calls will need, before the first of them.

    After it a first call neither compiles nor loads, so that it may happen while a CUDA graph is
    captured. Which kernel serves a call depends on rows times heads too: name every batch size that
    will be used::

        kda_ops.warmup("packed_decode", heads=32, rows=[1, 8, 32], state_dtype=torch.bfloat16)
        kda_ops.warmup(model, hidden_states, slots)  # every operator call that it makes

    On a GPU the kernels are compiled by several processes at once, kept in the cache, loaded, and
    launched once on a few zeros that no pool is behind. On a CPU the CPU kernels are built. With
    ``arch`` they are compiled for a GPU that need not be here, into the cache or a bundle.

    Args:
        what: an operator's name (``"packed_decode"`` or ``"packed_kda_decode"``), or a function or
            module that calls operators. The latter runs once on fake copies of the inputs: nothing
            is computed and no tensor changes.
        inputs: of the function.
        heads: numbers of heads, with an operator's name.
        rows: numbers of rows, with an operator's name.
        device: where the calls will be; by default the inputs' device, and with an operator's name
            the current GPU, or the CPU where there is none.
        arch: an architecture such as ``"sm_90a"`` instead of a device.
        processors: streaming multiprocessors of the device that ``arch`` stands for; by default
            those of the largest common part.
        bundle: a directory; what is compiled is put there too (``kda_ops.load_bundle``).
        processes: at most so many compile at a time; by default as many as there are cores.
        options: of a described call: ``activation_dtype``, ``state_dtype``, ``parameter_dtype``,
            ``weight_dtype``, ``index_dtype`` (None: no indices), ``conv_layout`` (``"SD"``,
            ``"DS"``), ``weight_layout`` (``"tap-major"``, ``"channel-major"``), ``conv_bias``
            (bool), ``columns`` of a window, ``tokens`` a sequence (of which ``rows`` are filled),
            and every scalar of the operator, such as ``state_layout``, ``lower_bound``,
            ``first_slot`` and ``output_dtype``.

    Returns:
        The kernels that are ready now, each once.

    Raises:
        TypeError, ValueError: arguments that do not fit together; an operator or architecture that
            does not exist.
        ContractError, DtypeError: an operator refuses such a call.
        UnsupportedError: no kernel serves it, or nothing here compiles it.
    """
    target = target_named(arch) if arch is not None else None
    if target is not None and device is not None:
        raise TypeError("a device has its own architecture: name one of device and arch")
    if callable(what):
        if heads is not None or rows is not None or options:
            raise TypeError("heads, rows and options belong to an operator's name")
        found = seen(what, *inputs)
    elif inputs:
        raise TypeError("inputs belong to a function; describe a call by heads, rows, options")
    else:
        gpu = target is not None or _goes_to_gpu(device)
        found = _described(what, heads, rows, options, sizes_matter=gpu)
    if target is not None:
        if processors is None:
            processors = PROCESSORS[target.arch]
        return _for_target(jobs_of(found, target, processors), bundle, processes)
    if bundle is not None or processors is not None:
        raise TypeError("bundle and processors belong to arch")
    places = [(call, _place(call, device)) for call in found]
    on_cpu = dict.fromkeys(call.operator.name for call, place in places if place.type == "cpu")
    ready = [_on_cpu(name) for name in on_cpu]
    for place in dict.fromkeys(place for _, place in places if place.type != "cpu"):
        ready += _on_gpu([call for call, p in places if p == place], place, processes)
    return tuple(ready)


def _goes_to_gpu(device: torch.device | str | int | None) -> bool:
    """Tell where calls that were described by an operator's name will be."""
    if device is None:
        return torch.cuda.is_available()
    return isinstance(device, int) or torch.device(device).type != "cpu"


def _described(
    name: str,
    heads: int | Iterable[int] | None,
    rows: int | Iterable[int] | None,
    options: Mapping[str, Any],
    *,
    sizes_matter: bool,
) -> list[Call]:
    """Return the calls that a description means; on the CPU one kernel serves every size."""
    operator = operator_named(name)
    if sizes_matter and (heads is None or rows is None):
        raise TypeError(f"heads= and rows= choose the GPU kernel of {name}: give both")
    one = 1
    return described(
        operator, one if heads is None else heads, one if rows is None else rows, options
    )


def _place(call: Call, device: torch.device | str | int | None) -> torch.device:
    """Return the device where a call will be, GPUs with their index."""
    if device is None and call.facts.device.type != "meta":
        found = call.facts.device
    elif device is None:
        found = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    else:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _on_cpu(name: str) -> Warmed:
    """Build an operator's CPU kernel; without a compiler its reference is what is ready."""
    missing = build.describe()[f"kernel {name}"] == "not built yet"
    cpu_kernel(name)
    return Warmed(name, "cpu", "", built=missing)


def _on_gpu(calls: Sequence[Call], device: torch.device, processes: int | None) -> list[Warmed]:
    """Compile, load and launch what calls on a GPU need."""
    first = calls[0].operator
    target = backend.target_for(first.name, first.tensors[0].name, device)
    count = torch.cuda.get_device_properties(device).multi_processor_count
    jobs = jobs_of(calls, target, count)
    built = prepare(list(jobs), processes)
    for call in jobs.values():
        launch_once(call, device)
    torch.cuda.synchronize(device)
    return [_warmed(job, built=job in built) for job in jobs]


def _for_target(
    jobs: Mapping[Job, Call], bundle: str | os.PathLike[str] | None, processes: int | None
) -> tuple[Warmed, ...]:
    """Compile into the cache, and into a bundle if one is named."""
    made = compile_jobs(list(jobs), processes)
    if bundle is not None:
        pack(bundle, list(jobs), made)
    return tuple(_warmed(job, built=one.built) for job, one in zip(jobs, made, strict=True))


def _warmed(job: Job, *, built: bool) -> Warmed:
    return Warmed(job.operator, job.target.arch, repr(job.variant), built)
