"""How kernels are timed on a GPU: the profiler's durations, caches cold, calls told apart by order.

Lives here: the protocol, and the ceiling that shares refer to. Not here: what is timed
(cuda_decode.py, bench_model.py).

The protocol. Before every call a buffer of 256 MB is rewritten, so that caches hold nothing of the
call. That kernel is also the marker between calls: what ran between two markers belongs to the call
between them. A call's time is the sum of its kernels' durations as the GPU reports them, a figure
the median over the repeats. Where the profiler reports no kernels, CUDA events around the call
serve; they include the launch, so a report names the timer.
"""

from __future__ import annotations

import functools
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

FLUSH_BYTES = 256 << 20
CEILING_BYTES = 1 << 30

Call = Callable[[], object]


@dataclass(frozen=True)
class Launch:
    """One kernel as it ran: its name, when it started and how long it took, in microseconds."""

    name: str
    start: float
    us: float


class NothingProfiled(RuntimeError):
    """The profiler did not report what ran."""


def split(launches: Sequence[Launch], calls: int) -> list[list[Launch]]:
    """Return the kernels of each call.

    Args:
        launches: everything that ran, in any order: a marker, then for each call its kernels and a
            marker.
        calls: how many there were.

    Raises:
        NothingProfiled: there are more or fewer markers than that.
    """
    ordered = sorted(launches, key=lambda launch: launch.start)
    found: list[list[Launch]] = []
    for launch in ordered:
        if launch.name == ordered[0].name:
            found.append([])
        else:
            found[-1].append(launch)
    if len(found) != calls + 1:
        raise NothingProfiled(f"{len(found)} markers around {calls} calls")
    return found[:-1]


def timelines(calls: Sequence[Call], repeats: int) -> list[list[list[Launch]]]:
    """Run calls under the profiler; return for each call and repeat the kernels that ran.

    Raises:
        NothingProfiled: the profiler did not report them.
    """
    mark = functools.partial(_flush_buffer().fill_, 1)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        mark()
        for call in calls:
            for _ in range(repeats):
                call()
                mark()
        torch.cuda.synchronize()
    events = split(_launches(profiler), len(calls) * repeats)
    return [events[i * repeats : (i + 1) * repeats] for i in range(len(calls))]


def _launches(profiler: Any) -> list[Launch]:  # noqa: ANN401 - torch's profiler has no public type
    """Return what ran on the GPU during a profile."""
    return [
        Launch(event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]


@functools.cache
def _flush_buffer() -> torch.Tensor:
    """Return the buffer; of a type that nothing else fills, so that the marker's name is its own.

    Made once, because a report flushes thousands of times.
    """
    return torch.empty(FLUSH_BYTES // 2, dtype=torch.int16, device="cuda")


def microseconds(calls: Sequence[Call], repeats: int) -> list[float]:
    """Return the median duration of each call's kernels, caches cold.

    The calls are made once before, so that nothing is compiled while they are timed.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    try:
        runs = timelines(calls, repeats)
        totals = [[sum(launch.us for launch in run) for run in call] for call in runs]
        if not all(run for call in totals for run in call):
            raise NothingProfiled("calls without a kernel")
    except NothingProfiled as reason:
        warnings.warn(f"CUDA events instead of the profiler: {reason}", RuntimeWarning, 2)
        totals = [_by_events(call, repeats) for call in calls]
    return [statistics.median(call) for call in totals]


def _by_events(call: Call, repeats: int) -> list[float]:
    """Return durations between two CUDA events around a call, caches cold."""
    pairs = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        _flush_buffer().fill_(1)
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in pairs]


def captured(call: Call) -> Call:
    """Record a call, made before, in a CUDA graph and return the replay.

    Without ``torch.cuda.graph``, which collects garbage at each of hundreds of captures.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        call()
        graph.capture_end()
    return graph.replay


def ceiling(repeats: int) -> float:
    """Return the bytes a second that an in-place ``mul_`` of 1 GB reads and writes."""
    x = torch.ones(CEILING_BYTES // 4, device="cuda")
    (duration,) = microseconds([functools.partial(x.mul_, 1.0001)], repeats)
    return 2 * CEILING_BYTES / duration * 1e6
