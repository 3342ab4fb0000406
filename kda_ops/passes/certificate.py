"""Runs a matched region and the operator that would replace it, once, on small random inputs.

Lives here: the inputs, the two runs and the comparison. Not here: what is compared with what is
decided in step.py. The operator's side is its reference, so that no kernel has to be built (or
device be woken) while a model compiles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from kda_kernels.packed_decode.reference import packed_decode as reference
from kda_ops.passes.arguments import D
from kda_ops.passes.delta_rule import HEAD, ROW
from kda_ops.passes.reasons import Reason, RefusalError
from kda_ops.passes.step import Step
from kda_ops.passes.terms import RESHAPES

aten = torch.ops.aten

# Both sides compute in float32 and round once: half a unit in the last place each, and sums of 128
# products in different orders. A wrong reading differs by percents of the largest element.
TOLERANCE = {torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SPARE_SLOTS = 3
PAD_AT_MOST = 64


@dataclass
class Trial:
    """Tensors for the nodes of one region, with fewer rows than the graph may have."""

    step: Step
    rows: int
    generator: torch.Generator
    values: dict[Node, Any] = field(default_factory=dict)

    def size(self, size: int | torch.SymInt) -> int:
        """Return a size of the graph with the trial's number of rows in place of the graph's."""
        window = self.step.window
        full = window.number(size)
        if not isinstance(size, torch.SymInt):
            return full
        rows = window.sizes[ROW]
        if full % rows:
            raise RefusalError(Reason.CERTIFICATE, None, f"size {size} is not decided")
        return full // rows * self.rows

    def shrink(self, node: Node) -> tuple[int, ...]:
        """Return the trial's shape of a node's value."""
        return tuple(self.size(s) for s in node.meta["val"].shape)

    def strides(self, node: Node, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return strides in the graph's order of dimensions, padding included but kept small."""
        window = self.step.window
        value = node.meta["val"]
        full = [window.number(s) for s in value.shape]
        given = [window.number(s) for s in value.stride()]
        strides = [0] * len(shape)
        dense, new = 1, 1
        for dim in sorted(range(len(shape)), key=lambda d: (given[d], full[d])):
            if given[dim] == 0 and full[dim] > 1:
                continue
            pad = given[dim] - dense if full[dim] > 1 else 0
            strides[dim] = new + (min(pad, PAD_AT_MOST) if pad > 0 else 0)
            dense = given[dim] * full[dim] if full[dim] > 1 else dense
            new = strides[dim] * shape[dim]
        return tuple(strides)

    def random(self, node: Node, role: str) -> torch.Tensor:
        """Return values that tell roles, axes, rows and signs apart."""
        shape = self.shape_of(node, role)
        dtype = node.meta["val"].dtype
        if role == "state_indices":
            order = torch.randperm(shape[0] + SPARE_SLOTS, generator=self.generator)[: shape[0]]
            order[1::2] -= shape[0] + SPARE_SLOTS
            return order.to(dtype)
        value = torch.randn(shape, generator=self.generator)
        if role == "A_log":
            value = value * 0.7
        elif role in {"mixed_qkv", "raw_gate", "raw_beta"}:
            large = torch.rand(shape, generator=self.generator)
            value = torch.where(large < 0.02, value * 40.0, value * 1.5)
        laid = torch.empty_strided(shape, self.strides(node, shape), dtype=dtype)
        return laid.copy_(value)

    def shape_of(self, node: Node, role: str) -> tuple[int, ...]:
        """Return the trial's shape of an argument's leaf."""
        if role == "state" and self.step.arguments.index is not None:
            return (self.rows + SPARE_SLOTS, *(int(s) for s in node.meta["val"].shape[1:]))
        if role in {"A_log", "dt_bias"}:
            return tuple(int(s) for s in node.meta["val"].shape)
        return self.shrink(node)

    # The emitter's side: the views that lead to the operator's arguments, at once on tensors.
    def input(self, node: Node) -> Any:
        """Return the tensor that stands for a node."""
        return self.values[node]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Call an operation on the CPU."""
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        return target(*args, **kwargs)

    def value(self, item: Any) -> torch.Tensor:
        """Return the tensor itself."""
        return item

    def run(self, end: Node) -> torch.Tensor:
        """Compute a node of the region from the leaves."""
        for node in self.step.region:
            if node not in self.values:
                self.values[node] = self.computed(node)
            if node is end:
                break
        return self.values[end]

    def computed(self, node: Node) -> Any:
        """Call a node of the graph on the trial's tensors."""
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), self.stand_in)
        if node.target in RESHAPES or node.target in {aten.expand.default, aten.full.default}:
            shape = list(self.shrink(node))
            args = (shape, *args[1:]) if node.target is aten.full.default else (args[0], shape)
        if node.target is aten.copy_.default:
            return args[1]
        return self.call(node.target, *args, **kwargs)

    def stand_in(self, node: Node) -> Any:
        """Return the trial's value of an operand."""
        if node in self.values:
            return self.values[node]
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            return self.size(value)
        raise RefusalError(Reason.CERTIFICATE, node, "not computed from the step's inputs")


def certify(step: Step) -> None:
    """Raise RefusalError unless the region and the operator agree in output and pool."""
    with quiet():
        try:
            compare(step)
        except RefusalError:
            raise
        except Exception as error:  # a certificate that cannot be run is a refusal, not a crash
            fact = f"could not be run: {type(error).__name__}: {error}"
            raise RefusalError(Reason.CERTIFICATE, step.output, fact[:300]) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Step outside of the compiler's modes."""
    with _disable_current_modes(), torch.no_grad():
        yield


def trial_rows(step: Step) -> int:
    """Return how many rows to try: few, unless the graph has its rows written into it."""
    symbolic = isinstance(step.anchor.value.meta["val"].shape[0], torch.SymInt)
    rows = step.window.sizes[ROW]
    return (2 if step.window.sizes[HEAD] > 8 else 3) if symbolic else rows


def compare(step: Step) -> None:
    """Run both sides on the same inputs and compare."""
    rows = trial_rows(step)
    trial = Trial(step, rows, torch.Generator().manual_seed(2048))
    for node, role in step.arguments.leaves.items():
        trial.values[node] = trial.random(node, role)
    pool = trial.values[step.arguments.pool]
    before = pool.clone()
    expected = trial.run(step.output)
    written = trial.run(step.anchor.write)
    arguments = step.arguments.emit(trial)
    arguments["state"] = before
    output = torch.empty(rows, 1, step.arguments.heads, D, dtype=step.output_dtype)
    reference(*arguments.values(), output)  # type: ignore[misc]
    close(step, "output", output.reshape(-1), expected.reshape(-1))
    close(step, "state", before, written)


def close(step: Step, name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Refuse a difference beyond rounding, measured against the largest element."""
    tolerance = TOLERANCE[expected.dtype]
    left, right = found.float(), expected.float()
    worst = (left - right).abs().max().item() if left.numel() else 0.0
    largest = right.abs().max().item() if right.numel() else 0.0
    if not worst <= tolerance * (1.0 + largest):
        fact = f"{name} differs by {worst:.3g} where values reach {largest:.3g}"
        raise RefusalError(Reason.CERTIFICATE, step.output, fact)
