"""Decoding with heads shared out over GPUs, against one GPU that has all of them.

Run from a checkout with the package installed: ``python kernels/benchmarks/bench_parallel.py`` on
two GPUs, ``--tiny --device cpu`` anywhere. It starts its ranks itself. Not here: the model
(stack.py), how it is shared out (parallel_stack.py), how a timeline is read (model_timeline.py).

Every rank keeps its heads: its rows of the projections into the heads, its columns of the
projection back, its states and windows. Behind the projection back NCCL sums over the ranks, in
place and in the activations' type; that is all they say to each other. A step is one CUDA graph,
the sums in it. Beside it stands the same graph without the sums: what it takes less is their price,
waiting for the other rank included. Before anything is timed, the ranks' result is held against one
rank's.

Lost is what a step takes beyond its share of one rank's: the sums; the projections, the KDA part
and the rest (norms, residuals), which do not shrink as the heads do; and what no kernel accounts
for.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import harness
import kda_ops
import provenance
from bench_model import parts_of
from decode_calls import STATE_DTYPES
from model_timeline import Parts
from model_ways import Step
from parallel_stack import check, filled, ready, step_of, sum_over_ranks, timed
from stack import Sizes, Stack

ROWS = (1, 8, 32, 128, 512)
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0"}
"""Sums go from GPU to GPU, not through the switch: not every machine lets processes do that."""


@dataclass(frozen=True)
class Line:
    """One size; times in microseconds a step, parts None where they cannot be told.

    Attributes:
        state: the state's type.
        rows: sequences.
        ranks: that share the heads.
        alone, shared, silent: a step of one rank with all heads, of the ranks, and of the ranks
            without their sums; of ranks the slowest one's.
        alone_parts, silent_parts: the first rank's kernels of such steps.
    """

    state: str
    rows: int
    ranks: int
    alone: float
    shared: float
    silent: float
    alone_parts: Parts | None
    silent_parts: Parts | None

    @property
    def speedup(self) -> float:
        """How many times more tokens a second the ranks decode than one."""
        return self.alone / self.shared

    @property
    def lost(self) -> dict[str, float]:
        """Microseconds beyond a share of one rank's step, by what takes them."""
        found = {"sums": self.shared - self.silent}
        if self.alone_parts is not None and self.silent_parts is not None:
            for name in ("projections", "kda", "rest"):
                one = getattr(self.alone_parts, name)
                found[name] = getattr(self.silent_parts, name) - one / self.ranks
        whole = self.shared - self.alone / self.ranks
        return found | {"other": whole - sum(found.values())}

    def report(self) -> dict[str, Any]:
        """Return the line for a report, what is derived included."""
        speed = {name: self.rows / getattr(self, name) * 1e6 for name in ("alone", "shared")}
        derived = {"speedup": self.speedup, "lost": self.lost, "tokens_per_second": speed}
        return asdict(self) | derived


