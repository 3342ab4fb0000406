"""Decoding with a stack of delta-attention layers: eager, compiled, with the pass, captured.

Run from a checkout with the package installed: ``python kernels/benchmarks/bench_model.py`` on a
GPU, ``--tiny --device cpu`` anywhere. Not here: the model (stack.py), how a way is compiled
and captured (model_ways.py), how a timeline is read (model_timeline.py).

Ways: eager PyTorch; torch.compile alone; torch.compile with the kda_ops pass, the same under
mode="reduce-overhead"; layers written around the operator. "captured" is the way before it,
captured by hand in one CUDA graph of the whole step. One layer is compiled and called for each of
them (layers differ in nothing but their tensors), which keeps compiling short.

Columns: tokens a second and microseconds a step, back to back on the host's clock; what a step
costs the host until it may go on; durations of one step's kernels: of the projections, of
everything between them (the KDA part) and of the rest (norms, residuals); kernels a step, and those
of the KDA part in a layer; how long nothing runs between a step's kernels.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gpu_timing
import harness
import model_goals
import model_timeline
import provenance
from decode_calls import STATE_DTYPES
from model_timeline import COLUMNS
from model_ways import CAPTURED, EAGER, WAYS, Step, step_of, steps
from stack import PROJECTIONS, Layer, Sizes, Stack

TOLERANCE = 0.05
"""How far two ways' last hidden states may be apart, relative to their norm: every layer rounds to
bf16 a few times, and compiled code leaves some of those roundings out."""


@dataclass(frozen=True)
class Line:
    """Figures of one way at one size; times in microseconds a step, None where not measured."""

    way: str
    tokens_per_second: float
    us: float
    host_us: float
    parts: model_timeline.Parts | None


def synchronize(stack: Stack) -> None:
    """Wait for a GPU; a CPU has nothing to wait for."""
    if stack.x.is_cuda:
        torch.cuda.synchronize()


def result(stack: Stack, step: Step) -> Tensor:
    """Return the last hidden states of the second step from the first states."""
    stack.reset()
    step()
    return step().float().clone()


def measure(stack: Stack, way: str, step: Step, count: int) -> Line:
    """Measure one way.

    Args:
        stack: with the pools that the step moves on.
        way: its name.
        step: called before.
        count: steps behind each figure.
    """
    synchronize(stack)
    started = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(stack)
    us = (time.perf_counter() - started) / count * 1e6
    host = []
    for _ in range(count):
        started = time.perf_counter()
        step()
        host.append((time.perf_counter() - started) * 1e6)
        synchronize(stack)
    parts = parts_of(stack, way, step) if stack.x.is_cuda else None
    return Line(way, len(stack.x) / us * 1e6, us, sorted(host)[count // 2], parts)


def parts_of(stack: Stack, way: str, step: Step) -> model_timeline.Parts | None:
    """Return a step's kernels by parts; None, with a word, where they cannot be told apart."""
    try:
        (runs,) = gpu_timing.timelines([step], 5)
        return model_timeline.median([model_timeline.read(x, len(stack.layers)) for x in runs])
    except (gpu_timing.NothingProfiled, ValueError) as reason:
        print(f"# {way}: {reason}", file=sys.stderr)
        return None


def table(sizes: Sizes, ways: tuple[str, ...], count: int) -> list[Line]:
    """Measure every way at one size and print its line; a wrong result is not timed."""
    stack = Stack(sizes)
    eager = result(stack, step_of(stack, Layer.forward))
    lines = []
    for way, step in steps(stack, ways):
        different = float((result(stack, step) - eager).norm() / eager.norm())
        if not different <= TOLERANCE:
            print(f"# {way}: {different:.2g} away from eager, not timed", file=sys.stderr)
            continue
        line = measure(stack, way, step, count)
        lines.append(line)
        state = str(sizes.state_dtype).removeprefix("torch.")
        parts = line.parts.columns(sizes.layers) if line.parts else ""
        print(
            f"{state:9s} {sizes.heads:3d} {sizes.rows:5d}  {way:22s} {line.tokens_per_second:11.0f}"
            f" {line.us:10.1f} {line.host_us:9.1f} {parts}",
            flush=True,
        )
    return lines


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--heads", nargs="+", type=int, default=(12, 32))
    parser.add_argument("--rows", nargs="+", type=int, default=(1, 8, 32, 128, 512))
    parser.add_argument("--states", nargs="+", choices=tuple(STATE_DTYPES), default=("f32", "bf16"))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=20, help="behind each figure")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers, three rows")
    parser.add_argument("--warm", action="store_true", help="first compile in parallel processes")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.tiny:
        options.heads, options.rows, options.layers, options.steps = [2], [3], 2, 2
    return options


