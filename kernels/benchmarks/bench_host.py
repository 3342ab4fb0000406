"""What a public call costs on the host beyond its kernel, beside a plain torch operator.

Run from a checkout with the package installed: ``python kernels/benchmarks/bench_host.py``.
Not here: how fast the kernels are (bench_decode.py).

The row of every call is a null row, so the kernel has nothing to compute but its zeros; what is
left is the way there: the public function, torch's dispatcher, signature and plan, TVM-FFI. The
overhead is the public call less the compiled kernel called directly with the same arguments.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import harness
import kda_ops
from kda_kernels._cpu import build

HEAD_DIM = 128
HEADS = 4


def tensors() -> dict[str, torch.Tensor]:
    """Make the tensors of one call of one null row."""
    width = HEADS * HEAD_DIM
    bf16 = torch.bfloat16
    return {
        "x": torch.randn(1, 3 * width).to(bf16),
        "weight": torch.randn(3, 4, width),
        "conv_state": torch.zeros(2, 3, 3 * width, dtype=bf16).transpose(1, 2),
        "raw_gate": torch.randn(1, width).to(bf16),
        "raw_beta": torch.randn(1, HEADS).to(bf16),
        "A_log": torch.randn(HEADS),
        "dt_bias": torch.randn(width),
        "indices": torch.full((1,), -1, dtype=torch.int32),
        "state": torch.zeros(2, HEADS, HEAD_DIM, HEAD_DIM),
        "output_gate": torch.randn(1, HEADS, HEAD_DIM).to(bf16),
        "norm_weight": torch.ones(HEAD_DIM),
        "starts": torch.tensor([0, 1], dtype=torch.int32),
        "accepted": torch.ones(1, dtype=torch.int32),
    }


def calls() -> dict[str, Callable[[], object]]:
    """Return what is timed, by name."""
    t = tensors()
    gates = (t["raw_gate"], t["raw_beta"], t["A_log"], t["dt_bias"])
    packed: tuple[Any, ...] = (t["x"], *gates, t["state"], t["indices"])
    packed_output = torch.empty(1, 1, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    packed_kernel = build.load("packed_decode")
    wide = (t["raw_gate"].view(1, 1, HEADS, HEAD_DIM), t["raw_beta"][None])
    norm = (t["output_gate"], t["norm_weight"])
    conv = (t["x"], t["weight"], t["conv_state"])
    tail = (t["A_log"], t["dt_bias"], t["indices"], t["state"], *norm)
    fused: tuple[Any, ...] = (*conv, *wide, *tail)
    fused_output = torch.empty(1, 1, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    fused_kernel = build.load("fused_decode")
    a, b, c = (torch.zeros(64) for _ in range(3))
    packed_call: Callable[..., object] = kda_ops.packed_kda_decode
    fused_call: Callable[..., object] = kda_ops.fused_kda_decode
    fused_tail = (-5.0, 1e-5, None, None, 1, "vk", fused_output)
    # One token a sequence: the window of fused_decode serves, and the table has one column.
    before, behind = (*conv, *wide, t["A_log"], t["dt_bias"]), (t["state"], *norm)
    spec: tuple[Any, ...] = (*before, t["indices"][:, None], *behind)
    spec_kernel = build.load("packed_fused_decode")
    spec_call: Callable[..., object] = kda_ops.packed_fused_kda_decode
    counts = {"query_start_loc": t["starts"], "num_accepted_tokens": t["accepted"]}
    spec_tail = (*counts.values(), -5.0, 1e-5, None, None, None, 1, "vk", fused_output)
    return {
        "torch.add(out=)": lambda: torch.add(a, b, out=c),
        "packed kernel": lambda: packed_kernel(*packed, None, -5.0, 0, "vk", packed_output),
        "packed call": lambda: packed_call(*packed),
        "packed call, output=": lambda: packed_call(*packed, packed_output),
        "fused kernel": lambda: fused_kernel(*fused, *fused_tail),
        "fused call": lambda: fused_call(*fused),
        "fused call, output=": lambda: fused_call(*fused, output=fused_output),
        "packed_fused kernel": lambda: spec_kernel(*spec, *spec_tail),
        "packed_fused call": lambda: spec_call(*spec, **counts),
        "packed_fused call, output=": lambda: spec_call(*spec, output=fused_output, **counts),
    }


def main() -> None:
    """Measure, print, and write the report if a file is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = harness.print_machine()
    sample = harness.measure(calls(), options.rounds)
    report: dict[str, dict[str, float]] = {}
    print("call                       us  over its kernel")
    for name in sample.seconds:
        microseconds = sample.median(name) * 1e6
        report[name] = {"us": microseconds}
        over = ""
        if " call" in name:
            kernel = sample.median(f"{name.split()[0]} kernel") * 1e6
            report[name]["over its kernel"] = microseconds - kernel
            over = f"{microseconds - kernel:.1f}"
        print(f"{name:22s} {microseconds:7.2f}  {over}")
    harness.write_json(options.json, {"machine": facts, "calls": report})


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
