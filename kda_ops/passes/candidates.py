"""Places where a graph reads and writes one state: where a delta-rule step may be.

Lives here: writes of what looks like states, and how far a state flows. Not here: whether the pool
may be worked on in place (anchors.py).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from kda_ops.passes.nodes import is_projection, operands
from kda_ops.passes.pools import SCATTERS, is_next_version
from kda_ops.passes.slots import ACCUMULATING, ROW_WRITES, regrouped

aten = torch.ops.aten
VIEWS_OF_POOL = frozenset(
    {
        aten.select.int,
        aten.slice.Tensor,
        aten.as_strided.default,
        aten.reshape.default,
        aten.view.default,
        aten.permute.default,
        aten.transpose.int,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.alias.default,
    }
)
WRITES = ROW_WRITES | {aten.copy_.default}
# What adds is looked at so that it can be said why it is no step.
SEEN = WRITES | ACCUMULATING
VALUE_AT: dict[Any, int] = {
    aten.index_put.default: 2,
    **dict.fromkeys({aten.scatter.src, *ACCUMULATING}, 3),
}


def candidates(graph: Graph) -> Iterator[Node]:
    """Yield the writes whose value is computed from a gather of, or from, what they overwrite."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in SEEN:
            continue
        given, value = operands(node)[0], written(node)
        if not isinstance(value, Node) or value.target in {operator.getitem, *SEEN}:
            continue
        pool = regrouped(given)
        if not state_like(pool) or (pool is given and not state_like(value, least=2)):
            continue
        if node.target is aten.copy_.default and value.target in VIEWS_OF_POOL | SCATTERS:
            continue
        flow = flows(sources_of(pool))
        if value in flow and contracts(value, flow):
            yield node


def written(node: Node) -> Any:
    """Return the value argument of a write."""
    return operands(node)[VALUE_AT.get(node.target, 1)]


def state_like(node: object, least: int = 3) -> bool:
    """Whether a value has matrices in its last two dimensions, as a state has."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() < least or not value.is_floating_point():
        return False
    rows, columns = value.shape[-2:]
    return bool(rows == columns) and (not isinstance(rows, int) or rows >= 16)


def sources_of(pool: Node) -> list[Node]:
    """Return the pool and, below views of it, what it is a view of."""
    nodes = [pool]
    while nodes[-1].target in VIEWS_OF_POOL and isinstance(nodes[-1].args[0], Node):
        nodes.append(nodes[-1].args[0])
    return nodes


def flows(starts: list[Node]) -> set[Node]:
    """Return every node that a value flows into, up to projections and written pools.

    What reads the next version of a pool belongs to later steps: all of a stack's in one flow would
    take time that grows with the square of their number.
    """
    reached: set[Node] = set()
    pending = list(starts)
    while pending:
        for user in pending.pop().users:
            ends = user.target is aten.copy_.default or is_projection(user)
            if user not in reached and not ends:
                reached.add(user)
                if not is_next_version(user):
                    pending.append(user)
    return reached


def contracts(value: Node, flow: set[Node]) -> bool:
    """Whether a sum or a matrix product of the state is on the way to a value."""
    sums = {aten.sum.dim_IntList, aten.bmm.default, aten.mm.default, aten.baddbmm.default}
    pending, seen = [value], {value}
    while pending:
        node = pending.pop()
        if node.target in sums:
            return True
        for source in node.all_input_nodes:
            if source in flow and source not in seen:
                seen.add(source)
                pending.append(source)
    return False
