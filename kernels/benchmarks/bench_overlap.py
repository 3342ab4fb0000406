"""Calls with and without overlapping launches (KDA_PDL), behind kernels that signal or do not.

Run on a machine with a GPU: ``python kernels/benchmarks/bench_overlap.py``. A CUDA graph holds
pairs of a neighbour and a call; a figure is the microseconds of a pair, less those of the neighbour
alone, by CUDA events around a replay, the median of many. Only a kernel that signals can be
overlapped with: alone, calls follow calls, which do.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import bench_speculative
import decode_calls
import gpu_timing
import harness
import kda_ops
import provenance
from kda_kernels._cute.call import OVERLAP_VARIABLE
from kda_kernels.plan import launcher

PAIRS, REPLAYS = 30, 15
TOKENS = {"packed_decode": 1, "fused_decode": 1, "packed_fused_decode": 4}
CELLS = tuple(itertools.product(TOKENS, decode_calls.STATE_DTYPES, (1, 8, 32)))
"""Operators, state types, rows or sequences."""
NEIGHBOURS = ("nothing", "elementwise", "product", "memset")

Call = Callable[[], object]


def nothing() -> None:
    """Launch nothing."""


def neighbours() -> dict[str, tuple[Call, float]]:
    """Return what stands before a call, and what it takes alone."""
    few = torch.ones(1000, device="cuda")
    many = torch.empty(gpu_timing.FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    rows, weight = (torch.ones(n, 4096, dtype=torch.bfloat16, device="cuda") for n in (64, 4096))
    calls: tuple[Call, ...] = (
        nothing,
        lambda: few.add_(1),
        lambda: torch.mm(rows, weight),
        many.zero_,
    )
    times = (0.0 if call is nothing else microseconds(call, nothing) for call in calls)
    return dict(zip(NEIGHBOURS, zip(calls, times, strict=True), strict=True))


def call_of(cell: tuple[str, str, int], heads: int, layout: str) -> Call:
    """Return a cell's call of the public function."""
    name, state, rows = cell
    if name == "packed_fused_decode":
        size = bench_speculative.Cell(state, layout, "SD", heads, rows, TOKENS[name])
        values = bench_speculative.values_of(size, "cuda")
        return functools.partial(kda_ops.packed_fused_kda_decode, **values)
    step = decode_calls.Cell(name, layout, state, heads, rows)
    return decode_calls.public_call(step, decode_calls.values_of(step, "cuda"))[0]


def microseconds(neighbour: Call, call: Call) -> float:
    """Return the time of a pair in a graph of many."""

    def pairs() -> None:
        for _ in range(PAIRS):
            neighbour()
            call()

    pairs()
    replay = gpu_timing.captured(pairs)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(REPLAYS):
        start.record()
        replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e3 / PAIRS)
    return statistics.median(found)


def measure(
    cell: tuple[str, str, int], behind: dict[str, tuple[Call, float]], heads: int, layout: str
) -> dict[str, Any]:
    """Time one cell behind every neighbour, each with its own time, without and with."""
    name, state, rows = cell
    call, line = call_of(cell, heads, layout), {}
    for which, (neighbour, alone) in behind.items():
        for asked in ("0", "1"):
            os.environ[OVERLAP_VARIABLE] = asked
            launcher(name).forget()
            line[f"{which} {asked}"] = microseconds(neighbour, call) - alone
    return {"operator": name, "state": state, "rows": rows, "tokens": TOKENS[name]} | line


def row(line: dict[str, Any]) -> str:
    """Return a line of the table: microseconds without and with, behind every neighbour."""
    times = ((line[f"{which} 0"], line[f"{which} 1"]) for which in NEIGHBOURS)
    return (
        f"{line['operator']:20s} {line['state']:5s} {line['rows']:4d} {line['tokens']:2d} "
        + "".join(f"{f'{without:.1f} -> {overlapping:.1f}':>14s}" for without, overlapping in times)
    )


def main() -> None:
    """Measure, print, and write the report if a file is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--layout", choices=("vk", "kv"), default="vk")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    facts = provenance.machine()
    harness.print_facts(facts)
    print("operator             state rows  T " + "".join(f"{n:>14s}" for n in NEIGHBOURS))
    lines, behind = [], neighbours()
    for cell in CELLS:
        lines.append(measure(cell, behind, options.heads, options.layout))
        print(row(lines[-1]), flush=True)
    harness.write_json(options.json, {"machine": facts, "lines": lines})


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
