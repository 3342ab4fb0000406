"""What memory gives to one read and T writes of a state: a kernel that copies and nothing else.

Run on a machine with a GPU and Triton: ``python kernels/benchmarks/bench_copies.py``. The states
lie in a pool, their slots in random order or in turn. Columns: microseconds, and share of the
ceiling (``mul_`` on 1 GB in the same run) of the states' bytes, of the best of several sizes of
blocks; bench_speculative.py's shares are to be seen beside them. How a call is timed:
gpu_timing.py.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import gpu_timing
import harness
import provenance
from decode_calls import HEAD_DIM, STATE_DTYPES

STATE = HEAD_DIM * HEAD_DIM
BLOCKS = ((1024, 2), (1024, 4), (2048, 8), (4096, 4), (16384, 4), (16384, 8))
"""Elements of a block, and its warps."""


@dataclass(frozen=True)
class Cell:
    """One size: state type, order of the slots, H, N sequences of T tokens."""

    state: str
    order: str
    heads: int
    sequences: int
    tokens: int


@triton.jit  # type: ignore[misc]
def _copy(  # type: ignore[no-untyped-def] # noqa: ANN202
    pool,  # noqa: ANN001
    slots,  # noqa: ANN001
    sources,  # noqa: ANN001
    heads,  # noqa: ANN001
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Add t to a piece of the state in a sequence's source slot, and write it to its slot t."""
    pieces: tl.constexpr = SIZE // BLOCK
    piece, n = tl.program_id(0), tl.program_id(1)
    head, at = piece // pieces, piece % pieces * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(slots + n * T + tl.load(sources + n)).to(tl.int64)
    read = tl.load(pool + (source * heads + head) * SIZE + at)
    for t in tl.static_range(T):
        slot = tl.load(slots + n * T + t).to(tl.int64)
        tl.store(pool + (slot * heads + head) * SIZE + at, read + t)


def copies(pool: Tensor, slots: Tensor, sources: Tensor, block: int, warps: int) -> None:
    """Read a state of each sequence and head, and write it, plus t, to each of its T slots.

    Args:
        pool: [S, H, 128, 128] states.
        slots: [N, T] slots of each sequence.
        sources: [N] which of its slots is read, 0 to T - 1.
        block: elements of a block.
        warps: of a block.
    """
    (n, t), heads = slots.shape, pool.shape[1]
    grid = (heads * STATE // block, n)
    _copy[grid](pool, slots, sources, heads, T=t, BLOCK=block, SIZE=STATE, num_warps=warps)


def calls_of(cell: Cell) -> list[Callable[[], None]]:
    """Return a cell's call for each size of block.

    Slots in turn are read at their first token, as after a prefill.
    """
    n, t = cell.sequences, cell.tokens
    shape = (n * t, cell.heads, HEAD_DIM, HEAD_DIM)
    pool = torch.zeros(shape, dtype=STATE_DTYPES[cell.state], device="cuda")
    random = cell.order == "random"
    slots = torch.randperm(n * t) if random else torch.arange(n * t)
    sources = torch.randint(t, (n,)) if random else torch.zeros(n)
    slots = slots.view(n, t).to("cuda", torch.int32)
    sources = sources.to("cuda", torch.int32)
    return [functools.partial(copies, pool, slots, sources, *block) for block in BLOCKS]


def measure(cell: Cell, top: float, rounds: int) -> dict[str, Any]:
    """Time one cell; ``top`` is the ceiling in bytes a second."""
    times = gpu_timing.microseconds(calls_of(cell), rounds)
    width = STATE_DTYPES[cell.state].itemsize
    moved = cell.sequences * cell.heads * (cell.tokens + 1) * STATE * width
    shares = {block: moved / us * 1e6 / top for block, us in zip(BLOCKS, times, strict=True)}
    best = max(shares, key=shares.__getitem__)
    whole = max(share for (size, _), share in shares.items() if size == STATE)
    found = {"us": min(times), "share": shares[best], "block": best, "whole_states": whole}
    return asdict(cell) | found


def main() -> None:
    """Measure, print, and write the report if a file is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20, help="calls behind each figure")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    facts, top = provenance.machine(), gpu_timing.ceiling(options.rounds)
    harness.print_facts(facts)
    print(f"# mul_ on 1 GB: {top / 1e12:.2f} TB/s")
    print("state order    H    N  T        us  of mul_  block, warps  whole states")
    lines = []
    sizes = ((32, 32), (12, 128), (32, 128))
    for state, (heads, n), t in itertools.product(STATE_DTYPES, sizes, (2, 4, 8)):
        for order in ("random", "in turn"):
            line = measure(Cell(state, order, heads, n, t), top, options.rounds)
            lines.append(line)
            print(
                f"{state:5s} {order:8s} {heads:2d} {n:4d} {t:2d} {line['us']:9.1f} "
                f"{line['share']:8.3f}  {line['block']!s:12s}  {line['whole_states']:.3f}",
                flush=True,
            )
    harness.write_json(options.json, {"machine": facts, "ceiling": top, "lines": lines})


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
