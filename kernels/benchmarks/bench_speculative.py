"""Verifying drafted tokens on a GPU: packed_fused_decode at T tokens a sequence against T steps.

Run from a checkout with the package installed: ``python kernels/benchmarks/bench_speculative.py``.
How a call is timed: gpu_timing.py. Every cell is held against the reference before it is timed.

Columns: microseconds of one call, every sequence at its full length; share of the ceiling (``mul_``
on 1 GB in the same run) of the bytes that have to move: a state read and T written for each
sequence, windows, activations, outputs; the time of one fused_decode of as many rows, and how many
of them the call takes as long as; how many times longer flash-linear-attention's kernels take for
the same tokens, where it is installed: with every token's checkpoint, as we do, and with only the
last state of a sequence (speculative_peer.py).
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
from torch import Tensor

import decode_calls
import gpu_timing
import harness
import kda_ops
import live_peer
import provenance
import speculative_peer
from decode_calls import STATE_DTYPES, Values
from kda_kernels.plan import CONTRACTS
from kda_kernels.testing.cases import Case, clone, draw, exact, output_of, run_reference, traffic
from kda_kernels.testing.compare import assert_within_budget
from kda_kernels.testing.ties import step_off_ties

SPECULATIVE = CONTRACTS[2]
BY_ROW = ("x", "raw_gate", "raw_beta", "output_gate")


@dataclass(frozen=True)
class Cell:
    """One size: state type and layout, window layout, H, N sequences of T tokens."""

    state: str
    layout: str
    window: str
    heads: int
    sequences: int
    tokens: int


def values_of(cell: Cell, device: str) -> Values:
    """Draw a call whose sequences all have T tokens."""
    rows = cell.sequences * cell.tokens
    sizes = {"N": cell.sequences, "T": cell.tokens, "R": rows, "H": cell.heads, "S": rows + 1}
    case = Case(
        sizes=sizes,
        state_dtype=STATE_DTYPES[cell.state],
        window=cell.window,
        scalars={"state_layout": cell.layout},
    )
    return draw(SPECULATIVE, case, device)


def one_token(cell: Cell, device: str) -> Callable[[], Tensor]:
    """Return a call of fused_decode for as many rows as there are sequences."""
    size = (cell.heads, cell.sequences)
    step = decode_calls.Cell("fused_decode", cell.layout, cell.state, *size, cell.window)
    return decode_calls.public_call(step, decode_calls.values_of(step, device))[0]


def few_of(values: Values, chosen: list[int]) -> Values:
    """Copy some sequences and their slots to the CPU; slots are numbered anew."""
    table, tokens = values["state_indices"], values["state_indices"].shape[1]
    rows = torch.tensor([n * tokens + t for n in chosen for t in range(tokens)])
    slots = table[chosen].flatten().long()
    few = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in values.items()}
    for name in BY_ROW:
        axis = 1 if values[name].dim() > 2 and values[name].shape[0] == 1 else 0
        few[name] = values[name].index_select(axis, rows.to(table.device)).cpu()
    few |= {name: values[name][slots].cpu() for name in ("state", "conv_state")}
    few["state_indices"] = torch.arange(len(slots), dtype=torch.int32).view(len(chosen), tokens)
    few["query_start_loc"] = torch.arange(len(chosen) + 1, dtype=torch.int32) * tokens
    few["num_accepted_tokens"] = values["num_accepted_tokens"][chosen].cpu()
    return few | {"first_slot": 0}


def refuse_if_wrong(cell: Cell, values: Values, call: Callable[[], Tensor]) -> None:
    """Run a call once and hold its first and last sequence against the reference.

    Raises:
        SystemExit: the call is wrong, so there is nothing to measure.
    """
    chosen = sorted({0, cell.sequences - 1})
    few = few_of(values, chosen)
    step_off_ties(SPECULATIVE, few)
    rows = [n * cell.tokens + t for n in chosen for t in range(cell.tokens)]
    values["x"][rows] = few["x"].to(values["x"].device)
    planned = clone(few)
    wanted = run_reference(SPECULATIVE, planned)
    right, right_state = exact(SPECULATIVE, few)
    found = call()[:, rows].cpu()
    slots = values["state_indices"][chosen].flatten().long()
    try:
        assert_within_budget(found, wanted, right, "output")
        assert_within_budget(values["state"][slots].cpu(), planned["state"], right_state, "state")
    except AssertionError as wrong:
        raise SystemExit(f"{cell}: {wrong}; nothing to measure") from wrong


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--states", nargs="+", choices=tuple(STATE_DTYPES), default=("f32", "bf16"))
    parser.add_argument("--layouts", nargs="+", choices=("vk", "kv"), default=("vk", "kv"))
    parser.add_argument("--windows", nargs="+", choices=("SD", "DS"), default=("SD",))
    parser.add_argument("--heads", nargs="+", type=int, default=(12, 32))
    parser.add_argument("--sequences", nargs="+", type=int, default=(1, 8, 32, 128))
    parser.add_argument("--tokens", nargs="+", type=int, default=(2, 4, 8))
    parser.add_argument("--rounds", type=int, default=20, help="calls behind each figure")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def cells(options: argparse.Namespace) -> list[Cell]:
    """Return the cells that the command asks for."""
    axes = (options.states, options.layouts, options.windows, options.heads, options.sequences)
    return [Cell(*axis) for axis in itertools.product(*axes, options.tokens)]


def warm(todo: list[Cell], device: str) -> None:
    """Compile what the cells need in parallel processes, before anything is timed.

    The calls are made on fake tensors, so their sizes cost nothing.
    """

    def every_call() -> None:
        for cell in todo:
            kda_ops.packed_fused_kda_decode(**values_of(cell, device))
            one_token(cell, device)()

    kda_ops.warmup(every_call, device=device)


def measure(cell: Cell, top: float, device: str, rounds: int) -> dict[str, Any]:
    """Check and time one cell; ``top`` is the ceiling in bytes a second."""
    values = values_of(cell, device)
    output = output_of(SPECULATIVE, values)
    call = functools.partial(kda_ops.packed_fused_kda_decode, **values, output=output)
    refuse_if_wrong(cell, values, call)
    peers = {}
    if cell.window == "SD":
        peers = speculative_peer.calls(
            cell.layout, values, lambda given: kda_ops.packed_fused_kda_decode(**given)
        )
    us, single, *theirs = gpu_timing.microseconds(
        [call, one_token(cell, device), *peers.values()], rounds
    )
    over = {name: time / us for name, time in zip(peers, theirs, strict=True)}
    moved = traffic(SPECULATIVE, values)
    return asdict(cell) | {
        "us": us,
        "bytes": moved,
        "share": moved / us * 1e6 / top,
        "one_token_us": single,
        "steps": us / single,
        "over_triton": over.get("checkpoints"),
        "over_triton_one_state": over.get("one state"),
    }


def row(line: dict[str, Any]) -> str:
    """Return a line of the table."""
    ratios = (line["over_triton"], line["over_triton_one_state"])
    peer = " ".join(f"{ratio:.2f}" if ratio else "-" for ratio in ratios)
    return (
        f"{line['state']:5s} {line['layout']:6s} {line['window']:6s} {line['heads']:2d} "
        f"{line['sequences']:4d} {line['tokens']:2d} {line['us']:9.1f} {line['share']:7.3f} "
        f"{line['one_token_us']:9.1f} {line['steps']:6.2f}  {peer}"
    )


def main() -> None:
    """Measure, print, and write the report if a file is named."""
    options = parse()
    todo = cells(options)
    warm(todo, options.device)
    facts = provenance.machine()
    top = gpu_timing.ceiling(options.rounds)
    harness.print_facts(facts | {"live peer": live_peer.name() or "none installed"})
    print(f"# mul_ on 1 GB: {top / 1e12:.2f} TB/s")
    print(
        "state layout window  H    N  T        us  of mul_  T = 1 us  steps  Triton, its last state"
    )
    lines = []
    for cell in todo:
        lines.append(measure(cell, top, options.device, options.rounds))
        print(row(lines[-1]), flush=True)
        torch.cuda.empty_cache()
    report = {
        "machine": facts,
        "ceiling": top,
        "live peer": live_peer.name(),
        "speculative": True,
        "sources": provenance.source_hashes(("packed_fused_decode", "fused_decode")),
        "kernels": provenance.kernel_hashes(),
        "lines": lines,
    }
    harness.write_json(options.json, report)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
