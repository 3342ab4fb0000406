"""How things are measured: samples, rounds, working sets, and what a report says about its machine.

Lives here: the protocol. Not here: what is measured (bench_decode.py, bench_host.py).

The protocol. Contestants run in turn within every round, so that a ratio compares neighbours in
time and a busy machine hurts both; a sample is as many calls as fill ``SAMPLE_SECONDS``; a figure
is the median over the rounds, a ratio the median of the rounds' ratios. Working sets are warm (the
same slots at every call) or cold (every call takes the next slots of a pool that exceeds the
caches).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SAMPLE_SECONDS = 0.01
WARM_UP_SECONDS = 0.05
COLD_BYTES = 256 << 20
"""A cold working set is at least this large: eight times the last-level cache of the machines that
this was written on."""

Contestant = Callable[[], object]


@dataclass(frozen=True)
class Sample:
    """Seconds per call of every contestant, round by round."""

    seconds: Mapping[str, list[float]]

    def median(self, name: str) -> float:
        """Return the median of a contestant's seconds per call."""
        return statistics.median(self.seconds[name])

    def speedup(self, name: str, over: str) -> float:
        """Return how many times faster ``name`` is than ``over``."""
        pairs = zip(self.seconds[over], self.seconds[name], strict=True)
        return statistics.median(slow / quick for slow, quick in pairs)


def measure(contestants: Mapping[str, Contestant], rounds: int = 15) -> Sample:
    """Time the contestants in turn for a number of rounds."""
    calls = {name: _calls_per_sample(call) for name, call in contestants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            seconds[name].append(_time(call, calls[name]))
    return Sample(seconds)


def _time(call: Contestant, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def _calls_per_sample(call: Contestant) -> int:
    call()
    deadline, count = time.perf_counter() + WARM_UP_SECONDS, 0
    start = time.perf_counter()
    while time.perf_counter() < deadline or count < 3:
        call()
        count += 1
    each = (time.perf_counter() - start) / count
    return max(1, math.ceil(SAMPLE_SECONDS / each))


def rotating(calls: Iterable[Contestant]) -> Contestant:
    """Return one call that runs the given ones in turn, one at each call."""
    turn = itertools.cycle(list(calls))

    def call() -> object:
        return next(turn)()

    return call


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def machine() -> dict[str, Any]:
    """Return what the figures depend on: processor, threads, load and versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "load average": [round(x, 2) for x in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        **_kernel_facts(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    facts = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    family = f"family {facts.get('cpu family', '?')} model {facts.get('model', '?')}"
    return f"{facts.get('model name', platform.machine())} ({family})"


def _kernel_facts() -> dict[str, str]:
    from kda_kernels._cpu import build  # noqa: PLC0415 - a report may be made without it

    facts = build.describe()
    return {name: facts[name] for name in ("compiler", "vectors", "threads")}


def write_json(path: Path | None, report: Mapping[str, Any]) -> None:
    """Write a report, if a path is given."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def print_machine() -> dict[str, Any]:
    """Print and return the facts of the machine, one a line."""
    facts = machine()
    print_facts(facts)
    return facts


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print facts, one a line."""
    for name, value in facts.items():
        print(f"# {name}: {value}")
