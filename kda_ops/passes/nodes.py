"""What a node of a graph is: a view, a cast, a repetition of an earlier node.

Lives here: the sets of operations that only move elements, which casts are exact, and nodes that
compute the same. Not here: what a view does to an index (terms.py).
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch.fx import Graph, Node
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten
prims = torch.ops.prims

RESHAPES = frozenset(
    {
        aten.reshape.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten._reshape_alias.default,
    }
)
SAME = frozenset(
    {
        aten.clone.default,
        aten.alias.default,
        aten.detach.default,
        aten.contiguous.default,
        aten.lift_fresh_copy.default,
    }
)
CASTS = frozenset({prims.convert_element_type.default, aten._to_copy.default})
SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int})
AXIS_MOVES = frozenset(
    {
        aten.expand.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.squeeze.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.cat.default,
    }
)
CONTRACTIONS = frozenset(
    {
        aten.bmm.default,
        aten.mm.default,
        aten.baddbmm.default,
        aten.addmm.default,
        aten.convolution.default,
    }
)
MOVES = frozenset(
    {
        aten.index.Tensor,
        aten.index_put.default,
        aten.copy.default,
        aten.copy_.default,
        aten.select_scatter.default,
        aten.slice_scatter.default,
        aten.full.default,
        aten.where.self,
    }
)
TAPS_AT_MOST = 8  # columns of a window, so terms of a convolution
LOW = frozenset({torch.bfloat16, torch.float16})
EXACT = {
    torch.bfloat16: {torch.float32},
    torch.float16: {torch.float32},
    torch.int32: {torch.int64},
}


def operands(node: Node) -> tuple[Any, ...]:
    """Return a node's arguments, which have no better type than Any."""
    return node.args


def repeats(graph: Graph) -> dict[Node, Node]:
    """Map every node that computes what an earlier node computes to that node."""
    first: dict[Any, Node] = {}
    same: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or is_random(node):
            continue
        arguments = torch.fx.node.map_arg(
            (operands(node), dict(node.kwargs)), lambda n: same.get(n, n)
        )
        key = (node.target, repr(arguments))
        if key in first:
            same[node] = first[key]
        else:
            first[key] = node
    return same


def is_random(node: Node) -> bool:
    """Whether a node may give another value each time, or has an effect."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is not operator.getitem
    seeded = torch.Tag.nondeterministic_seeded in node.target.tags
    return seeded or node.target._schema.is_mutable


def is_exact_cast(node: Node, position: int = 0) -> bool:
    """Whether a node of another type than its operand at ``position`` keeps every value."""
    source = operands(node)[position].meta["val"].dtype
    target = node.meta["val"].dtype
    return source == target or target in EXACT.get(source, ())


def is_view(node: Node) -> bool:
    """Whether a node only moves elements or casts them exactly."""
    if node.target in CASTS:
        return is_exact_cast(node)
    known = is_same(node) or node.target in RESHAPES | AXIS_MOVES | SPLITS
    return known or node.target is operator.getitem


def is_same(node: Node) -> bool:
    """Whether a node is its first operand: a copy, or a product with 1, as addcmul becomes one."""
    if node.target in {aten.mul.Tensor, aten.mul.Scalar} and operands(node)[1] == 1:
        return is_exact_cast(node)
    return node.target in SAME


def is_projection(node: Node) -> bool:
    """Whether a node multiplies by a matrix that is an input of the graph: no part of a step.

    The taps of a convolution are no such matrix.
    """
    if node.target not in {aten.mm.default, aten.addmm.default, aten.bmm.default}:
        return False
    width = operands(node)[-1].meta["val"].shape[-2]
    if isinstance(width, int) and width <= TAPS_AT_MOST:
        return False
    return any(is_input(viewed(operand)) for operand in operands(node)[-2:])


def viewed(node: Node) -> Node:
    """Return what a node is a view of, through exact casts too."""
    while node.op == "call_function" and is_view(node) and isinstance(operands(node)[0], Node):
        node = operands(node)[0]
    return node


def is_input(node: Node) -> bool:
    """Whether a node is an input, parameter or buffer of the graph."""
    return node.op in {"placeholder", "get_attr"}


def rounds(node: Node) -> bool:
    """Whether a node computes a value and rounds it below float32."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor):
        return False
    low = value.dtype in LOW
    return low and not is_view(node) and node.target not in MOVES


def constant_row(node: Any) -> list[int] | None:
    """Return a short row of integers that the graph computes from nothing, or None."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() > 1 or value.is_floating_point():
        return None
    known: dict[Node, Any] = {}
    if not isinstance(value.numel(), int) or value.numel() > TAPS_AT_MOST or not fixed(node, known):
        return None
    row: torch.Tensor = known[node]
    return [int(item) for item in row.reshape(-1)]


def fixed(node: Node, known: dict[Node, Any]) -> bool:
    """Compute a node that depends on no input of the graph, or return False."""
    if node.op != "call_function" or is_random(node) or len(known) > TAPS_AT_MOST:
        return False
    if not all(source in known or fixed(source, known) for source in node.all_input_nodes):
        return False
    args, kwargs = torch.fx.node.map_arg((operands(node), dict(node.kwargs)), lambda n: known[n])
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    with _disable_current_modes():
        known[node] = cast(Any, node.target)(*args, **kwargs)
    return True
