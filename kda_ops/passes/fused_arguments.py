"""Lays a whole step out as the arguments of ``kda::fused_decode``.

Lives here: the convolution's and the norm's arguments, in addition to those of the recurrence. Not
here: what the recurrence's are (arguments.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from kda_ops.passes.access import (
    Access,
    D,
    Emitter,
    access,
    by_channel,
    cast,
    check_dtypes,
    common_dtype,
    packed,
    parameter,
    unit_stride,
)
from kda_ops.passes.affine import Affine, flatten
from kda_ops.passes.arguments import Arguments
from kda_ops.passes.convolution import WIDTH, Convolution
from kda_ops.passes.core import Core
from kda_ops.passes.delta_rule import HEAD
from kda_ops.passes.gated_norm import GatedNorm
from kda_ops.passes.reasons import Reason, RefusalError
from kda_ops.passes.terms import Scope

aten = torch.ops.aten


@dataclass(frozen=True)
class Taps:
    """Where the weights lie: in one tensor, or in one for each part.

    ``sizes`` are those of all in memory order; ``order`` permutes them to (part, tap, channel).
    """

    nodes: tuple[Node, ...]
    sizes: tuple[int, int, int]
    order: tuple[int, int, int]


@dataclass(frozen=True)
class FusedArguments:
    """The arguments of ``kda::fused_decode`` for one step."""

    core: Arguments
    x: tuple[Access, Access, Access]
    taps: Taps
    conv_bias: tuple[Access, ...]
    window: Node
    output_gate: Access
    norm_weight: Access | None
    norm_eps: float

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.core.heads

    @property
    def index(self) -> Node | None:
        """The slots."""
        return self.core.index

    @property
    def activation(self) -> torch.dtype:
        """The type that the operator rounds to: that of x."""
        return self.x[0].node.meta["val"].dtype

    @property
    def places(self) -> tuple[Access | None, ...]:
        """Where every argument lies."""
        mine = (*self.x, *self.conv_bias, self.output_gate, self.norm_weight)
        return (*mine, *self.core.places[3:])

    @property
    def constants(self) -> tuple[Any, ...]:
        """The arguments that are no tensors, and where the weights lie."""
        return (self.norm_eps, self.taps.sizes, self.taps.order, *self.core.constants)

    @property
    def leaves(self) -> dict[Node, str]:
        """Every node that an argument is made of, with the argument's name."""
        named: list[tuple[Node, str]] = [(part.node, "mixed_qkv") for part in self.x]
        named += [(node, "weight") for node in self.taps.nodes]
        named += [(self.window, "conv_state")]
        named += [(self.output_gate.node, "raw_gate")]
        named += [(item.node, "dt_bias") for item in (*self.conv_bias, self.norm_weight) if item]
        parts = {part.node for part in self.core.parts}
        inner = {n: role for n, role in self.core.leaves.items() if n not in parts}
        return {**inner, **dict(reversed(named))}

    def emit(self, emit: Emitter) -> dict[str, Any]:
        """Emit the views and casts, and return the keyword arguments that are no pools."""
        dtype, width = self.activation, self.heads * D
        gate = unit_stride(emit, cast(emit, by_channel(emit, self.output_gate, self.heads), dtype))
        bias = None
        if self.conv_bias:
            length = 3 * width // len(self.conv_bias)
            bias = joined(emit, [parameter(emit, b, length) for b in self.conv_bias])
            bias = cast(emit, bias, torch.float32)
        return {
            "x": unit_stride(emit, packed(emit, self.x, self.heads)),
            "weight": self._weight(emit),
            **self.core.gates(emit, dtype),
            "output_gate": gate,
            "norm_weight": self._norm_weight(emit),
            "norm_eps": self.norm_eps,
            "conv_bias": bias,
        }

    def _weight(self, emit: Emitter) -> Any:
        """Emit [3, 4, heads * D] in one of the two layouts that the operator reads."""
        given = [emit.input(node) for node in self.taps.nodes]
        if len(given) > 1:
            given = [emit.call(aten.reshape.default, part, [-1]) for part in given]
        weight = emit.call(aten.reshape.default, joined(emit, given), list(self.taps.sizes))
        if self.taps.order != (0, 1, 2):
            weight = emit.call(aten.permute.default, weight, list(self.taps.order))
        if self.taps.order not in {(0, 1, 2), (0, 2, 1)}:
            weight = emit.call(aten.clone.default, weight, memory_format=torch.contiguous_format)
        dtype = emit.value(weight).dtype
        return weight if dtype is self.activation else cast(emit, weight, torch.float32)

    def _norm_weight(self, emit: Emitter) -> Any:
        """Emit [D] in float32."""
        if self.norm_weight is not None:
            return cast(emit, parameter(emit, self.norm_weight, D), torch.float32)
        device = emit.value(emit.input(self.window)).device
        return emit.call(aten.full.default, [D], 1.0, dtype=torch.float32, device=device)

    def described(self) -> dict[str, str]:
        """Return the arguments for people."""
        x = dict.fromkeys(part.node for part in self.x)
        bias = [item.node for item in self.conv_bias]
        return {
            "x": named_together(tuple(x) if len(x) == 1 else [part.node for part in self.x]),
            "weight": named_together(self.taps.nodes),
            "conv_state": self.window.name,
            **self.core.described_gates(),
            "output_gate": self.output_gate.node.name,
            "norm_weight": self.norm_weight.node.name if self.norm_weight else "ones",
            "norm_eps": f"{self.norm_eps:g}",
            "conv_bias": named_together(bias) if bias else "None",
        }