def measured(sizes: Sizes, ranks: int, count: int) -> Line | None:
    """Measure one size; the first rank returns the line, the others None."""
    state = {dtype: name for name, dtype in STATE_DTYPES.items()}[sizes.state_dtype]
    first, alone, alone_parts = dist.get_rank() == 0, 0.0, None
    if first:
        stack = filled(sizes)
        step = ready(stack, None)
        alone = timed(stack, step, count, lambda: None)
        alone_parts = parts(stack, step)
        del stack, step
        gc.collect()
        torch.cuda.empty_cache()
    dist.barrier()
    stack = filled(replace(sizes, heads=sizes.heads // ranks))
    times = []
    for total in (sum_over_ranks, None):
        step = ready(stack, total)
        times.append(timed(stack, step, count, dist.barrier))
    silent_parts = parts(stack, step) if first else None
    slowest = torch.tensor(times, dtype=torch.float64, device=stack.x.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    shared, silent = slowest.tolist()
    line = Line(state, sizes.rows, ranks, alone, shared, silent, alone_parts, silent_parts)
    return line if first else None


def parts(stack: Stack, step: Step) -> Parts | None:
    """Return a step's kernels by parts, None on a CPU."""
    return parts_of(stack, "parallel", step) if stack.x.is_cuda else None


def compile_kernels(todo: list[Sizes], ranks: int) -> None:
    """Compile what all sizes need at once, in parallel processes, into the cache of kernels."""
    layers = [
        Stack(replace(size, layers=1, heads=heads))
        for size in todo
        for heads in (size.heads, size.heads // ranks)
    ]
    steps = [step_of(layer, None) for layer in layers]
    kda_ops.warmup(lambda: [step() for step in steps])


def run_rank(rank: int, options: argparse.Namespace, port: int) -> None:
    """Be one of the ranks: measure every size; the first rank prints and writes the report."""
    torch.set_grad_enabled(False)
    gpu = options.device == "cuda"
    if gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=options.ranks,
        device_id=torch.device("cuda", rank) if gpu else None,
    )
    todo = sizes(options)
    if gpu and rank == 0:
        compile_kernels(todo, options.ranks)
    dist.barrier()
    check(todo[0], options.ranks)
    lines: list[Line] = []
    if rank == 0:
        facts = machine(options)
        heads = f"{todo[0].heads} heads alone, {todo[0].heads // options.ranks} a rank"
        print(f"# {options.layers} layers, {heads}; us a step, tokens/s; lost: us a step")
        print("state  rows    1 rank: us  tokens/s   shared: us  tokens/s speed-up  lost")
    for size in todo:
        line = measured(size, options.ranks, options.steps)
        if line is not None:
            lines.append(line)
            show(line)
            write(options, facts, lines)
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def show(line: Line) -> None:
    """Print a line."""
    speed = line.report()["tokens_per_second"]
    lost = ", ".join(f"{name} {us:.0f}" for name, us in line.lost.items())
    print(
        f"{line.state:5s} {line.rows:5d} {line.alone:13.1f} {speed['alone']:9.0f} "
        f"{line.shared:12.1f} {speed['shared']:9.0f} {line.speedup:8.2f}  {lost}",
        flush=True,
    )


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """Return and print what the figures depend on."""
    if options.device == "cuda":
        version = ".".join(map(str, torch.cuda.nccl.version()))
        facts = provenance.machine() | {"NCCL": version} | NO_MULTICAST
    else:
        facts = harness.machine()
    harness.print_facts(facts)
    return facts


def sizes(options: argparse.Namespace) -> list[Sizes]:
    """Return the stacks that the command asks for, with all heads."""
    narrow = {"hidden": 256, "rank": 16} if options.tiny else {}
    place: dict[str, Any] = {"device": options.device, **narrow}
    return [
        Sizes(options.layers, options.heads, rows, STATE_DTYPES[state], **place)
        for state, rows in itertools.product(options.states, options.rows)
    ]


def write(options: argparse.Namespace, facts: dict[str, Any], lines: list[Line]) -> None:
    """Write the report of what has been measured, if a file is named."""
    report = {
        "machine": facts,
        "ranks": options.ranks,
        "heads": options.heads,
        "layers": options.layers,
        "sources": provenance.source_hashes(("fused_decode",)),
        "kernels": provenance.kernel_hashes(),
        "lines": [line.report() for line in lines],
    }
    harness.write_json(options.json, report)


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a narrow stack of few rows, to try it")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rows", type=int, nargs="+")
    parser.add_argument("--states", nargs="+", choices=list(STATE_DTYPES))
    parser.add_argument("--steps", type=int, default=20, help="steps a round")
    parser.add_argument("--json", type=Path, help="write the report here")
    options = parser.parse_args(arguments)
    small = options.tiny
    options.heads = options.heads or (2 * options.ranks if small else 64)
    options.layers = options.layers or (2 if small else 24)
    options.rows = options.rows or ([2] if small else list(ROWS))
    options.states = options.states or (["f32"] if small else list(STATE_DTYPES))
    if options.heads % options.ranks:
        parser.error(f"{options.heads} heads cannot be shared out over {options.ranks} ranks")
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run_rank, (options, port), nprocs=options.ranks)


if __name__ == "__main__":
    main()
