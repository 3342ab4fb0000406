"""Runs a matched region and the operator that would replace it, once, on small random inputs.

Lives here: the inputs, the two runs and the comparison. Not here: what is compared with what is
decided in step.py. The operator's side is its reference, so that no kernel has to be built (or
device be woken) while a model compiles.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from kda_kernels.fused_decode.reference import fused_decode
from kda_kernels.packed_decode.reference import packed_decode
from kda_ops.passes.core import D
from kda_ops.passes.fused_arguments import FusedArguments
from kda_ops.passes.nodes import CASTS, RESHAPES, operands, rounds
from kda_ops.passes.reasons import Reason, RefusalError
from kda_ops.passes.step import Step
from kda_ops.passes.terms import ROW

aten = torch.ops.aten
REFERENCES: dict[str, Callable[..., None]] = {
    "packed_decode": packed_decode,
    "fused_decode": fused_decode,
}

# Both sides compute in float32 and round once: half a unit in the last place each, and sums of 128
# products in different orders. A wrong reading differs by percents of the largest element.
TOLERANCE = {torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SPARE_SLOTS = 3
PAD_AT_MOST = 64
MANY_HEADS = 8
MOST_WORK = 256  # rows times heads, 16 MiB of state


@dataclass
class Trial:
    """Tensors for the nodes of one region, with fewer rows than the graph may have."""

    step: Step
    rows: int
    generator: torch.Generator
    values: dict[Node, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Note which nodes are whole pools: they have as many slots as the trial's."""
        self.wholes = {node for found in self.step.pools.values() for node in found.touching}

    @property
    def first_slot(self) -> int | None:
        """The least slot that the graph's own code allows."""
        arguments = self.step.arguments
        core = arguments.core if isinstance(arguments, FusedArguments) else arguments
        return core.first_slot

    def shrink(self, node: Node) -> tuple[int, ...]:
        """Return the trial's shape of a node's value: fewer rows, all else as it is."""
        scope = self.step.scope
        rows, running = scope.sizes[ROW], scope.rows_in.get(node, ())
        shape = []
        for dim, size in enumerate(scope.shape(node)):
            over_rows = dim in running or isinstance(node.meta["val"].shape[dim], torch.SymInt)
            if over_rows and size % rows:
                raise RefusalError(Reason.CERTIFICATE, node, f"dimension {dim} is not decided")
            shape.append(size // rows * self.rows if over_rows else size)
        return tuple(shape)

    def strides(self, node: Node, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return strides in the graph's order of dimensions, padding included but kept small."""
        scope = self.step.scope
        value = node.meta["val"]
        full = [scope.number(s) for s in value.shape]
        given = [scope.number(s) for s in value.stride()]
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
            if self.first_slot is None:
                order[1::2] -= shape[0] + SPARE_SLOTS
            return order.to(dtype)
        if role == "valid":
            return torch.arange(math.prod(shape)).reshape(shape) % 3 != 1
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
        if role == "state_indices":
            return (self.rows,)
        if role in {"state", "conv_state"}:
            spare = 0 if self.step.arguments.index is None else SPARE_SLOTS
            return (self.rows + spare, *(int(s) for s in node.meta["val"].shape[1:]))
        if role in {"A_log", "dt_bias", "weight"}:
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
        args, kwargs = torch.fx.node.map_arg((operands(node), dict(node.kwargs)), self.stand_in)
        if node in self.step.dropped:
            return self.unrounded(node, args, kwargs)
        if node in self.wholes and node.target in RESHAPES:
            args = (args[0], [args[0].shape[0], *(int(n) for n in node.meta["val"].shape[1:])])
        elif node.target in RESHAPES or node.target in {aten.expand.default, aten.full.default}:
            shape = list(self.shrink(node))
            args = (shape, *args[1:]) if node.target is aten.full.default else (args[0], shape)
        if node.target is aten.copy_.default:
            return args[1]
        value = self.call(node.target, *args, **kwargs)
        # Below a rounding that is dropped values are float32; what is rounded here stays rounded.
        return value.to(node.meta["val"].dtype) if rounds(node) else value

    def unrounded(self, node: Node, args: Any, kwargs: Any) -> torch.Tensor:
        """Compute in float32 what the graph rounds and the operator does not."""
        args, kwargs = tree_map_only(
            torch.Tensor, lambda t: t.float() if t.is_floating_point() else t, (args, kwargs)
        )
        return args[0] if node.target in CASTS else self.call(node.target, *args, **kwargs)

    def stand_in(self, node: Node) -> Any:
        """Return the trial's value of an operand."""
        if node not in self.values:
            node = self.step.scope.same.get(node, node)
        if node in self.values:
            return self.values[node]
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            return self.step.scope.number(value) // self.step.scope.sizes[ROW] * self.rows
        raise RefusalError(Reason.CERTIFICATE, node, "not computed from the step's inputs")


_certified: set[str] = set()


def fingerprint(step: Step) -> str:
    """Return what a certificate depends on, the same for layers that are written alike."""
    names: dict[Node, str] = {node: f"%{i}" for i, node in enumerate(step.arguments.leaves)}
    lines = []

    def name(node: Node) -> str:
        return names.get(node) or names.get(step.scope.same.get(node, node), node.name)

    for node in step.arguments.leaves:
        value = node.meta["val"]
        lines.append(f"{value.dtype} {tuple(value.shape)} {value.stride()}")
    for node in step.region:
        names[node] = f"%{len(names)}" + "~" * (node in step.dropped)
        args = torch.fx.node.map_arg((operands(node), dict(node.kwargs)), name)
        lines.append(f"{names[node]} = {node.target}{args}")
    for view in step.arguments.places:
        place = view and (view.batch, view.width, view.offset, view.head_stride, view.stride)
        lines.append(f"{view and names[view.node]} {place}")
    pools = [
        (argument, names[found.pool], name(found.write), found.order)
        for argument, found in step.pools.items()
    ]
    facts = (step.operator, pools, step.arguments.constants, step.output_dtype)
    return "\n".join([*lines, str(facts), name(step.output)])


def certify(step: Step) -> None:
    """Raise RefusalError unless the region and the operator agree in output and pool."""
    key = fingerprint(step)
    if key not in _certified:
        run_once(step)
        _certified.add(key)


def run_once(step: Step) -> None:
    """Compare, and turn every way of failing into a refusal."""
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
    """Step outside of the compiler's modes, on one thread.

    The tensors are small: starting threads costs more than they save, and on a busy machine each
    waits for a core (measured there: 0.5 s with two threads, 30 ms with one).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _disable_current_modes(), torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)


def compare(step: Step) -> None:
    """Run both sides on the same inputs, with few rows, and compare."""
    rows, few = step.scope.sizes[ROW], 2 if step.arguments.heads > MANY_HEADS else 3
    if isinstance(step.anchor.value.meta["val"].shape[0], torch.SymInt):
        compare_rows(step, few)
        return
    try:
        compare_rows(step, min(rows, few))
    except (RuntimeError, ValueError):
        # The rows are written into the graph in a place that the matcher did not have to look at.
        if rows <= few or rows * step.arguments.heads > MOST_WORK:
            raise
        compare_rows(step, rows)


def compare_rows(step: Step, rows: int) -> None:
    """Run both sides on ``rows`` rows and compare."""
    trial = Trial(step, rows, torch.Generator().manual_seed(2048))
    for node, role in step.arguments.leaves.items():
        trial.values[node] = trial.random(node, role)
    pools = {name: trial.values[found.pool].clone() for name, found in step.pools.items()}
    expected = trial.run(step.output)
    written = {name: trial.run(found.write) for name, found in step.pools.items()}
    arguments = step.arguments.emit(trial)
    for name, found in step.pools.items():
        arguments[name] = pools[name].permute(found.order)
    output = torch.empty(expected.numel(), dtype=step.output_dtype)
    shape = (rows, 1, step.arguments.heads, D)
    REFERENCES[step.operator](**arguments, output=output.view(in_order(step, shape)))
    close(step, "output", output, expected.reshape(-1))
    for name, pool in pools.items():
        close(step, name, pool, written[name].reshape(pool.shape))


def in_order(step: Step, shape: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Return the shape of an operator's output: packed_decode's rows come first."""
    rows, one, heads, width = shape
    return shape if step.operator == "packed_decode" else (one, rows, heads, width)


def close(step: Step, name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Refuse a difference beyond rounding, measured against the largest element."""
    tolerance = TOLERANCE[expected.dtype]
    left, right = found.float(), expected.float()
    worst = (left - right).abs().max().item() if left.numel() else 0.0
    largest = right.abs().max().item() if right.numel() else 0.0
    if not worst <= tolerance * (1.0 + largest):
        fact = f"{name} differs by {worst:.3g} where values reach {largest:.3g}"
        raise RefusalError(Reason.CERTIFICATE, step.output, fact)