def named_together(nodes: Sequence[Node]) -> str:
    """Return what is said of one node, or of several that are put together."""
    names = [node.name for node in nodes]
    return names[0] if len(names) == 1 else f"cat({', '.join(names)})"


def joined(emit: Emitter, items: list[Any]) -> Any:
    """Return one item, or several one behind the other in their common type."""
    if len(items) == 1:
        return items[0]
    dtype = common_dtype([emit.value(item).dtype for item in items])
    return emit.call(aten.cat.default, [cast(emit, item, dtype) for item in items], 0)


def lay_out_fused(
    core: Core, arguments: Arguments, convolution: Convolution, norm: GatedNorm
) -> FusedArguments:
    """Find the arguments of the convolution and the norm in memory."""
    scope, update = core.scope, core.update
    along = (update.key_axis, update.key_axis, update.value_axis)
    x = [access(scope, p.x, name) for p, name in zip(convolution.parts, along, strict=True)]
    gate = access(scope, norm.gate, update.value_axis)
    check_dtypes((*x, gate))
    weight, located = norm.weight, None
    if weight is not None:
        located = access(scope, weight, update.value_axis, rows=False, per_head=False)
    if convolution.windows.first_slot is not None:
        arguments = replace(arguments, first_slot=convolution.windows.first_slot)
    return FusedArguments(
        core=arguments,
        x=(x[0], x[1], x[2]),
        taps=taps_of(scope, convolution, along),
        conv_bias=bias_of(scope, convolution, along),
        window=convolution.anchor.pool,
        output_gate=gate,
        norm_weight=located,
        norm_eps=norm.eps,
    )


def taps_of(scope: Scope, convolution: Convolution, along: tuple[str, ...]) -> Taps:
    """Find the weights of all parts, densely in one tensor or in one for each part."""
    heads = scope.sizes[HEAD]
    nodes, starts = [], []
    for part, name in zip(convolution.parts, along, strict=True):
        found = [flatten(tap.index, scope.shape(tap.node)) for tap in part.taps]
        steps = {b.constant - a.constant for a, b in itertools.pairwise(found)}
        channels = {Affine(0, position.terms) for position in found}
        if len({tap.node for tap in part.taps}) != 1 or len(steps) != 1 or len(channels) != 1:
            raise RefusalError(Reason.CONV_FORM, part.taps[0].node, "the weights lie apart")
        (position,) = channels
        stride = position.coefficient(name)
        if heads > 1 and position.coefficient(HEAD) != D * stride:
            raise RefusalError(Reason.CONV_FORM, part.taps[0].node, "heads of the weights")
        nodes.append(part.taps[0].node)
        starts.append((found[0].constant, steps.pop(), stride))
    (first, tap, channel), (second, *_), (third, *_) = starts
    apart = len(set(nodes)) == len(nodes)
    places = [first, second, third] if apart else [first, third - 2 * second, 0]
    if any(places) or {item[1:] for item in starts} != {(tap, channel)} or len(set(nodes)) == 2:
        raise RefusalError(Reason.CONV_FORM, nodes[0], "the weights of q, k and v lie apart")
    sizes = (3, WIDTH, heads * D)
    strides = (WIDTH * heads * D if apart else second, tap, channel)
    kept = tuple(nodes) if apart else tuple(nodes[:1])
    return dense_taps(scope, kept, sizes, strides)


def dense_taps(
    scope: Scope, nodes: tuple[Node, ...], sizes: tuple[int, int, int], strides: tuple[int, ...]
) -> Taps:
    """Bring strides of (part, tap, channel) into memory order; refuse gaps between elements."""
    memory = sorted(range(3), key=lambda d: -strides[d])
    expected, dense = {}, 1
    for dim in reversed(memory):
        expected[dim] = dense
        dense *= sizes[dim]
    total = sum(math.prod(scope.shape(node)) for node in nodes)
    if dense != total or any(strides[d] != expected[d] for d in range(3)):
        raise RefusalError(Reason.CONV_FORM, nodes[0], "the weights are not dense")
    a, b, c = memory
    order = (memory.index(0), memory.index(1), memory.index(2))
    return Taps(nodes, (sizes[a], sizes[b], sizes[c]), order)


def bias_of(scope: Scope, convolution: Convolution, along: tuple[str, ...]) -> tuple[Access, ...]:
    """Find the bias of all parts in one tensor [channels], or in one [channels / 3] for each."""
    terms = [part.bias for part in convolution.parts]
    if all(term is None for term in terms):
        return ()
    found = [
        access(scope, term, name, rows=False)
        for term, name in zip(terms, along, strict=True)
        if term is not None
    ]
    width = scope.sizes[HEAD] * D
    apart = [item.offset - found[0].offset for item in found]
    tidy = all(item.head_stride == D for item in found)
    one = all(item.node is found[0].node for item in found) and apart == [0, width, 2 * width]
    each = len({item.node for item in found}) == 3
    if not tidy or not (one or each):
        raise RefusalError(Reason.CONV_FORM, found[0].node, "the bias of q, k and v lies apart")
    return tuple(found) if each else (found[0],)
