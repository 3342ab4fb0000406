"""Kernels of packed_decode and fused_decode against Inductor alone and against an in-place mul_.

Run from a checkout with the package installed: ``python kernels/benchmarks/bench_decode.py``.
Not here: how things are timed (harness.py), what a public call costs on the host (bench_host.py).

Columns: microseconds a call; GB/s of state traffic (every live state read once and written once);
how many times faster the kernel is than the same step in plain PyTorch under torch.compile; the
kernel's speed as a fraction of ``mul_`` over the same bytes. ``warm`` uses the same slots at every
call, ``cold`` the next slots of a pool that exceeds the caches (as a model of many layers does).
With ``--device cuda`` the table is another one: see cuda_decode.py.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import harness
import plain
from decode_calls import STATE_DTYPES, Cell, Values, values_of
from kda_kernels._cpu import build
from kda_kernels.testing.cases import output_of

SIZES = {"cpu": ((4, 12, 32), (1, 8, 32)), "cuda": ((12, 16, 32, 64), (1, 8, 32, 128, 512))}
"""Heads and rows that are measured by default, by device."""

FIRST_SLOT = 1


@dataclass(frozen=True)
class Shape(Cell):
    """One line of the table: a cell, and whether every call uses the same slots."""

    working_set: str = "warm"

    @property
    def calls(self) -> int:
        """How many disjoint sets of slots the pool holds."""
        if self.working_set == "warm":
            return 1
        return max(2, -(-harness.COLD_BYTES // self.state_bytes))


@dataclass(frozen=True)
class Line:
    """Figures of one line; times in microseconds a call."""

    kernel_us: float
    inductor_us: float | None
    mul_us: float
    kernel_gb_s: float
    over_inductor: float | None
    over_mul: float


def inputs(shape: Shape) -> tuple[Values, list[Tensor]]:
    """Make one call's arguments by name, and the indices of every set of slots in its pools."""
    torch.manual_seed(0)
    slots = shape.rows * shape.calls + FIRST_SLOT
    order = torch.arange(FIRST_SLOT, slots, dtype=torch.int32).view(shape.calls, shape.rows)
    return values_of(shape, "cpu", slots), list(order)


def kernel_call(shape: Shape, t: Values, indices: Tensor) -> Callable[[], Tensor]:
    """Return one call of the compiled kernel, without the public function around it."""
    kernel, output = build.load(shape.operator), output_of(shape.contract, t)
    now = t | {"state_indices": indices}
    arguments = (*[now[argument.name] for argument in shape.contract.abi], output)

    def call() -> Tensor:
        kernel(*arguments)
        return output

    return call


def plain_call(
    shape: Shape, t: Values, indices: Tensor, step: Callable[..., Tensor]
) -> Callable[[], Tensor]:
    """Return one call of the plain PyTorch step (compiled or not)."""
    rows = (t["raw_gate"].reshape(shape.rows, -1), t["raw_beta"].reshape(shape.rows, -1))
    gates = (*rows, t["A_log"], t["dt_bias"])
    if shape.operator == "packed_decode":
        return lambda: step(t["mixed_qkv"], *gates, t["state"], indices, shape.layout)
    head = (t["x"], t["weight"], t["conv_state"], *gates, t["state"], indices)
    return lambda: step(*head, t["output_gate"], t["norm_weight"], shape.layout)


def check(shape: Shape, t: Values, indices: Tensor, step: Callable[..., Tensor]) -> None:
    """Run kernel and compiled step from the same pools; refuse to time things that differ."""
    pools = {name: t[name].clone() for name in ("state", "conv_state") if name in t}
    mine = kernel_call(shape, t, indices)().float().flatten()
    theirs = plain_call(shape, t | pools, indices, step)().float().flatten()
    states = (t["state"].float() - pools["state"].float()).abs().max()
    if (mine - theirs).norm() > 0.02 * theirs.norm() or states > 0.1:
        raise SystemExit(f"{shape}: kernel and plain step disagree, nothing to measure")