def sizes(options: argparse.Namespace) -> list[Sizes]:
    """Return the stacks that the command asks for."""
    narrow: dict[str, Any] = {"hidden": 256, "rank": 16} if options.tiny else {}
    axes = itertools.product(options.states, options.heads, options.rows)
    return [
        Sizes(options.layers, heads, rows, STATE_DTYPES[state], device=options.device, **narrow)
        for state, heads, rows in axes
    ]


def compile_ahead(todo: list[Sizes], ways: tuple[str, ...]) -> None:
    """Compile what the sizes need in parallel processes, into the caches that Inductor keeps.

    One layer is what is compiled, so one layer is enough for it. Largest sizes come first.
    """
    bases = dict.fromkeys(way.removesuffix(CAPTURED) for way in ways)
    jobs = [(replace(size, layers=1), way) for size in todo for way in bases if way != EAGER]
    jobs.sort(key=lambda job: -job[0].rows * job[0].heads)
    processes, context = min(12, os.cpu_count() or 1), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _compile_in_this_process) as pool:
        try:
            list(pool.map(_compile_one, *zip(*jobs, strict=True)))
        except BrokenProcessPool as broken:  # what is missing is compiled when it is called
            print(f"# compiling ahead: {broken}", file=sys.stderr)


def _compile_in_this_process() -> None:
    torch._inductor.config.compile_threads = 1
    torch.set_grad_enabled(False)


def _compile_one(size: Sizes, way: str) -> None:
    for _ in steps(Stack(size), (way,)):
        pass


def main() -> None:
    """Measure, print, judge, and write the report if a file is named."""
    options = parse()
    todo = sizes(options)
    if options.warm:
        started = time.perf_counter()
        compile_ahead(todo, tuple(options.ways))
        print(f"# compiled ahead in {time.perf_counter() - started:.0f} s")
    facts = provenance.machine() if options.device == "cuda" else harness.machine()
    harness.print_facts(facts)
    print(f"# {options.layers} layers, hidden {todo[0].hidden}, {PROJECTIONS} products a layer")
    print(f"state       H  rows  {'way':22s}    tokens/s         us   host us {COLUMNS}")
    lines: list[dict[str, Any]] = []
    names = {dtype: name for name, dtype in STATE_DTYPES.items()}
    for size in todo:
        place = {"state": names[size.state_dtype], "heads": size.heads, "rows": size.rows}
        lines += [place | asdict(line) for line in table(size, tuple(options.ways), options.steps)]
        write(options, facts, lines)  # after each size: a run that is cut short leaves its figures
        if options.device == "cuda":
            torch._dynamo.reset()  # drops what the graph trees hold
            gc.collect()
            torch.cuda.empty_cache()
    for verdict in model_goals.verdicts(lines, options.layers):
        print(f"# {verdict.sentence}")


def write(options: argparse.Namespace, facts: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    """Write the report of what has been measured, if a file is named."""
    report = {
        "machine": facts,
        "layers": options.layers,
        "hidden": sizes(options)[0].hidden,
        "sources": provenance.source_hashes(("fused_decode", "packed_decode")),
        "kernels": provenance.kernel_hashes(),
        "goals": [
            asdict(verdict) | {"met": verdict.met}
            for verdict in model_goals.verdicts(lines, options.layers)
        ],
        "lines": lines,
    }
    harness.write_json(options.json, report)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
