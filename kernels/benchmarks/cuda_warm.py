"""Compiles the GPU kernels that a list of cells needs in parallel processes, before any is timed.

Lives here: the pool of processes. Not here: compiling itself (kda_kernels._cute), timing.

A kernel takes seconds to compile, on one core. Every process leaves what it compiled in the cache
of compiled kernels, where the process that measures finds it. A failure here is only reported: the
call that needs the kernel compiles it again, and raises.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

import decode_calls
from kda_kernels._cute import compile as backend

MOST_PROCESSES = 16


def warm(cells: Sequence[decode_calls.Cell], processes: int | None = None) -> float:
    """Compile what the cells need; return the seconds it took.

    Args:
        cells: what will be called.
        processes: how many at once; by default one a core, at most MOST_PROCESSES.
    """
    started = time.perf_counter()
    count = processes or min(MOST_PROCESSES, os.cpu_count() or 1)
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        for cell, trouble in zip(cells, pool.map(_compile, cells), strict=True):
            if trouble:
                print(f"# {cell} was not compiled ahead: {trouble}", flush=True)
    return time.perf_counter() - started


def _compile(cell: decode_calls.Cell) -> str:
    """Compile one cell's kernel from shapes alone; return what went wrong, in words."""
    try:
        operator, device = cell.contract, torch.device("cuda", torch.cuda.current_device())
        target = backend.target_for(operator.name, operator.tensors[0].name, device)
        launch = importlib.import_module(f"kda_kernels.{operator.name}.launch")
        values = decode_calls.values_of(cell, "meta")
        launch.kernel(values, values[operator.tensors[0].name].dtype, target, device)
    except Exception as error:  # what a compiler raises is not to be foreseen
        return f"{type(error).__name__}: {error}"
    return ""


def interleaved(
    groups: Sequence[Sequence[decode_calls.Cell]],
) -> list[decode_calls.Cell]:
    """Order cells so that neighbours are of different groups.

    Cells of a group often share kernels, and processes that want the same one wait for each other.
    """
    longest = max(map(len, groups), default=0)
    return [group[i] for i in range(longest) for group in groups if i < len(group)]
