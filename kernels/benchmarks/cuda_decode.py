"""The GPU's part of bench_decode.py: kernel durations, share of an in-place mul_, peers, goals.

Run as ``python kernels/benchmarks/bench_decode.py --device cuda``. Lives here: which cells are
measured, the table, the report. Not here: how a call is timed (gpu_timing.py), the peers' figures
(peers.py), what is to be reached (goals.py), the CPU's part (bench_decode.py).

Columns: microseconds of the kernel launched directly and from a CUDA graph; TB/s of all bytes that
the step must move (states in and out, windows, activations, output); share of the ceiling, which is
``mul_`` on 1 GB in the same run; how many times faster than each peer's figure, scaled by the
ceilings of the two runs.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

import bench_host
import goals
import gpu_timing
import harness
import kda_ops
import live_peer
import peers
import provenance
from decode_calls import Cell, moved_bytes, public_call, refuse_if_wrong, values_of

Line = dict[str, Any]

DEVICE = "cuda"


def groups(options: argparse.Namespace) -> list[list[Cell]]:
    """Return the cells to measure, in groups whose tensors are alive at the same time."""
    found = []
    axes = (options.operators, options.layouts, options.states)
    for operator, layout, state in itertools.product(*axes):
        windows = options.windows if operator == "fused_decode" else ("",)
        for window in windows:
            sizes = list(itertools.product(options.heads, options.rows))
            if operator == "packed_decode" and layout == "vk" and options.more_rows:
                sizes += [
                    (heads, rows)
                    for heads, rows in itertools.product(*peers.MORE_CELLS)
                    if heads in options.heads
                ]
            cells = [Cell(operator, layout, state, h, r, window) for h, r in sorted(set(sizes))]
            found.append(cells)
    return found


def warm(todo: Sequence[Sequence[Cell]], processes: int | None) -> int:
    """Compile what the groups need in parallel processes; return how many kernels that was.

    The public calls are made on fake tensors, so their sizes cost nothing.
    """

    def every_call() -> None:
        for cell in itertools.chain.from_iterable(todo):
            public_call(cell, values_of(cell, DEVICE))[0]()

    ready = kda_ops.warmup(every_call, device=DEVICE, processes=processes)
    return sum(kernel.built for kernel in ready)


def measure(cells: Sequence[Cell], top: float, repeats: int) -> list[Line]:
    """Check and time the cells of a group, and a live peer beside them.

    Args:
        cells: the group.
        top: the ceiling in bytes a second.
        repeats: calls behind each figure.
    """
    lines, calls = [], []
    for cell in cells:
        values = values_of(cell, DEVICE)
        moved = moved_bytes(cell, values)
        call, output = public_call(cell, values)
        refuse_if_wrong(cell, values, call, output)
        calls += [call, gpu_timing.captured(call)]
        lines.append(asdict(cell) | {"bytes": moved, "live": None})
        beside = live_peer.call(cell, values)
        if beside is not None:
            lines[-1]["live"] = len(calls)
            calls.append(beside)
    times = iter(gpu_timing.microseconds(calls, repeats))
    for line in lines:
        line["us"], line["graph_us"] = next(times), next(times)
        line["live_us"] = next(times) if line.pop("live") is not None else None
        finish(line, top)
    return lines


def finish(line: Line, top: float) -> None:
    """Add to a line what follows from its times and the ceiling in bytes a second."""
    speed = line["bytes"] / line["us"] * 1e6
    cell = (line["operator"], line["state"], line["heads"], line["rows"])
    scaled = peers.figures(*cell, top)
    line |= {"bytes_per_second": speed, "share": speed / top}
    line["over"] = {name: figure / line["us"] for name, figure in scaled.items()}
    line["over_live"] = line["live_us"] / line["us"] if line.get("live_us") else None


HEADER = (
    "operator      state layout window  H rows        us  graph us   TB/s  of mul_"
    "  times faster than the peers, in the order above"
)


def row(line: Line) -> str:
    """Return a line of the table."""
    ratios = [f"{name.split()[0]} {ratio:.2f}" for name, ratio in line["over"].items()]
    live = f"live {line['over_live']:.2f}" if line["over_live"] else ""
    return (
        f"{line['operator']:13s} {line['state']:5s} {line['layout']:6s} {line['window']:6s} "
        f"{line['heads']:2d} {line['rows']:4d} {line['us']:9.1f} {line['graph_us']:9.1f} "
        f"{line['bytes_per_second'] / 1e12:6.2f} {line['share']:7.3f}  {' '.join(ratios)} {live}"
    )


def means(lines: Sequence[Line]) -> dict[str, float]:
    """Return geometric means of what is worth one number, by what they are of."""
    found = {}
    kinds = sorted({(x["operator"], x["state"], x["layout"], x["window"]) for x in lines})
    for kind in kinds:
        cells = [x for x in lines if (x["operator"], x["state"], x["layout"], x["window"]) == kind]
        name = " ".join(part for part in kind if part)
        found[f"{name}: share"] = harness.geometric_mean(x["share"] for x in cells)
        for peer in peers.PEERS:
            ratios = [x["over"][peer.name] for x in cells if peer.name in x["over"]]
            if ratios:
                found[f"{name}: over {peer.name}"] = harness.geometric_mean(ratios)
        live = [x["over_live"] for x in cells if x["over_live"]]
        if live:
            found[f"{name}: over {live_peer.name()}"] = harness.geometric_mean(live)
    for axis, one, other in (("window", "DS", "SD"), ("layout", "kv", "vk")):
        pairs = goals.ratios(lines, axis, one, other)
        if pairs:
            found[f"{one} over {other}, time"] = harness.geometric_mean(r for r, _ in pairs)
    graph = [x["graph_us"] / x["us"] for x in lines]
    found["CUDA graph over direct launch, time"] = harness.geometric_mean(graph)
    return found


def judge(lines: Sequence[Line], host: dict[str, float]) -> list[goals.Verdict]:
    """Print and return the means and the verdicts on every goal."""
    print("\n# geometric means")
    for name, value in means(lines).items():
        print(f"# {name}: {value:.3f}")
    found = goals.verdicts(lines)
    found += [goals.host_verdict(name, us) for name, us in host.items()]
    print("\n# goals")
    for verdict in found:
        print(f"# {verdict.sentence}")
    return found


def report(options: argparse.Namespace) -> None:
    """Print the table, group by group as it is measured, then means and goals.

    ``options`` are those of bench_decode.py.
    """
    todo = groups(options)
    if options.warm is not None:
        started = time.perf_counter()
        found = warm(todo, options.warm or None)
        print(f"# {found} kernels compiled ahead in {time.perf_counter() - started:.0f} s")
    facts = provenance.machine()
    top = gpu_timing.ceiling(options.rounds)
    harness.print_facts(facts | {"live peer": live_peer.name() or "none installed"})
    print(f"# mul_ on 1 GB: {top / 1e12:.2f} TB/s; peers' figures were taken at ", end="")
    print(f"{peers.CEILING / 1e12:.2f} TB/s on {peers.MACHINE}")
    for peer in peers.PEERS:
        print(f"# peer of {peer.operator}: {peer.name} {peer.version}")
    print(f"\n{HEADER}")
    lines: list[Line] = []
    for cells in todo:
        lines += measure(cells, top, options.rounds)
        print(*map(row, lines[-len(cells) :]), sep="\n", flush=True)
        torch.cuda.empty_cache()
    again = gpu_timing.ceiling(options.rounds)
    print(f"\n# mul_ on 1 GB at the end: {again / 1e12:.2f} TB/s")
    host = bench_host.beyond_an_empty_call(DEVICE, options.rounds)
    judged = judge(lines, host)
    written = {
        "machine": facts,
        "ceiling": top,
        "ceiling at the end": again,
        "live peer": live_peer.name(),
        "sources": provenance.source_hashes(options.operators),
        "kernels": provenance.kernel_hashes(),
        "means": means(lines),
        "goals": [asdict(verdict) | {"met": verdict.met} for verdict in judged],
        "host": host,
        "lines": lines,
    }
    harness.write_json(options.json, written)
