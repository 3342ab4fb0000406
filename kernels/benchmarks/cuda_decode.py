"""The GPU's part of bench_decode.py: kernel durations of packed_decode, share of an in-place mul_.

Run as ``python kernels/benchmarks/bench_decode.py --device cuda``. Not here: the CPU's part.

Durations are the GPU's own (torch's profiler), the median of the calls, each behind a rewrite of
256 MB, so that caches are cold. Bytes are all that the step must move: states in and out,
activations, output. The ceiling is ``mul_`` on 1 GB in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import harness
import kda_ops
from kda_kernels._cute import compile as backend
from kda_kernels.packed_decode.contract import CONTRACT
from kda_kernels.testing.cases import traffic

FLUSH_BYTES = 256 << 20
CEILING_BYTES = 1 << 30
HEAD_DIM = 128
STATE_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def microseconds(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Return the median duration of the one kernel that each call launches, caches cold."""
    flush = torch.empty(FLUSH_BYTES // 4, device="cuda")
    for call in calls:
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for call in calls:
            for _ in range(repeats):
                flush.zero_()
                call()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    cleaning = ("fill", "memset")
    durations = [
        event.time_range.elapsed_us()
        for event in events
        if not any(word in event.name.lower() for word in cleaning)
    ]
    if len(durations) != len(calls) * repeats:
        raise RuntimeError(f"{len(durations)} kernels for {len(calls) * repeats} calls")
    chunks = [durations[i * repeats : (i + 1) * repeats] for i in range(len(calls))]
    return [statistics.median(chunk) for chunk in chunks]


def ceiling(repeats: int) -> float:
    """Return the bytes a second of mul_ in place."""
    x = torch.ones(CEILING_BYTES // 4, device="cuda")
    (duration,) = microseconds([lambda: x.mul_(1.0001)], repeats)
    return 2 * CEILING_BYTES / duration * 1e6


def inputs(state: str, layout: str, heads: int, rows: int) -> dict[str, Any]:
    """Make the arguments of one call on the GPU; the slots are shuffled."""
    width = heads * HEAD_DIM

    def activation(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(torch.bfloat16)

    pool = torch.randn(rows, heads, HEAD_DIM, HEAD_DIM, device="cuda")
    return {
        "mixed_qkv": activation(rows, 3 * width),
        "raw_gate": activation(rows, width),
        "raw_beta": activation(rows, heads),
        "A_log": torch.randn(heads, device="cuda") * 0.5,
        "dt_bias": torch.randn(width, device="cuda"),
        "state": pool.to(STATE_DTYPES[state]),
        "state_indices": torch.randperm(rows, device="cuda").to(torch.int32),
        "scale": None,
        "lower_bound": -5.0,
        "first_slot": 0,
        "state_layout": layout,
        "output_dtype": None,
    }


def public_call(values: dict[str, Any]) -> Callable[[], object]:
    """Return one call of the public function into an output of its own."""
    heads, rows = values["state"].shape[1], values["mixed_qkv"].shape[0]
    output = torch.empty(rows, 1, heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    arguments = {argument.name: values[argument.name] for argument in CONTRACT.tensors}
    arguments |= {"output": output, "state_layout": values["state_layout"]}
    return lambda: kda_ops.packed_kda_decode(**arguments)


def host_microseconds(call: Callable[[], object], count: int = 2000) -> float:
    """Return what a call costs on the host, while the GPU keeps up."""
    for _ in range(50):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / count * 1e6


def facts() -> dict[str, Any]:
    """Return what the figures depend on."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "processors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "CuTe DSL": backend.dsl_version(),
    }


def report(options: argparse.Namespace) -> None:
    """Print the table, line by line as it is measured.

    ``options`` are those of bench_decode.py: states, layouts, heads, rows, rounds, json.
    """
    found: dict[str, Any] = {"machine": facts(), "lines": []}
    top = found["ceiling"] = ceiling(options.rounds)
    for name, value in found["machine"].items():
        print(f"# {name}: {value}")
    print(f"# mul_ on 1 GB: {top / 1e12:.2f} TB/s\n")
    print("state layout   H rows        us   TB/s  of mul_")
    axes = (options.states, options.layouts, options.heads, options.rows)
    for state, layout, heads, rows in itertools.product(*axes):
        values = inputs(state, layout, heads, rows)
        (duration,) = microseconds([public_call(values)], options.rounds)
        speed = traffic(CONTRACT, values) / duration * 1e6
        line = {"state": state, "layout": layout, "heads": heads, "rows": rows}
        found["lines"].append(line | {"us": duration, "bytes_per_second": speed})
        print(
            f"{state:5s} {layout:6s} {heads:3d} {rows:4d} {duration:9.1f} {speed / 1e12:6.2f} "
            f"{speed / top:7.3f}",
            flush=True,
        )
    found["host_us"] = host_microseconds(public_call(inputs("f32", "vk", 12, 1)))
    print(f"\n# a public call on the host: {found['host_us']:.1f} us")
    harness.write_json(options.json, found)
