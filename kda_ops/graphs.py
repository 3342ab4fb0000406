"""CUDA graphs of decode steps: one graph a batch size, padded with null rows.

Lives here: DecodeGraphs. Not here: pools and slots (cache.py), and the graphs that torch.compile
makes under ``mode="reduce-overhead"``.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_HINT = (
    "a captured step may not read values on the host (.item(), .tolist(), nonzero) or capture "
    "graphs of its own (compile it without reduce-overhead)"
)


@dataclass(frozen=True)
class GraphReport:
    """What a :class:`DecodeGraphs` holds.

    Attributes:
        device: where steps run.
        captured: batch sizes with a CUDA graph, ascending; empty before the first call and on CPU.
        input_bytes: bytes of the buffers that inputs are copied into.
        pool_bytes: bytes of the memory pool that all graphs share, outputs included.
        padded_calls: calls by the batch size that served them (replays, where there are graphs).
        eager_calls: calls with more rows than the largest batch size.
    """

    device: torch.device
    captured: tuple[int, ...]
    input_bytes: int
    pool_bytes: int
    padded_calls: dict[int, int]
    eager_calls: int


class DecodeGraphs:
    """Runs a decode step from CUDA graphs, one for each of a few batch sizes.

    A call with n rows is padded with null rows to the smallest batch size that holds them, its
    slots and inputs are copied into the graph's own buffers, the graph is replayed, and copies of
    the first n rows of the outputs are returned. With more rows than the largest size the step
    runs eagerly. Captured when first called, or by :meth:`capture`: warm-up and capture run on
    null rows only, so no live slot moves.

    On CPU, without CUDA graphs, the step runs eagerly on the same padded buffers.

    The step is a function ``step(slots, *inputs)`` of tensors that all have one row for each
    sequence in dimension 0; it returns tensors with a row each, alone or nested in tuples, lists
    and dictionaries. It may be compiled, without ``mode="reduce-overhead"``, and runs under
    ``torch.no_grad()``. Rows must be independent of each other, and a row whose slot is
    ``null_index`` must leave every pool alone, as the operators' rows do.

    Calls may come from any stream and thread; each waits for the one before it.

    Args:
        step: the decode step.
        batch_sizes: rows of the graphs.
        null_index: slot of padding rows: −1 is null for every operator; a step in plain PyTorch,
            where −1 is the last slot, pads with a slot that belongs to nobody (0 in a StateCache).
        warmups: eager runs of each batch size before it is captured, in which kernels are built,
            loaded and tuned.
        device: where the step runs; None means where the first input is (the slots, if it is the
            only argument).

    Raises:
        ValueError: no batch size, or one below 1.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        batch_sizes: Sequence[int],
        *,
        null_index: int = -1,
        warmups: int = 2,
        device: torch.device | str | None = None,
    ) -> None:
        """Take note; nothing runs before the first call."""
        self.batch_sizes = tuple(sorted(set(batch_sizes)))
        if not self.batch_sizes or self.batch_sizes[0] < 1:
            raise ValueError(f"DecodeGraphs: batch_sizes must be >= 1, got {list(batch_sizes)}")
        self._step = step
        self._null = null_index
        self._warmups = max(1, warmups)
        self._device = None if device is None else torch.device(device)
        self._lock = threading.RLock()
        self.clear()

    def clear(self) -> None:
        """Drop graphs, buffers and counts; the next call captures again."""
        with self._lock:
            self._buffers: tuple[Tensor, ...] = ()
            self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Any]] = {}
            self._pool: Any = None
            self._done: torch.cuda.Event | None = None
            # Rows of the buffers that hold something else than padding.
            self._filled = 0
            self._padded_calls = dict.fromkeys(self.batch_sizes, 0)
            self._eager_calls = 0

    def capture(self, slots: Tensor, *inputs: Tensor) -> None:
        """Warm up and capture every batch size, for arguments like these; values do not matter.

        Raises:
            TypeError: an argument or an output of the step is no tensor.
            ValueError: an argument or an output has no rows in dimension 0.
            RuntimeError: the step cannot be captured. Nothing is kept.
        """
        arguments = (slots, *inputs)
        with self._lock, torch.no_grad():
            self.clear()
            self._buffers = self._buffers_like(arguments)
            try:
                if self.device.type == "cuda":
                    self._capture_all()
                else:
                    self._run(self.batch_sizes[0])
            except BaseException:
                self.clear()
                raise

    def __call__(self, slots: Tensor, *inputs: Tensor) -> Any:  # noqa: ANN401 - the step's own
        """Run one step.

        Args:
            slots: [n, ...] slot of each row, int32 or int64.
            *inputs: [n, ...] each, with the trailing sizes and types of the first call. Copied
                from any device; pinned memory may be reused only when the copy has happened.

        Returns:
            What the step returns, n rows each, in memory of the caller's own.

        Raises:
            TypeError, ValueError: arguments unlike those of the first call; nothing ran.
            RuntimeError: as :meth:`capture`, or the current stream is being captured.
        """
        arguments = (slots, *inputs)
        with self._lock, torch.no_grad():
            if not self._buffers:
                self.capture(*arguments)
            rows = self._checked(arguments)
            with self._in_order():
                if rows > self.batch_sizes[-1]:
                    self._eager_calls += 1
                    return self._step(*(value.to(self.device) for value in arguments))
                size = self.batch_sizes[bisect.bisect_left(self.batch_sizes, rows)]
                self._copy_in(rows, arguments)
                outputs = self._run(size)
                self._padded_calls[size] += 1
                return pytree.tree_map_only(Tensor, lambda t: t[:rows].clone(), outputs)

    @property
    def device(self) -> torch.device:
        """Where steps run.

        Raises:
            RuntimeError: not known before the first call.
        """
        if not self._buffers:
            raise RuntimeError("DecodeGraphs: nothing has been captured yet")
        return self._buffers[0].device

    @property
    def report(self) -> GraphReport:
        """What is held, and which calls it has served.

        Raises:
            RuntimeError: nothing has been captured yet.
        """
        held = 0
        if self._graphs:
            segments = torch.cuda.memory_snapshot()
            held = sum(s["total_size"] for s in segments if s["segment_pool_id"] == self._pool)
        return GraphReport(
            self.device,
            tuple(sorted(self._graphs)),
            sum(buffer.nbytes for buffer in self._buffers),
            held,
            dict(self._padded_calls),
            self._eager_calls,
        )

    def _buffers_like(self, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Allocate one buffer an argument, of the largest batch size, full of padding."""
        for number, value in enumerate(arguments):
            if not isinstance(value, Tensor):
                raise TypeError(f"DecodeGraphs: {_name(number)} must be a tensor, got {value!r}")
            if value.dim() < 1:
                raise ValueError(f"DecodeGraphs: {_name(number)} must have rows, got a scalar")
        device = self._device or arguments[min(1, len(arguments) - 1)].device
        shapes = [(self.batch_sizes[-1], *value.shape[1:]) for value in arguments]
        return tuple(
            torch.full(shape, 0 if number else self._null, dtype=value.dtype, device=device)
            for number, (shape, value) in enumerate(zip(shapes, arguments, strict=True))
        )

    def _checked(self, arguments: tuple[Tensor, ...]) -> int:
        """Return the number of rows of a call that fits the buffers."""
        if len(arguments) != len(self._buffers):
            fact = f"{len(self._buffers) - 1} inputs, got {len(arguments) - 1}"
            raise ValueError(f"DecodeGraphs: the step was captured with {fact}")
        rows = len(arguments[0])
        for number, (value, buffer) in enumerate(zip(arguments, self._buffers, strict=True)):
            if value.dtype != buffer.dtype:
                rule = f"{buffer.dtype}, as in the first call, got {value.dtype}"
                raise TypeError(f"DecodeGraphs: {_name(number)} must be {rule}")
            if value.shape != (rows, *buffer.shape[1:]):
                rule = f"{[rows, *buffer.shape[1:]]}, got {list(value.shape)}"
                raise ValueError(f"DecodeGraphs: {_name(number)} must be {rule}")
        return rows

    def _copy_in(self, rows: int, arguments: tuple[Tensor, ...]) -> None:
        """Fill the first rows of the buffers, and pad where an earlier call had more rows."""
        filled, self._filled = self._filled, max(self._filled, rows)
        for number, (value, buffer) in enumerate(zip(arguments, self._buffers, strict=True)):
            buffer[:rows].copy_(value, non_blocking=True)
            if filled > rows:
                buffer[rows:filled].fill_(0 if number else self._null)
        self._filled = rows

    def _run(self, size: int) -> Any:  # noqa: ANN401 - the step's own
        """Run the step on the first rows of the buffers: a replay where there is a graph."""
        if size in self._graphs:
            graph, outputs = self._graphs[size]
            graph.replay()
            return outputs
        outputs = self._step(*(buffer[:size] for buffer in self._buffers))
        for leaf in pytree.tree_leaves(outputs):
            if not isinstance(leaf, Tensor):
                raise TypeError(f"DecodeGraphs: the step must return tensors, got {leaf!r}")
            if leaf.dim() < 1 or len(leaf) != size:
                fact = f"{size} rows in dimension 0, got {list(leaf.shape)}"
                raise ValueError(f"DecodeGraphs: what the step returns must have {fact}")
        return outputs

    def _capture_all(self) -> None:
        """Capture every batch size, the largest first: smaller ones then reuse its memory."""
        with torch.cuda.device(self.device):
            _refuse_inside_a_capture()
            current, side = torch.cuda.current_stream(), torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()
            self._done = torch.cuda.Event()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                graphs = {size: self._captured(size) for size in reversed(self.batch_sizes)}
            current.wait_stream(side)
            self._done.record(current)
        self._graphs = graphs

    def _captured(self, size: int) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Warm up and capture one batch size on the current stream."""
        for _ in range(self._warmups):
            self._run(size)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
                outputs = self._run(size)
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            message = f"DecodeGraphs: the step cannot be captured for {size} rows: {reason}"
            raise RuntimeError(f"{message} ({_HINT})") from error
        return graph, outputs

    @contextlib.contextmanager
    def _in_order(self) -> Iterator[None]:
        """On a GPU, run after the call before, whatever stream that was on."""
        if self._done is None:
            yield
            return
        with torch.cuda.device(self.device):
            _refuse_inside_a_capture()
            stream = torch.cuda.current_stream()
            stream.wait_event(self._done)
            try:
                yield
            finally:
                self._done.record(stream)


def _refuse_inside_a_capture() -> None:
    """Raise where somebody captures a graph on the current stream: graphs do not nest."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("DecodeGraphs: cannot be called while a graph is captured")


def _name(number: int) -> str:
    """Name an argument of the step."""
    return f"input {number}" if number else "slots"