def measure(shape: Shape, *, inductor: bool, rounds: int) -> Line:
    """Measure one line."""
    t, sets = inputs(shape)
    step = plain.packed_step if shape.operator == "packed_decode" else plain.fused_step
    states = t["state"][FIRST_SLOT:].view(shape.calls, shape.rows, -1)
    contestants: dict[str, harness.Contestant] = {
        "kernel": harness.rotating(kernel_call(shape, t, i) for i in sets),
        "mul_": harness.rotating([functools.partial(s.mul_, 1.0) for s in states]),
    }
    if inductor:
        torch._dynamo.reset()
        compiled = torch.compile(step, dynamic=False)
        check(shape, t, sets[0], compiled)
        calls = (plain_call(shape, t, i, compiled) for i in sets)
        contestants["inductor"] = harness.rotating(calls)
    sample = harness.measure(contestants, rounds)
    seconds = sample.median("kernel")
    return Line(
        kernel_us=seconds * 1e6,
        inductor_us=sample.median("inductor") * 1e6 if inductor else None,
        mul_us=sample.median("mul_") * 1e6,
        kernel_gb_s=2 * shape.state_bytes / seconds / 1e9,
        over_inductor=sample.speedup("kernel", "inductor") if inductor else None,
        over_mul=sample.speedup("kernel", "mul_"),
    )


def shapes(options: argparse.Namespace) -> list[Shape]:
    """Return the lines that the command asks for."""
    axes = (options.operators, options.layouts, options.states, options.heads, options.rows)
    found = []
    for *fields, working_set in itertools.product(*axes, options.working_sets):
        cell = Cell(*fields)
        found.append(Shape(**asdict(cell), working_set=working_set))
    return found


def summarise(lines: list[tuple[Shape, Line]]) -> dict[str, float]:
    """Print and return the geometric means and the worst line of both ratios."""
    summary: dict[str, float] = {}
    inductor = [line.over_inductor for _, line in lines if line.over_inductor is not None]
    if inductor:
        summary["over Inductor alone, geometric mean"] = harness.geometric_mean(inductor)
        summary["over Inductor alone, least"] = min(inductor)
    cold = [line.over_mul for shape, line in lines if shape.working_set == "cold"]
    if cold:
        summary["of mul_, cold, geometric mean"] = harness.geometric_mean(cold)
        summary["of mul_, cold, least"] = min(cold)
    for name, value in summary.items():
        print(f"# {name}: {value:.2f}")
    return summary


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    operators = ("packed_decode", "fused_decode")
    parser.add_argument("--operators", nargs="+", choices=operators, default=operators)
    parser.add_argument("--layouts", nargs="+", choices=("vk", "kv"), default=("vk", "kv"))
    parser.add_argument("--states", nargs="+", choices=tuple(STATE_DTYPES), default=("f32", "bf16"))
    windows = ("SD", "DS")
    parser.add_argument("--windows", nargs="+", choices=windows, default=windows, help="cuda only")
    parser.add_argument("--heads", nargs="+", type=int, help="default: a few")
    parser.add_argument("--rows", nargs="+", type=int, help="default: a few")
    sets = ("warm", "cold")
    parser.add_argument("--working-sets", nargs="+", choices=sets, default=sets)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", choices=tuple(SIZES), default="cpu")
    parser.add_argument("--no-inductor", action="store_true", help="leave torch.compile out")
    parser.add_argument(
        "--warm",
        type=int,
        nargs="?",
        const=0,
        metavar="N",
        help="cuda only: first compile all kernels in N processes (0: as many as there are cores)",
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    heads, rows = SIZES[options.device]
    options.more_rows = options.rows is None
    options.heads, options.rows = options.heads or heads, options.rows or rows
    return options


def main() -> None:
    """Print the table, line by line as it is measured, and its summary."""
    options = parse()
    if options.device == "cuda":
        import cuda_decode  # noqa: PLC0415 - imports what is timed on GPUs

        cuda_decode.report(options)
        return
    torch.set_num_threads(options.threads)
    facts = harness.print_machine()
    print(
        f"{'operator':14s} layout state  H rows set   kernel_us inductor_us    mul_us   GB/s"
        "  xInd xmul_"
    )
    lines = []
    for shape in shapes(options):
        line = measure(shape, inductor=not options.no_inductor, rounds=options.rounds)
        lines.append((shape, line))
        print(
            f"{shape.operator:14s} {shape.layout:6s} {shape.state:5s} {shape.heads:2d} "
            f"{shape.rows:4d} {shape.working_set:5s} {line.kernel_us:9.1f} "
            f"{line.inductor_us or float('nan'):11.1f} {line.mul_us:9.1f} {line.kernel_gb_s:6.1f} "
            f"{line.over_inductor or float('nan'):5.1f} {line.over_mul:5.2f}",
            flush=True,
        )
    summary = summarise(lines)
    table = [asdict(shape) | asdict(line) for shape, line in lines]
    harness.write_json(options.json, {"machine": facts, "summary": summary, "lines": table})


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
